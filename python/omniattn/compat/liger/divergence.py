"""Divergences with Liger Kernel's names and arguments.

`accum_dtype`, `compiled` and `chunk_size` have no effect: sums are in fp32 (fp64 for fp64), nothing
is compiled, and the kernels choose the chunk size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from omniattn import functional
from omniattn.checks.arguments import clamp, require_choice, widen

__all__ = [
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearJSDLoss",
    "LigerJSD",
    "LigerKLDIVLoss",
]

_REDUCTIONS = ("none", "mean", "sum", "batchmean")


#: Inputs, weight and bias of a linear layer.
Rows = tuple[Tensor, Tensor, Tensor | None]


def detached(t: Tensor | None) -> Tensor | None:
    """Detaches a tensor of a teacher or reference model."""
    return None if t is None else t.detach()


class LigerJSD(nn.Module):
    """Computes :func:`omniattn.functional.jsd` of log-probabilities, with Liger's names.

    Args:
        beta: in [0, 1]; 0 is the forward, 1 the reverse KL divergence.
        ignore_index: rows with this label have loss 0 and do not count in the mean.

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
        """Maps log_q (N, V), log_p (N, V), shift_labels (N,) to the loss (), of log_q's dtype."""
        loss = functional.jsd(
            *(log_q, log_p.detach(), shift_labels),
            beta=self.beta,
            ignore_index=self.ignore_index,
            log_probs=True,
        )
        return loss.to(log_q.dtype)


class LigerKLDIVLoss(nn.KLDivLoss):
    """torch.nn.KLDivLoss with probabilities clamped to eps in the logarithm.

    Runs plain torch; :func:`omniattn.functional.jsd` with ``beta=0`` is its fused form on logits.

    Args:
        eps: the loss is ``y_true (ln max(y_true, eps) - y_pred)`` without `log_target`.
        size_average, reduce, reduction, log_target: see torch.nn.KLDivLoss.

    Shape:
        y_pred (N, V) log-probabilities, y_true (N, V) -> () or (N, V).

    Example:
        >>> LigerKLDIVLoss(reduction="batchmean")(torch.zeros(1, 2), torch.ones(1, 2))
        tensor(0.)
    """

    def __init__(self, eps: float = 1e-10, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        require_choice(type(self).__name__, "reduction", self.reduction, _REDUCTIONS)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """Maps y_pred (N, V), y_true (N, V) to the loss () or (N, V)."""
        if self.log_target:
            return nnf.kl_div(y_pred, y_true, reduction=self.reduction, log_target=True)
        loss = y_true * (clamp(y_true, self.eps).log() - y_pred)
        if self.reduction == "none":
            return loss
        if self.reduction == "mean":
            return loss.mean()
        return loss.sum() / (len(y_pred) if self.reduction == "batchmean" else 1)


class LigerFusedLinearJSD(nn.Module):
    """Computes :func:`omniattn.functional.linear_jsd`, with Liger's names and a detached teacher.

    Args:
        jsd_beta: in [0, 1]; 0 is the forward, 1 the reverse KL divergence.
        ignore_index: tokens with this label have loss 0 and do not count in the mean.
        temperature: divisor of the logits, above 0.
        accum_dtype: has no effect.

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
        """Computes the loss; see Shape of the class."""
        return functional.linear_jsd(
            *(student_input, student_weight, teacher_input.detach(), teacher_weight.detach()),
            shift_labels,
            beta=self.jsd_beta,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
        )


class _Distillation(nn.Module):
    """Base class of weighted sums of cross entropy and of a distance to a teacher."""

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
        self.chunk_size = chunk_size
        self.return_soft_hard_loss = return_soft_hard_loss

    def soft(
        self,
        student: Rows,
        teacher: Rows,
        labels: Tensor,
    ) -> Tensor:
        """Returns the distance of the logits, a mean over the kept tokens."""
        raise NotImplementedError

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
        """Computes the loss; see Shape of the class."""
        hard = soft = student_input.new_zeros((), dtype=torch.float32)
        if self.weight_hard_loss != 0 or self.return_soft_hard_loss:
            hard = functional.linear_cross_entropy(
                *(student_input, student_weight, true_labels),
                bias=student_bias,
                ignore_index=self.ignore_index,
            )
        if self.weight_soft_loss != 0 or self.return_soft_hard_loss:
            soft = self.soft(
                (student_input, student_weight, student_bias),
                (teacher_input.detach(), teacher_weight.detach(), detached(teacher_bias)),
                true_labels,
            )
        loss = self.weight_hard_loss * hard + self.weight_soft_loss * soft
        return (loss, soft.detach(), hard.detach()) if self.return_soft_hard_loss else loss


class LigerFusedLinearJSDLoss(_Distillation):
    """Computes a weighted sum of cross entropy and :func:`omniattn.functional.linear_jsd`.

    The loss is ``weight_hard_loss`` times the cross entropy of the labels + ``weight_soft_loss``
    times the divergence, each a mean over the kept tokens.

    Args:
        weight_hard_loss, weight_soft_loss: weights; a loss with weight 0 is not computed.
        beta, ignore_index, temperature: see :class:`LigerFusedLinearJSD`.
        compiled, chunk_size: have no effect.
        return_soft_hard_loss: also return both losses, detached.

    Shape:
        student_input (N, K), student_weight (V, K), teacher_input (N, K'), teacher_weight (V, K'),
        true_labels (N,), student_bias (V,), teacher_bias (V,) -> () or three of them. Student and
        teacher share one vocabulary.

    Example:
        >>> x, head = torch.ones(1, 2), torch.eye(2)
        >>> loss = LigerFusedLinearJSDLoss(weight_hard_loss=1.0)
        >>> loss(x, head, x, torch.zeros(2, 2), torch.tensor([0]))
        tensor(0.6931)
    """

    def soft(self, student: Rows, teacher: Rows, labels: Tensor) -> Tensor:
        return functional.linear_jsd(
            *(*student[:2], *teacher[:2]),
            labels,
            bias=student[2],
            teacher_bias=teacher[2],
            beta=self.beta,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
        )


class LigerFusedLinearCosineSimilarityLoss(_Distillation):
    """Computes a weighted sum of cross entropy and of one minus the cosine of two logits.

    The loss is ``weight_hard_loss`` times the cross entropy of the labels + ``weight_soft_loss
    beta`` times the sum over all tokens of ``1 - cos(logits, logits of the teacher)``, divided by
    the number of kept tokens: as in Liger, ignored tokens count in this sum.

    Args:
        weight_hard_loss, weight_soft_loss: weights; a loss with weight 0 is not computed.
        beta: factor of the distance.
        ignore_index: label of tokens without cross entropy.
        temperature: has no effect, as cosines do not depend on it.
        compiled: has no effect.
        chunk_size: number of tokens whose logits are in memory together.
        return_soft_hard_loss: also return both losses, detached.

    Shape:
        student_input (N, K), student_weight (V, K), teacher_input (N, K'), teacher_weight (V', K'),
        true_labels (N,), student_bias (V,), teacher_bias (V',) -> () or three of them. Where V' is
        larger than V, the student's logits of the other tokens are 0.

    Example:
        >>> x, head = torch.ones(1, 2), torch.eye(2)
        >>> loss = LigerFusedLinearCosineSimilarityLoss(weight_hard_loss=0.0, beta=1.0)
        >>> loss(x, head, x, -head, torch.tensor([0]))
        tensor(1.)
    """

    def soft(self, student: Rows, teacher: Rows, labels: Tensor) -> Tensor:
        added = len(teacher[1]) - len(student[1])

        def distance(x: Tensor, y: Tensor) -> Tensor:
            logits = nnf.pad(widen(nnf.linear(x, *student[1:])), (0, max(0, added)))
            wanted = widen(nnf.linear(y, *teacher[1:]))
            return (1 - nnf.cosine_similarity(logits, wanted, dim=-1)).sum()

        pairs = zip(*(t.split(self.chunk_size) for t in (student[0], teacher[0])), strict=True)
        sums = [checkpoint(distance, *pair, use_reentrant=False) for pair in pairs]
        kept = (labels != self.ignore_index).sum().clamp(min=1)
        return self.beta * torch.stack(sums).sum() / kept
