"""norm and add_norm: RMSNorm and LayerNorm with an optional fused residual add."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.ops.dispatch.names import like
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.layers import norm as definitions
from omniattn.reference.precision import compute_dtype

__all__ = ["add_norm", "norm"]


def _stats(x: Tensor) -> Tensor:
    return x.new_empty((math.prod(x.shape[:-1]), 2), dtype=compute_dtype(x))


def _vector(grad_y: Tensor) -> Tensor:
    return grad_y.new_empty(grad_y.shape[-1:])


_backward_op = BackwardOp(
    "norm_backward",
    fakes={
        "dx": lambda grad_y: like(grad_y),
        "dh": lambda grad_y, h: h.new_empty(0 if h.dtype == grad_y.dtype else h.shape),
        "dweight": _vector,
        "dbias": _vector,
    },
    fold=Fold(("h", "stats")),
)


def _add_norm_backward(
    grad_y: Tensor | None, grad_h: Tensor | None, h: Tensor, *arguments: Any
) -> dict[str, Tensor | None]:
    """Returns the common gradient of x and residual (h = x + residual), in y's and h's dtypes."""
    if grad_y is None:
        return {"x": grad_h, "residual": grad_h}
    dx, dh, dweight, dbias = _backward_op.call(*arguments)
    residual = dx if dx.dtype == h.dtype else dh
    return {"x": dx, "residual": residual, "weight": dweight, "bias": dbias}


def _nothing(h: Tensor, grad_y: Tensor | None) -> Tensor:
    """Returns a zero x, so that h = x + h; derivatives by h then reach x and residual."""
    return (h - h).to(h.dtype if grad_y is None else grad_y.dtype)


norm = DifferentiableOp(
    "norm",
    fakes={"stats": _stats},
    private=("stats",),
    backward_op=_backward_op.of(h="x", grad_h=""),
    formula=lambda x, *args: definitions.norm(x, None, *args),
    fold=Fold(("x",)),
)

add_norm = DifferentiableOp(
    "add_norm",
    fakes={"h": lambda residual: like(residual), "stats": _stats},
    private=("stats",),
    backward=_add_norm_backward,
    backward_op=_backward_op,
    formula=definitions.norm,
    restored={"x": _nothing, "residual": lambda h: h},
    fold=Fold(("x", "residual")),
)
