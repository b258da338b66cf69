"""cross_entropy with probabilities as targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from omniattn.ops.loss import REDUCTIONS
from omniattn.reference.precision import compute_dtype

__all__ = ["soft_cross_entropy"]


def soft_cross_entropy(
    cross_entropy: Callable[..., Tensor],
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    temperature: float,
    reduction: int,
) -> Tensor:
    """Computes sum_v w_v ((1 - e) p_v + e / V) (lse - x_v) per row, with target probabilities p.

    lse is the sum of the largest logit and the cross entropy of its class, so that large equal
    logits lose no digits.
    """
    x = logits.to(compute_dtype(logits))
    if softcap > 0:
        x = softcap * torch.tanh(x / softcap)
    x, p = x / temperature, target.to(x.dtype)
    q = (1 - label_smoothing) * p + label_smoothing / max(1, x.shape[-1])
    if class_weight is not None:
        p, q = class_weight * p, class_weight * q
    top, index = x.max(-1, keepdim=True)
    options = (-1, 0.0, 0.0, 0.0, 1.0, REDUCTIONS["none"])
    nearest = cross_entropy(x, index.squeeze(-1), None, *options)
    gap = top - x
    gap = gap.masked_fill(gap.isinf() & (q == 0), 0)  # classes with logit -inf and q = 0
    loss = nearest * q.sum(-1) + (q * gap).sum(-1)
    if z_loss > 0:
        loss = loss + z_loss * p.sum(-1) * (nearest + top.squeeze(-1)).square()
    if reduction == REDUCTIONS["none"]:
        return loss
    return loss.sum() / (max(1, loss.numel()) if reduction == REDUCTIONS["mean"] else 1)
