"""Cross entropy: `flash_attn.losses.cross_entropy`, `flash_attn.ops.triton.cross_entropy`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_number
from omniattn.compat._errors import errors_of, require_flags, require_form, require_real


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`functional.cross_entropy` of each row.

    Args:
        logits: (N, V).
        labels: (N,) int.
        precomputed_lse: not supported.
        label_smoothing: share of the uniform distribution.
        logit_scale: factor of the logits.
        lse_square_scale: factor of the square of the log-sum-exp, which is added to the loss.
        ignore_index: label of rows that do not count.
        inplace_backward: has no effect.
        process_group: not supported.

    Returns:
        losses (N,) in fp32, and their parts from `lse_square_scale` (N,), without gradient.
    """
    op = "cross_entropy_loss"
    require_real(op, logits=logits)
    require_form(op, "logits", logits, "N, V")
    require_number(op, "logit_scale", logit_scale)
    require_number(op, "lse_square_scale", lse_square_scale, 0.0)
    require_flags(op, inplace_backward=inplace_backward)
    for name, value in (("precomputed_lse", precomputed_lse), ("process_group", process_group)):
        if value is not None:
            raise NotImplementedError(f"{op}: {name} is not supported, got type {type(value)}")
    if logit_scale != 1.0:
        logits = logits.float() * logit_scale if logits.itemsize < 4 else logits * logit_scale
    with errors_of(op, target="labels", z_loss="lse_square_scale"):
        losses = functional.cross_entropy(
            logits,
            labels,
            label_smoothing=label_smoothing,
            z_loss=lse_square_scale,
            ignore_index=ignore_index,
            reduction="none",
        )
    if lse_square_scale == 0.0:
        return losses, losses.new_zeros(losses.shape)
    wide = logits.detach().to(losses.dtype)
    squares = lse_square_scale * wide.logsumexp(-1).square()
    return losses, squares.masked_fill(labels == ignore_index, 0.0)


class CrossEntropyLoss(nn.Module):
    """Computes :func:`cross_entropy_loss` and its sum or mean over rows that count.

    Args:
        ignore_index, label_smoothing, logit_scale: see :func:`cross_entropy_loss`.
        lse_square_scale, inplace_backward, process_group: see :func:`cross_entropy_loss`.
        reduction: "mean", "sum" or "none".
        return_z_loss: if True, also returns the part from `lse_square_scale`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        require_choice("CrossEntropyLoss", "reduction", reduction, ("mean", "none", "sum"))
        require_flags("CrossEntropyLoss", return_z_loss=return_z_loss)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.logit_scale = label_smoothing, logit_scale
        self.lse_square_scale, self.inplace_backward = lse_square_scale, inplace_backward
        self.process_group, self.return_z_loss = process_group, return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the loss of logits (N, V) and labels (N,), or (loss, z loss)."""
        parts = cross_entropy_loss(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        if self.reduction != "none":
            loss, squares = (part.sum() for part in parts)
            count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
            parts = loss / count, squares / count
        return parts if self.return_z_loss else parts[0]
