"""Baselines of losses of logits and of a linear layer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines._common import compiled, lacks
from omniattn import reference


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    temperature: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    lacks(z_loss=z_loss, softcap=softcap, temperature=temperature != 1)
    wide = logits.float() if logits.dtype != torch.float64 else logits
    return F.cross_entropy(
        wide,
        target,
        weight=class_weight if class_weight is None else class_weight.to(wide.dtype),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def eager_cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Any:
    """Computes the definition, for options that torch lacks."""
    if not options.keys() & {"z_loss", "softcap", "temperature"}:
        raise NotImplementedError("torch has an op")
    return reference.cross_entropy(logits, target, **options)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    return cross_entropy(F.linear(x, weight, bias), target, **options)


def chunked_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    temperature: float = 1.0,
    **options: Any,
) -> Tensor:
    lacks(z_loss=z_loss, softcap=softcap, temperature=temperature != 1)
    chunks = torch.nn.LinearCrossEntropyOptions()
    loss = F.linear_cross_entropy(x, weight, target, linear_bias=bias, options=chunks, **options)
    return loss.to(torch.promote_types(x.dtype, torch.float32))


def linear_log_prob(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    lacks(**options)
    logits = F.linear(x, weight, bias).float()
    return logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def jsd(student: Tensor, teacher: Tensor, *, beta: float = 0.5, **options: Any) -> Tensor:
    """Computes the loss of TRL's GKD trainer."""
    lacks(**options)
    x, y = (t.float().log_softmax(-1) for t in (student, teacher))
    if beta == 0:
        return F.kl_div(x, y, reduction="batchmean", log_target=True)
    shifts = (math.log1p(-beta), math.log(beta))
    mixture = torch.logsumexp(torch.stack([x + shifts[0], y + shifts[1]]), 0)
    of_student, of_teacher = (
        F.kl_div(mixture, t, reduction="batchmean", log_target=True) for t in (x, y)
    )
    return beta * of_teacher + (1 - beta) * of_student


def linear_jsd(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, **options: Any
) -> Tensor:
    lacks(**options)
    return jsd(F.linear(x, weight), F.linear(teacher_x, teacher_weight))


BASELINES = {
    "cross_entropy": {
        "aten": cross_entropy,
        "compiled": compiled(cross_entropy),
        "eager": eager_cross_entropy,
    },
    "linear_cross_entropy": {
        "aten": linear_cross_entropy,
        "chunked": chunked_linear_cross_entropy,
        "compiled": compiled(linear_cross_entropy),
    },
    "linear_log_prob": {"aten": linear_log_prob, "compiled": compiled(linear_log_prob)},
    "jsd": {"aten": jsd, "compiled": compiled(jsd)},
    "linear_jsd": {"aten": linear_jsd, "compiled": compiled(linear_jsd)},
}
