"""Losses under the names, and with the arguments, that they have in Liger Kernel.

`accum_dtype`, `compiled` and `chunk_size` change no result here: sums are in fp32 (fp64 for fp64),
nothing is compiled, and chunks are of a size of our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from omniattn import functional

__all__ = [
    "CrossEntropyOutput",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearJSDLoss",
    "LigerJSD",
    "LigerKLDIVLoss",
]

#: fp32 logits at a time, 64 MiB.
_BLOCK_LOGITS = 1 << 24


def _unsupported(module: nn.Module, **options: bool) -> None:
    for name, value in options.items():
        if value:
            raise NotImplementedError(
                f"{type(module).__name__}: {name} has no counterpart here, got {name}={value!r}"
            )


def detached(t: Tensor | None) -> Tensor | None:
    """Tensors of teachers and references, which get no gradient."""
    return None if t is None else t.detach()


@dataclass(frozen=True)
class CrossEntropyOutput:
    """A loss, and what was asked for with it, which gets no gradient."""

    loss: Tensor
    z_loss: Tensor | None = None  # its part of the loss
    #: Share of the kept tokens whose most probable class is the target; without reduction 0. or 1.
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None  # int64, the most probable classes; -1 of ignored tokens


#: The first of the largest logits of each token, and their logsumexp.
_Statistics = tuple[Tensor, Tensor]


class _CrossEntropy(nn.Module):
    """What both cross entropies have."""

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
        if class_weight is not None and lse_square_scale != 0:
            raise NotImplementedError(
                f"{type(self).__name__}: lse_square_scale must be 0 with class weights (z_loss of "
                "functional.cross_entropy multiplies it by the weight of the target, Liger does "
                f"not), got lse_square_scale={lse_square_scale!r}"
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
        """The options, for print(module)."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    @torch.no_grad()
    def _with_statistics(
        self, loss: Tensor, target: Tensor, *of_logits: Tensor | None
    ) -> Tensor | CrossEntropyOutput:
        """The loss, with what is returned beside it for logits, or for x, weight and bias."""
        if not (self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens):
            return loss
        reduction, kept = self.options["reduction"], target != self.options["ignore_index"]
        count = kept.sum().clamp(min=1)
        with torch.autocast(target.device.type, enabled=False):
            index, lse = self._statistics(*of_logits)
        index = index.masked_fill(~kept, -1)
        z_loss = (self.options["z_loss"] * lse.square()).masked_fill(~kept, 0)
        hits = ((index == target) & kept).float()
        if reduction != "none":
            z_loss = z_loss.sum() / (count if reduction == "mean" else 1)
            hits = hits.sum() / count
        return CrossEntropyOutput(
            loss,
            z_loss if self.return_z_loss else None,
            hits if self.return_token_accuracy else None,
            index if self.return_predicted_tokens else None,
        )

    def _statistics(self, *of_logits: Tensor | None) -> _Statistics:
        raise NotImplementedError

    def _capped(self, logits: Tensor) -> Tensor:
        softcap = self.options["softcap"]
        return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits


class LigerCrossEntropyLoss(_CrossEntropy):
    """:func:`omniattn.functional.cross_entropy` under Liger's names.

    Args:
        weight: (V,) class weights, or None.
        lse_square_scale: weight of the z-loss, 0 with class weights.
        ignore_index, label_smoothing, reduction, softcap: see the function.
        return_z_loss, return_token_accuracy, return_predicted_tokens: give a `CrossEntropyOutput`;
            each reads the logits once more.

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
        """_input (N, V), target (N,) -> () or (N,)."""
        loss = functional.cross_entropy(
            _input, target, class_weight=self.class_weight, **self.options
        )
        return self._with_statistics(loss, target, _input)

    def _statistics(self, *of_logits: Tensor | None) -> _Statistics:
        (logits,) = of_logits
        assert logits is not None
        top, index = logits.max(-1)
        nearest = functional.cross_entropy(
            logits, index, softcap=self.options["softcap"], ignore_index=-1, reduction="none"
        )
        return index, nearest + self._capped(top.to(nearest.dtype))


class LigerFusedLinearCrossEntropyLoss(_CrossEntropy):
    """:func:`omniattn.functional.linear_cross_entropy` under Liger's names.

    Args:
        ce_weight: (V,) class weights, or None.
        lse_square_scale: weight of the z-loss, 0 with class weights.
        ignore_index, label_smoothing, reduction, softcap: see the function.
        accum_dtype: changes nothing.
        use_token_scaling: must be False.
        return_z_loss, return_token_accuracy, return_predicted_tokens: give a `CrossEntropyOutput`,
            for one more product, of a block of classes at a time.

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
        _unsupported(self, use_token_scaling=use_token_scaling)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """lin_weight (V, K), _input (N, K), target (N,), bias (V,) -> () or (N,)."""
        loss = functional.linear_cross_entropy(
            _input, lin_weight, target, bias=bias, class_weight=self.class_weight, **self.options
        )
        return self._with_statistics(loss, target, _input, lin_weight, bias)

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


class LigerJSD(nn.Module):
    """:func:`omniattn.functional.jsd` of log-probabilities under Liger's names.

    Args:
        beta: in [0, 1]; 0 is the forward, 1 the reverse KL divergence.
        ignore_index: rows with this label give 0 and are not counted by the mean.

    Shape:
        log_q (N, V) of the student, log_p (N, V) of the teacher, shift_labels (N,) -> ().

    Example:
        >>> even = torch.zeros(1, 2).log_softmax(-1)
        >>> LigerJSD()(even, even).abs()
        tensor(0.)
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta = beta
        self.ignore_index = ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """log_q (N, V), log_p (N, V), shift_labels (N,) -> ()."""
        return functional.jsd(
            *(log_q, log_p.detach(), shift_labels),
            beta=self.beta,
            ignore_index=self.ignore_index,
            log_probs=True,
        )


class LigerKLDIVLoss(nn.KLDivLoss):
    """torch.nn.KLDivLoss with a least probability in the logarithm of targets that are none.

    Plain torch; :func:`omniattn.functional.jsd` with ``beta=0`` is the same of logits, fused.

    Args:
        eps: ``y_true (ln max(y_true, eps) - y_pred)`` without `log_target`.
        size_average, reduce, reduction, log_target: see torch.nn.KLDivLoss.

    Shape:
        y_pred (N, V) log-probabilities, y_true (N, V) -> () or (N, V).

    Example:
        >>> LigerKLDIVLoss(reduction="batchmean")(torch.zeros(1, 2), torch.ones(1, 2))
        tensor(0.)
    """

    def __init__(self, eps: float = 1e-10, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """y_pred (N, V), y_true (N, V) -> () or (N, V)."""
        if self.log_target:
            return nnf.kl_div(y_pred, y_true, reduction=self.reduction, log_target=True)
        loss = y_true * (y_true.clamp(min=self.eps).log() - y_pred)
        if self.reduction == "none":
            return loss
        if self.reduction == "mean":
            return loss.mean()
        return loss.sum() / (len(y_pred) if self.reduction == "batchmean" else 1)


class LigerFusedLinearJSD(nn.Module):
    """:func:`omniattn.functional.linear_jsd` under Liger's names; the teacher gets no gradient.

    Args:
        jsd_beta: in [0, 1]; 0 is the forward, 1 the reverse KL divergence.
        ignore_index: tokens with this label give 0 and are not counted by the mean.
        temperature: above 0.
        accum_dtype: changes nothing.

    Shape:
        student_input (N, K), student_weight (V, K), teacher_input (N, K'), teacher_weight (V, K'),
        shift_labels (N,) or None -> ().

    Example:
        >>> x, head = torch.ones(1, 2), torch.eye(2)
        >>> LigerFusedLinearJSD()(x, head, x, torch.zeros(2, 2), None)
        tensor(0.)
    """

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.jsd_beta = jsd_beta
        self.temperature = temperature
        self.ignore_index = ignore_index

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """As in Shape of the class."""
        return functional.linear_jsd(
            *(student_input, student_weight, teacher_input.detach(), teacher_weight.detach()),
            shift_labels,
            beta=self.jsd_beta,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
        )


class LigerFusedLinearJSDLoss(nn.Module):
    """``weight_hard_loss`` times the cross entropy of the labels + ``weight_soft_loss`` times
    :func:`omniattn.functional.linear_jsd`, each a mean over the kept tokens.

    Args:
        weight_hard_loss, weight_soft_loss: numbers; what has weight 0 is not computed.
        beta, ignore_index, temperature: see :class:`LigerFusedLinearJSD`.
        compiled, chunk_size: change nothing.
        return_soft_hard_loss: also return both losses, without a gradient.

    Shape:
        student_input (N, K), student_weight (V, K), teacher_input (N, K'), teacher_weight (V, K'),
        true_labels (N,), student_bias (V,), teacher_bias (V,) -> () or three of them. Student and
        teacher have one vocabulary.

    Example:
        >>> x, head = torch.ones(1, 2), torch.eye(2)
        >>> loss = LigerFusedLinearJSDLoss(weight_hard_loss=1.0)
        >>> loss(x, head, x, torch.zeros(2, 2), torch.tensor([0]))
        tensor(0.6931)
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        self.weight_hard_loss = weight_hard_loss
        self.weight_soft_loss = weight_soft_loss
        self.beta = beta
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.return_soft_hard_loss = return_soft_hard_loss

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """As in Shape of the class."""
        hard = soft = student_input.new_zeros((), dtype=torch.float32)
        if self.weight_hard_loss != 0 or self.return_soft_hard_loss:
            hard = functional.linear_cross_entropy(
                *(student_input, student_weight, true_labels),
                bias=student_bias,
                ignore_index=self.ignore_index,
            )
        if self.weight_soft_loss != 0 or self.return_soft_hard_loss:
            soft = functional.linear_jsd(
                *(student_input, student_weight, teacher_input.detach(), teacher_weight.detach()),
                true_labels,
                bias=student_bias,
                teacher_bias=detached(teacher_bias),
                beta=self.beta,
                temperature=self.temperature,
                ignore_index=self.ignore_index,
            )
        loss = self.weight_hard_loss * hard + self.weight_soft_loss * soft
        return (loss, soft.detach(), hard.detach()) if self.return_soft_hard_loss else loss
