"""Cross entropy over the vocabulary; the loss is fp32 (fp64 for fp64 logits)."""

import torch

from omniattn.reference.gemm import linear
from omniattn.reference.precision import widen


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """(1 - e) (lse - logit_y) + e mean_v(lse - logit_v) + z_loss lse^2, e = label_smoothing;
    logits are softcap tanh(logits / softcap) where softcap > 0.

    logits (..., V), target (...). Rows whose target is `ignore_index` give 0. "mean" divides by the
    number of the other rows and gives 0 if there are none (torch gives NaN).
    """
    logits = widen(logits)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    kept = target != ignore_index
    lse = logits.logsumexp(-1)
    hit = logits.gather(-1, target.masked_fill(~kept, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * hit + z_loss * lse.square()
    if label_smoothing > 0:
        loss = loss - label_smoothing * logits.mean(-1)
    loss = loss.masked_fill(~kept, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / kept.sum().clamp(min=1)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """cross_entropy(x W^T + b, target) with logits that are never rounded to a half dtype.

    x (..., K), weight (V, K), bias (V,), target (...).
    """
    return cross_entropy(
        linear(widen(x), weight, bias),
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
    )
