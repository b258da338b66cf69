"""Parameter groups and learning rate schedule of the trainer, also for other training loops."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from omniattn.modules import LearnedPositional, T5RelativeBias, WindowAttention


def warmup_cosine(step: int, *, lr: float, min_lr: float, warmup: int, steps: int) -> float:
    """Returns the learning rate: linear warm-up from 0 to lr, then cosine decay to min_lr.

    Args:
        step: step, counted from 0.
        lr, min_lr: peak and final learning rate.
        warmup, steps: steps at which the peak and the final learning rate are reached.

    Reference:
        Loshchilov and Hutter, SGDR, 2016, arXiv 1608.03983.

    Example:
        >>> [warmup_cosine(s, lr=1.0, min_lr=0.1, warmup=2, steps=4) for s in (0, 1, 2, 4, 9)]
        [0.0, 0.5, 1.0, 0.1, 0.1]
    """
    if step < warmup:
        return lr * step / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * done))


class WarmupCosine(LRScheduler):
    """Schedules :func:`warmup_cosine` with each group's learning rate as the peak.

    Args:
        optimizer: any torch optimizer.
        min_lr, warmup, steps: see :func:`warmup_cosine`.
        last_epoch: number of completed steps - 1, as in torch's schedulers.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3)
        >>> schedule = WarmupCosine(optimizer, warmup=10, steps=100)
        >>> for _ in range(10):
        ...     optimizer.step()
        ...     schedule.step()
        >>> schedule.get_last_lr()
        [0.001, 0.001]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        warmup: int,
        steps: int,
        min_lr: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.warmup, self.steps, self.min_lr = warmup, steps, min_lr
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the learning rates of the groups at step `last_epoch`."""
        span = {"warmup": self.warmup, "steps": self.steps}
        return [
            warmup_cosine(self.last_epoch, lr=float(lr), min_lr=self.min_lr, **span)
            for lr in self.base_lrs
        ]


def _tables(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields lookup tables, and parameters that layers list as `undecayed`."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | LearnedPositional | T5RelativeBias):
            yield module.weight
        elif isinstance(module, WindowAttention):
            yield module.relative_position_bias_table
        for name in getattr(module, "undecayed", ()):
            yield module.get_parameter(name)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Returns parameter groups for torch.optim.AdamW, with weight decay on matrices only.

    Vectors (norms, biases), embeddings and the time scales of state-space models have no decay.
    Works for any module; parameters that do not require gradients are left out.

    Reference:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2017, arXiv 1711.05101.
    """
    tables = {id(table) for table in _tables(model)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2 and id(p) not in tables]
    others = [p for p in parameters if p.dim() < 2 or id(p) in tables]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
