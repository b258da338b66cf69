"""Parameter groups, schedule and clipping of the trainer, also for other training loops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from omniattn.checks.arguments import require_number
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
            parameter = getattr(module, name)
            if parameter is not None:
                yield parameter


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Returns parameter groups for torch.optim.AdamW, with weight decay on matrices only.

    Without decay are vectors (norms, biases, dt_bias, D), embeddings, tables of positions, the time
    scales A of state-space models, and all parameters of RWKV outside its linear layers: its
    decays, bonuses, shifts and their low-rank factors. Parameters that do not require gradients are
    left out. Any module will do; a layer lists further parameters without decay by their names in
    its attribute `undecayed`.

    Args:
        model: any module.
        weight_decay: weight decay of the first group; that of the second one is 0.

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


def gradient_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the norm () of all gradients together, in float32 or float64.

    Parts of a gradient that is divided among ranks (a DTensor) are added up once for all that are
    divided over the same mesh.
    """
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for g in gradients:
        dtype = torch.promote_types(g.dtype, torch.float32)
        norms = by_mesh.setdefault(getattr(g, "device_mesh", None), [])
        norms.append(torch.linalg.vector_norm(g, dtype=dtype))
    found = []
    for norms in by_mesh.values():
        norm: Any = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        found.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    return torch.linalg.vector_norm(torch.stack(found)) if len(found) > 1 else found[0]


@torch.no_grad()
def scale_gradients(
    parameters: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor
) -> None:
    """Scales gradients, which have this norm (), by ``min(1, max_norm / (norm + 1e-6))``."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scales all gradients by ``min(1, max_norm / (norm + 1e-6))`` and returns their norm.

    The norm is that of all gradients together. It is computed in float32, or in float64 for such
    gradients, so that gradients in bfloat16 have the norm of their values. torch's own function
    rounds the norm of each tensor to the dtype of its gradient.

    Args:
        parameters: parameters, whose gradients are scaled in place; those without one are skipped.
        max_norm: largest norm, which may be infinite.

    Returns:
        The norm () before scaling, in float32 or float64.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_gradients([weight], max_norm=1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if max_norm != math.inf:
        require_number("clip_gradients", "max_norm", max_norm, 0)
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = gradient_norm(gradients)
    scale_gradients(parameters, max_norm, norm)
    return norm
