"""cross_entropy and linear_cross_entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from omniattn import reference
from omniattn.ops._autograd import DifferentiableOp
from omniattn.ops._backward import BackwardOp
from omniattn.reference.precision import compute_dtype

__all__ = ["REDUCTIONS", "cross_entropy", "linear_cross_entropy"]

#: Name of a reduction -> its number in csrc/ops/loss.h.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

_NONE = REDUCTIONS["none"]
_NAMES = {number: name for name, number in REDUCTIONS.items()}


def loss_like(x: Tensor, reduction: int) -> Tensor:
    """Of logits or hidden states x (..., n)."""
    return x.new_empty(() if reduction else x.shape[:-1], dtype=compute_dtype(x))


def _formula(logits: Tensor, target: Tensor, *options: Any) -> Tensor:
    return reference.cross_entropy(logits, target, **_decode(options))


def _linear_formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any
) -> Tensor:
    return reference.linear_cross_entropy(x, weight, target, bias=bias, **_decode(options))


def _decode(options: Sequence[Any]) -> dict[str, Any]:
    names = ("ignore_index", "label_smoothing", "z_loss", "softcap", "reduction")
    decoded = dict(zip(names, options, strict=False))
    return decoded | {"reduction": _NAMES[decoded["reduction"]]}


_backward_op = BackwardOp(
    "cross_entropy_backward",
    fakes={
        "y": lambda logits, grad_dtype: logits.new_empty(logits.shape, dtype=grad_dtype),
    },
)

#: (logits, target, ignore_index, label_smoothing, z_loss, softcap, reduction) -> loss
cross_entropy = DifferentiableOp(
    "cross_entropy",
    fakes={
        "loss": lambda logits, reduction: loss_like(logits, reduction),
        "lse": lambda logits, target: logits.new_empty(target.numel(), dtype=compute_dtype(logits)),
    },
    private=("lse",),
    formula=_formula,
    higher_derivatives=False,
    backward_op=_backward_op.of(grad="grad_loss", y="dlogits"),
)


def _sums(x: Tensor, shape: Sequence[int], wanted: bool) -> Tensor:
    return x.new_empty(shape if wanted else (0,), dtype=compute_dtype(x))


_linear_backward_op = BackwardOp(
    "linear_cross_entropy_backward",
    fakes={"dbias": lambda x, weight: x.new_empty(weight.shape[:1])},
)


def _linear_backward(
    grad_loss: Tensor,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    reduction: int,
    *arguments: Any,
) -> dict[str, Tensor]:
    """A reduced loss scales the gradients found with it, and autograd rounds them; an unreduced one
    computes them for the weights of its rows."""
    if reduction == _NONE:
        dx, dweight, dbias = _linear_backward_op.call(*arguments)
    else:
        dx, dweight, dbias = (d * grad_loss for d in (dx, dweight, dbias))
    return {"x": dx, "weight": dweight, "bias": dbias}


def _unread(reduction: int) -> tuple[str, ...]:
    """The inputs where the gradients are found; else these, which are empty."""
    return () if reduction == _NONE else ("x", "weight", "bias", "target")


#: (x, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, reduction, x_grad,
#: weight_grad, bias_grad) -> loss in the compute dtype; with a reduction the last three must say
#: which gradients will be asked for, without one they are False
linear_cross_entropy = DifferentiableOp(
    "linear_cross_entropy",
    fakes={
        "loss": loss_like,
        "dx": lambda x, x_grad: _sums(x, x.shape, x_grad),
        "dweight": lambda x, weight, weight_grad: _sums(x, weight.shape, weight_grad),
        "dbias": lambda x, weight, bias_grad: _sums(x, weight.shape[:1], bias_grad),
    },
    private=("dx", "dweight", "dbias"),
    formula=_linear_formula,
    higher_derivatives=False,
    backward=_linear_backward,
    backward_op=_linear_backward_op.of(grad="grad_loss"),
    unsaved=_unread,
)
