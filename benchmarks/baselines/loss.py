"""Cross entropy: torch's, of logits and of a linear layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines._common import compiled, lacks


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    lacks(z_loss=z_loss, softcap=softcap)
    return F.cross_entropy(
        logits.float() if logits.dtype != torch.float64 else logits,
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


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
    **options: Any,
) -> Tensor:
    lacks(z_loss=z_loss, softcap=softcap)
    chunks = torch.nn.LinearCrossEntropyOptions()
    loss = F.linear_cross_entropy(x, weight, target, linear_bias=bias, options=chunks, **options)
    return loss.to(torch.promote_types(x.dtype, torch.float32))


BASELINES = {
    "cross_entropy": {"aten": cross_entropy, "compiled": compiled(cross_entropy)},
    "linear_cross_entropy": {
        "aten": linear_cross_entropy,
        "chunked": chunked_linear_cross_entropy,
        "compiled": compiled(linear_cross_entropy),
    },
}
