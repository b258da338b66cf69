"""linear: x weight^T + bias by this package's CPU kernels, or by torch's cuBLAS."""

from __future__ import annotations

from torch import Tensor

from omniattn import reference
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.vmap import Fold

__all__ = ["linear"]


def _formula(x: Tensor, weight: Tensor, bias: Tensor | None, split_bf16: int) -> Tensor:
    return reference.linear(x, weight, bias)


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(weight.shape[:1])


#: (x, weight, bias, split_bf16) -> y
linear = DifferentiableOp(
    "linear",
    fakes={"y": lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0])), "dbias": _sums},
    formula=_formula,
    fold=Fold(("x",)),
)
