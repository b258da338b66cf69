"""dropout and uniform_like: counter-based random numbers per element."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops.dispatch.autograd import DifferentiableOp, Op

__all__ = ["dropout", "uniform_like"]

#: (x, seed) -> fp32 in [0, 1) of x's shape; no gradient
uniform_like = Op(
    "uniform_like",
    fakes={"y": lambda x: x.new_empty(x.shape, dtype=torch.float32)},
    formula=lambda x, seed: reference.uniform_like(x, seed=seed),
)


def _backward(grad_y: Tensor, seed: Tensor, p: float) -> dict[str, Tensor]:
    """Returns the gradients of the kept elements, from the same random numbers."""
    return {"x": dropout(grad_y, seed, p)}


#: (x, seed, p) -> y
dropout = DifferentiableOp(
    "dropout",
    backward=_backward,
    formula=lambda x, seed, p: reference.dropout(x, p, seed=seed),
    differentiable_backward=True,
)
