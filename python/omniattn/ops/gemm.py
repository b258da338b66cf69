"""linear: x weight^T + bias on the register tiles of the CPU, or on the cuBLAS of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp, private_op, register_vmap

__all__ = ["linear"]

_backward_op = private_op("linear_backward")


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@_library.register_fake("linear_backward")
def _fake_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, x_grad: bool, weight_grad: bool, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if x_grad else (0,)),
        x.new_empty(weight.shape if weight_grad else (0,)),
        x.new_empty((weight.shape[0] if bias_grad else 0,)),
    )


def _backward(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    (grad_y,) = grads
    if grad_y is None:
        return None, None, None
    x, weight, _ = saved
    found = _backward_op(grad_y, x, weight, *needs)
    return tuple(grad if need else None for grad, need in zip(found, needs, strict=True))


#: (x, weight, bias) -> y
linear = DifferentiableOp(
    "linear",
    fake=_fake,
    save=lambda args, output: (args, None),
    backward=_backward,
    formula=reference.linear,
    restore=lambda saved, _: saved,
    fold=lambda *_: (0,),
)

# The gradients of weight and bias are one per element.
register_vmap("linear_backward", lambda *args: () if args[-2] or args[-1] else (0, 1))


def _linear_by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _backward_by_torch(
    grad_y: Tensor, x: Tensor, weight: Tensor, x_grad: bool, weight_grad: bool, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out_features, in_features = weight.shape
    rows = math.prod(x.shape[:-1])
    grads = grad_y.reshape(rows, out_features)
    none = x.new_empty((0,))
    return (
        grad_y @ weight if x_grad else none,
        grads.mT @ x.reshape(rows, in_features) if weight_grad else none,
        grads.sum(0) if bias_grad else none.clone(),
    )


for _name in ("linear", "linear_raw"):
    _library.compose(_name, _linear_by_torch)
_library.compose("linear_backward", _backward_by_torch)
