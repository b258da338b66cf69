"""norm and add_norm: RMSNorm and LayerNorm with an optional fused residual add."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp, private_op, register_vmap

__all__ = ["add_norm", "norm"]

_backward_op = private_op("norm_backward")


def _stats(x: Tensor) -> Tensor:
    rows = math.prod(x.shape[:-1])
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((rows, 2), dtype=dtype)


def _fake_norm(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _stats(x)


def _fake_add_norm(x: Tensor, residual: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), residual.new_empty(x.shape), _stats(x)


@_library.register_fake("norm_backward")
def _fake_backward(
    grad_y: Tensor,
    grad_h: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    center: bool,
    offset: float,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cols = h.shape[-1]
    dh = h.new_empty(0 if h.dtype == grad_y.dtype else h.shape)
    dweight, dbias = (
        grad_y.new_empty((cols if wanted else 0,)) for wanted in (weight_grad, bias_grad)
    )
    return grad_y.new_empty(h.shape), dh, dweight, dbias


def _save_norm(args: Any, output: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    x, weight, bias, *kept = args
    return (x, weight, bias, output[1]), kept


def _backward_norm(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    grad_y = grads[0]
    if grad_y is None:
        return (None,) * 7
    h, weight, _, stats = saved
    center, _, offset, _ = kept
    dx, _, dw, db = _backward_op(grad_y, None, h, weight, stats, center, offset, needs[1], needs[2])
    return dx, dw if needs[1] else None, db if needs[2] else None, *(None,) * 4


def _save_add_norm(args: Any, output: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    x, _, weight, bias, *options = args
    return (output[1], weight, bias, output[2]), (x.dtype, *options)


def _backward_add_norm(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    grad_y, grad_h = grads[0], grads[1]
    dtype, center, _, offset, _ = kept
    if grad_y is None:
        return (None if grad_h is None else grad_h.to(dtype), grad_h, *(None,) * 6)
    h, weight, _, stats = saved
    dx, dh, dw, db = _backward_op(
        grad_y, grad_h, h, weight, stats, center, offset, needs[2], needs[3]
    )
    return (
        dx,
        dx if h.dtype == dtype else dh,
        dw if needs[2] else None,
        db if needs[3] else None,
        *(None,) * 4,
    )


def _restore_add_norm(saved: Any, kept: Any) -> tuple[Any, ...]:
    """h = 0 + h in place of x + residual: what derives from h reaches both through it."""
    h, weight, bias, _ = saved
    dtype, *options = kept
    return ((h - h).to(dtype), h, weight, bias, *options)


def _formula(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    center: bool,
    eps: float,
    offset: float,
    cast_first: bool,
) -> Any:
    if center:
        return reference.layer_norm(x, weight, bias, eps=eps, residual=residual)
    casting = "llama" if cast_first else "fp32"
    return reference.rms_norm(x, weight, eps=eps, offset=offset, casting=casting, residual=residual)


#: (x, weight, bias, center, eps, offset, cast_first) -> y
norm = DifferentiableOp(
    "norm",
    fake=_fake_norm,
    save=_save_norm,
    backward=_backward_norm,
    private_outputs=1,
    inference="norm_only",
    formula=lambda x, *args: _formula(x, None, *args),
    restore=lambda saved, kept: (*saved[:3], *kept),
    fold=lambda *_: (0,),
)

#: (x, residual, weight, bias, center, eps, offset, cast_first) -> (y, h)
add_norm = DifferentiableOp(
    "add_norm",
    fake=_fake_add_norm,
    save=_save_add_norm,
    backward=_backward_add_norm,
    private_outputs=1,
    inference="add_norm_only",
    formula=_formula,
    restore=_restore_add_norm,
    fold=lambda *_: (0, 1),
)

# The gradients of weight and bias are one per element.
register_vmap("norm_backward", lambda *args: () if args[-2] or args[-1] else (0, 1, 2, 4))
