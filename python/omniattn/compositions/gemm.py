"""linear where no library has a kernel: the products of torch (cuBLAS)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn.ops import _library

__all__: list[str] = []


def _linear_by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, pieces: int) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _backward_by_torch(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    pieces: int,
    x_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
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
