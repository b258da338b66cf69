"""Cross entropies with Liger Kernel's names and arguments.

`accum_dtype` has no effect: sums are in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_choice, shown
from omniattn.functional.losses._common import REDUCTIONS

__all__ = ["CrossEntropyOutput", "LigerCrossEntropyLoss", "LigerFusedLinearCrossEntropyLoss"]

#: Number of fp32 logits computed at a time, 64 MiB.
_BLOCK_LOGITS = 1 << 24


@dataclass(frozen=True)
class CrossEntropyOutput:
    """A loss and the requested statistics, which have no gradient."""

    loss: Tensor
    z_loss: Tensor | None = None  # part of the loss, in the dtype of the input
    #: Share of the kept tokens whose most probable class is the target; 0. or 1. without reduction.
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None  # int64, most probable classes; -1 for ignored tokens


#: Index of each token's (first) largest logit, and logsumexp of its logits.
_Statistics = tuple[Tensor, Tensor]


class _CrossEntropy(nn.Module):
    """Base class of both cross entropies, with their options."""

    def __init__(
        self,
        class_weight: Tensor | None,
        ignore_index: int,
        lse_square_scale: float,
        label_smoothing: float,
        reduction: str,
        softcap: float | None,
        return_z_loss: bool,
        return_token_accuracy: bool,
        return_predicted_tokens: bool,
    ) -> None:
        super().__init__()
        require_choice(type(self).__name__, "reduction", reduction, REDUCTIONS)
        if class_weight is not None and lse_square_scale != 0:
            raise NotImplementedError(
                f"{type(self).__name__}: lse_square_scale must be 0 with class weights (z_loss of "
                "functional.cross_entropy multiplies it by the weight of the target, Liger does "
                f"not), got lse_square_scale={shown(lse_square_scale)}"
            )
        self.class_weight = class_weight
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": lse_square_scale,
            "softcap": softcap or 0.0,
            "reduction": reduction,
        }
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def extra_repr(self) -> str:
        """Returns the options for print(module)."""
        return ", ".join(f"{name}={shown(value)}" for name, value in self.options.items())

    @torch.no_grad()
    def _with_statistics(
        self,
        loss: Tensor,
        target: Tensor,
        x: Tensor,
        *others: Tensor | None,
        factor: Tensor | float = 1.0,
    ) -> Tensor | CrossEntropyOutput:
        """Returns the loss and the requested statistics of logits x, or of x, weight and bias.

        `factor` multiplies the loss of each token.
        """
        if not (self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens):
            return loss
        reduction, kept = self.options["reduction"], target != self.options["ignore_index"]
        count = kept.sum().clamp(min=1)
        with torch.autocast(target.device.type, enabled=False):
            index, lse = self._statistics(x, *others)
        index = index.masked_fill(~kept, -1)
        z_loss = (self.options["z_loss"] * lse.square() * factor).masked_fill(~kept, 0)
        hits = ((index == target) & kept).float()
        if reduction != "none":
            z_loss = z_loss.sum() / (count if reduction == "mean" else 1)
            hits = hits.sum() / count
        return CrossEntropyOutput(
            loss,
            z_loss.to(x.dtype) if self.return_z_loss else None,
            hits if self.return_token_accuracy else None,
            index if self.return_predicted_tokens else None,
        )

    def _statistics(self, *of_logits: Tensor | None) -> _Statistics:
        raise NotImplementedError

    def _capped(self, logits: Tensor) -> Tensor:
        softcap = self.options["softcap"]
        return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits


class LigerCrossEntropyLoss(_CrossEntropy):
    """Computes :func:`omniattn.functional.cross_entropy`, with Liger's names.

    Args:
        weight: (V,) class weights, or None.
        lse_square_scale: weight of the z-loss, 0 with class weights.
        ignore_index, label_smoothing, reduction, softcap: see the function.
        return_z_loss, return_token_accuracy, return_predicted_tokens: return a
            `CrossEntropyOutput`; each reads the logits once more.

    Shape:
        _input (N, V), target (N,) -> () or (N,).

    Example:
        >>> LigerCrossEntropyLoss()(torch.zeros(1, 2), torch.tensor([1]))
        tensor(0.6931)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__(
            *(weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap),
            *(return_z_loss, return_token_accuracy, return_predicted_tokens),
        )

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """Maps _input (N, V), target (N,) to the loss () or (N,), of _input's dtype."""
        loss = functional.cross_entropy(
            _input, target, class_weight=self.class_weight, **self.options
        )
        return self._with_statistics(loss.to(_input.dtype), target, _input)

    def _statistics(self, *of_logits: Tensor | None) -> _Statistics:
        (logits,) = of_logits
        assert logits is not None
        top, index = logits.max(-1)
        nearest = functional.cross_entropy(
            logits, index, softcap=self.options["softcap"], ignore_index=-1, reduction="none"
        )
        return index, nearest + self._capped(top.to(nearest.dtype))


class LigerFusedLinearCrossEntropyLoss(_CrossEntropy):
    """Computes :func:`omniattn.functional.linear_cross_entropy`, with Liger's names.

    Args:
        ce_weight: (V,) class weights, or None.
        lse_square_scale: weight of the z-loss, 0 with class weights.
        ignore_index, label_smoothing, reduction, softcap: see the function.
        accum_dtype: has no effect.
        use_token_scaling: multiply the loss of each token by the detached probability of its
            target; costs one more matrix product.
        return_z_loss, return_token_accuracy, return_predicted_tokens: return a
            `CrossEntropyOutput`; costs one more matrix product, in blocks of classes.

    Shape:
        lin_weight (V, K), _input (N, K), target (N,), bias (V,) -> () or (N,).

    Example:
        >>> LigerFusedLinearCrossEntropyLoss()(
        ...     torch.zeros(4, 2), torch.ones(1, 2), torch.tensor([1])
        ... )
        tensor(1.3863)
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__(
            *(ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap),
            *(return_z_loss, return_token_accuracy, return_predicted_tokens),
        )
        self.use_token_scaling = use_token_scaling

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """Maps lin_weight (V, K), _input (N, K), target (N,), bias (V,) to the loss () or (N,)."""
        options = self.options | {"bias": bias, "class_weight": self.class_weight}
        of_logits = (_input, lin_weight, bias)
        if not self.use_token_scaling:
            loss = functional.linear_cross_entropy(_input, lin_weight, target, **options)
            return self._with_statistics(loss, target, *of_logits)
        options |= {"reduction": "none"}
        losses = functional.linear_cross_entropy(_input, lin_weight, target, **options)
        factor = self._probability(_input, lin_weight, target, bias)
        loss = self._reduced(losses * factor, target)
        return self._with_statistics(loss, target, *of_logits, factor=factor)

    @torch.no_grad()
    def _probability(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
    ) -> Tensor:
        options = {name: self.options[name] for name in ("ignore_index", "softcap")}
        return functional.linear_log_prob(x, weight, target, bias=bias, **options).exp()

    def _reduced(self, losses: Tensor, target: Tensor) -> Tensor:
        reduction, kept = self.options["reduction"], target != self.options["ignore_index"]
        if reduction == "none":
            return losses
        if reduction == "sum":
            return losses.sum()
        weights = kept.to(losses.dtype)
        if self.class_weight is not None:
            weights = weights * self.class_weight[target.where(kept, 0)]
        total = weights.sum()
        return losses.sum() / total.where(total > 0, 1)

    def _statistics(self, *of_logits: Tensor | None) -> _Statistics:
        x, weight, bias = of_logits
        assert x is not None and weight is not None
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = x.to(wide)
        best = rows.new_full(x.shape[:-1], -torch.inf)
        index, lse = torch.zeros_like(best, dtype=torch.int64), best
        size = max(1, _BLOCK_LOGITS // max(1, best.numel()))
        for first in range(0, len(weight), size):
            part = slice(first, first + size)
            logits = rows @ weight[part].to(wide).mT
            logits = self._capped(logits if bias is None else logits + bias[part])
            top, at = logits.max(-1)
            index = torch.where(top > best, at + first, index)
            best, lse = torch.maximum(best, top), torch.logaddexp(lse, logits.logsumexp(-1))
        return index, lse
