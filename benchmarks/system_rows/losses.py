"""Rows of preference losses with the head, against losses of all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as torch_F
from torch import Tensor

from omniattn import functional as F
from system_rows.system import Provider, System, functions, normal

B, T, WIDTH, V = 4, 128, 256, 8192

Loss = Callable[[Tensor], Tensor]


def _target() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the log-probabilities (B, T) of the targets, with all logits in memory."""
    logits = torch_F.linear(x, weight).log_softmax(-1)
    return logits.gather(-1, _target()[..., None])[..., 0]


def _of_head(ours: Loss, formula: Loss) -> Callable[[], dict[str, Provider]]:
    """Makes providers of the head followed by each loss of log-probabilities (B, T)."""
    return lambda: functions(
        [normal(B, T, WIDTH), (0.1 * normal(V, WIDTH)).detach().requires_grad_()],
        ours=lambda x, w: ours(F.linear_log_prob(x, w, _target())),
        eager=lambda x, w: formula(_logits(x, w)),
    )


def _pair(log_prob: Tensor, average: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of the chosen and of the rejected sequences."""
    rows = log_prob.mean(-1) if average else log_prob.sum(-1)
    chosen, rejected = rows.chunk(2)
    return chosen, rejected


def _dpo(log_prob: Tensor) -> Tensor:
    chosen, rejected = _pair(log_prob)
    return -torch_F.logsigmoid(0.1 * (chosen - rejected)).mean()


def _simpo(log_prob: Tensor) -> Tensor:
    chosen, rejected = _pair(log_prob, average=True)
    return -torch_F.logsigmoid(2.0 * (chosen - rejected) - 1.0).mean()


def _kto(log_prob: Tensor) -> Tensor:
    rows, sign = 0.1 * log_prob.sum(-1), torch.tensor([1.0, 1.0, -1.0, -1.0])
    return (1 - (sign * rows).sigmoid()).mean()


def _grpo(log_prob: Tensor) -> Tensor:
    ratio = (log_prob - log_prob.detach()).exp()
    gain = ADVANTAGES[:, None]
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


ADVANTAGES = torch.linspace(-1, 1, B)
SIZES = f"B{B}T{T}K{WIDTH}V{V}"
EVERY = torch.ones(B, T)


def _row(name: str, ours: Loss, formula: Loss) -> System:
    return System(f"{name}-{SIZES}", _of_head(ours, formula))


def _mean(loss: Any) -> Tensor:
    first: Tensor = loss[0] if isinstance(loss, tuple) else loss
    return first.mean()


LOSSES: dict[str, tuple[System, ...]] = {
    "direct preference optimisation: sigmoid, conservative, robust, hinge, IPO, EXO, NCA, BCO, "
    "SPPO, APO, DiscoPOP": (_row("dpo", lambda x: _mean(F.dpo_loss(*_pair(x))), _dpo),),
    "reference-free preference optimisation: CPO, SimPO, ORPO": (
        _row(
            "simpo",
            lambda x: _mean(F.simpo_loss(*_pair(x, average=True), beta=2.0, gamma=1.0)),
            _simpo,
        ),
    ),
    "unpaired preference optimisation: KTO": (
        _row(
            "kto",
            lambda x: _mean(
                F.kto_loss(x.sum(-1), torch.tensor([True, True, False, False]), beta=0.1)
            ),
            _kto,
        ),
    ),
    "group relative policy optimisation: GRPO, Dr. GRPO, DAPO, CISPO, GSPO, SAPO, LUSPO, VESPO": (
        _row("grpo", lambda x: _mean(F.grpo_loss(x, ADVANTAGES, EVERY, beta=0.0)), _grpo),
    ),
}
