"""cross_entropy and jsd of logits, and their fused linear forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from omniattn import reference
from omniattn.encoding.losses import CrossEntropy, Divergence
from omniattn.ops.derivatives.losses import loss_pieces
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.ops.dispatch.library import CONSTANTS
from omniattn.ops.dispatch.pieces import Pieces
from omniattn.reference.losses.loss import cross_entropy_of_rows, jsd_of_rows
from omniattn.reference.precision import compute_dtype

__all__ = ["REDUCTIONS", "cross_entropy", "jsd", "linear_cross_entropy", "linear_jsd"]

#: Name of a reduction -> its number in csrc/ops/losses/loss.h.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

_NONE = REDUCTIONS["none"]
_NAMES = {number: name for name, number in REDUCTIONS.items()}
_CROSS_ENTROPY = ("ignore_index", "label_smoothing", "z_loss", "softcap", "temperature")
#: Number of statistics per row that jsd saves for its backward.
_STATISTICS = CONSTANTS["divergence_statistics"]


def loss_like(x: Tensor, reduction: int) -> Tensor:
    """Returns an empty loss for logits or hidden states x (..., n)."""
    return x.new_empty(() if reduction else x.shape[:-1], dtype=compute_dtype(x))


def _named(names: Sequence[str], options: Sequence[Any]) -> dict[str, Any]:
    """Returns the options and the reduction by name, without the arguments after them."""
    *values, reduction = options[: len(names) + 1]
    return dict(zip(names, values, strict=True)) | {"reduction": _NAMES[reduction]}


def _formula(logits: Tensor, target: Tensor, class_weight: Tensor | None, *options: Any) -> Tensor:
    named = _named(_CROSS_ENTROPY, options)
    return reference.cross_entropy(logits, target, class_weight=class_weight, **named)


def _linear_formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    *options: Any,
) -> Tensor:
    named = _named(_CROSS_ENTROPY, options)
    return reference.linear_cross_entropy(
        x, weight, target, bias=bias, class_weight=class_weight, **named
    )


def _cross_entropy_pieces(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, *options: Any
) -> Pieces | None:
    named = _named(_CROSS_ENTROPY, options)

    def of_rows(logits: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        return cross_entropy_of_rows(logits, target, CrossEntropy(class_weight=weight, **named))

    tensors = (logits, target, class_weight)
    return loss_pieces(of_rows, tensors, named["reduction"], whole=(2,))


def _jsd_pieces(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    ignore_index: int,
    beta: float,
    temperature: float,
    log_probs: bool,
    reduction: int,
) -> Pieces | None:
    record = Divergence(beta=beta, temperature=temperature, ignore_index=ignore_index)

    def of_rows(student: Tensor, teacher: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor]:
        return jsd_of_rows(student, teacher, target, record, log_probs)

    return loss_pieces(of_rows, (student, teacher, target), _NAMES[reduction])


def _jsd_formula(student: Tensor, teacher: Tensor, target: Tensor | None, *options: Any) -> Tensor:
    named = _named(("ignore_index", "beta", "temperature", "log_probs"), options)
    return reference.jsd(student, teacher, target, **named)


def _linear_jsd_formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    target: Tensor | None,
    *options: Any,
) -> Tensor:
    named = _named(("ignore_index", "beta", "temperature"), options)
    return reference.linear_jsd(
        *(x, weight, teacher_x, teacher_weight, target),
        bias=bias,
        teacher_bias=teacher_bias,
        **named,
    )


def _refuse_class_weight(class_weight_grad: bool) -> None:
    if class_weight_grad:
        raise ValueError("cross_entropy: class_weight gets no gradient; detach it")


def _refuse_teacher(teacher_grad: bool) -> None:
    if teacher_grad:
        raise ValueError("jsd: teacher gets no gradient; detach it")


def _refuse_linear_teacher(
    teacher_x_grad: bool, teacher_weight_grad: bool, teacher_bias_grad: bool
) -> None:
    if teacher_x_grad or teacher_weight_grad or teacher_bias_grad:
        raise ValueError("linear_jsd: the teacher gets no gradient; detach its tensors")


_backward_op = BackwardOp(
    "cross_entropy_backward",
    fakes={"y": lambda logits, grad_dtype: logits.new_empty(logits.shape, dtype=grad_dtype)},
)


def _per_row(logits: Tensor, target: Tensor) -> Tensor:
    return logits.new_empty(target.numel(), dtype=compute_dtype(logits))


#: (logits, target, class_weight, ignore_index, label_smoothing, z_loss, softcap, temperature,
#: reduction) -> loss
cross_entropy = DifferentiableOp(
    "cross_entropy",
    fakes={"loss": lambda logits, reduction: loss_like(logits, reduction)}
    | dict.fromkeys(("row_max", "log_sum"), _per_row),
    private=("row_max", "log_sum"),
    formula=_formula,
    pieces=_cross_entropy_pieces,
    backward_op=_backward_op.of(grad="grad_loss", y="dlogits"),
    refuse=_refuse_class_weight,
)

_jsd_backward_op = BackwardOp(
    "jsd_backward",
    fakes={"y": lambda student, grad_dtype: student.new_empty(student.shape, dtype=grad_dtype)},
)

#: (student, teacher, target, ignore_index, beta, temperature, log_probs, reduction) -> loss
jsd = DifferentiableOp(
    "jsd",
    fakes={
        "loss": lambda student, reduction: loss_like(student, reduction),
        "statistics": lambda student: student.new_empty(
            (student.shape[:-1].numel(), _STATISTICS), dtype=compute_dtype(student)
        ),
    },
    private=("statistics",),
    formula=_jsd_formula,
    pieces=_jsd_pieces,
    backward_op=_jsd_backward_op.of(grad="grad_loss", y="dstudent"),
    refuse=_refuse_teacher,
)


def _sums(x: Tensor, shape: Sequence[int], wanted: bool) -> Tensor:
    return x.new_empty(shape if wanted else (0,), dtype=compute_dtype(x))


_LINEAR_FAKES: dict[str, Callable[..., Tensor]] = {
    "loss": loss_like,
    "dx": lambda x, x_grad: _sums(x, x.shape, x_grad),
    "dweight": lambda x, weight, weight_grad: _sums(x, weight.shape, weight_grad),
    "dbias": lambda x, weight, bias_grad: _sums(x, weight.shape[:1], bias_grad),
}
_BACKWARD_FAKES = {"dbias": lambda x, weight: x.new_empty(weight.shape[:1])}
_linear_backward_op = BackwardOp("linear_cross_entropy_backward", fakes=_BACKWARD_FAKES)
_linear_jsd_backward_op = BackwardOp("linear_jsd_backward", fakes=_BACKWARD_FAKES)


def _backward_of(op: BackwardOp) -> Any:
    def backward(
        grad_loss: Tensor,
        dx: Tensor,
        dweight: Tensor,
        dbias: Tensor,
        reduction: int,
        *arguments: Any,
    ) -> dict[str, Tensor]:
        """Scales the saved gradients of a reduced loss; computes the gradients of an unreduced one.

        Autograd rounds scaled gradients to the dtype of their arguments.
        """
        if reduction == _NONE:
            dx, dweight, dbias = op.call(*arguments)
        else:
            dx, dweight, dbias = (d * grad_loss for d in (dx, dweight, dbias))
        return {"x": dx, "weight": dweight, "bias": dbias}

    return backward


def _unread(reduction: int) -> tuple[str, ...]:
    """Names inputs that the backward does not need: a reduced forward computes the gradients."""
    return () if reduction == _NONE else ("x", "weight", "bias", "target", "class_weight")


def _unread_by_jsd(reduction: int) -> tuple[str, ...]:
    teacher = ("teacher_x", "teacher_weight", "teacher_bias")
    return () if reduction == _NONE else ("x", "weight", "bias", *teacher, "target")


#: (x, weight, bias, target, class_weight, ignore_index, label_smoothing, z_loss, softcap,
#: temperature, reduction, x_grad, weight_grad, bias_grad) -> loss in the compute dtype; with a
#: reduction the last three must say which gradients will be asked for, without one they are False
linear_cross_entropy = DifferentiableOp(
    "linear_cross_entropy",
    fakes=_LINEAR_FAKES,
    private=("dx", "dweight", "dbias"),
    formula=_linear_formula,
    higher_derivatives=False,
    backward=_backward_of(_linear_backward_op),
    backward_op=_linear_backward_op.of(grad="grad_loss"),
    unsaved=_unread,
    refuse=_refuse_class_weight,
)

#: (x, weight, bias, teacher_x, teacher_weight, teacher_bias, target, ignore_index, beta,
#: temperature, reduction, x_grad, weight_grad, bias_grad) -> loss, as linear_cross_entropy
linear_jsd = DifferentiableOp(
    "linear_jsd",
    fakes=_LINEAR_FAKES,
    private=("dx", "dweight", "dbias"),
    formula=_linear_jsd_formula,
    higher_derivatives=False,
    backward=_backward_of(_linear_jsd_backward_op),
    backward_op=_linear_jsd_backward_op.of(grad="grad_loss"),
    unsaved=_unread_by_jsd,
    refuse=_refuse_linear_teacher,
)
