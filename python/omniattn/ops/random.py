"""dropout and uniform_like: elementwise draws by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops._autograd import DifferentiableOp, Op

__all__ = ["dropout", "uniform_like"]

#: (x, seed) -> fp32 in [0, 1) of x's shape; no gradient
uniform_like = Op("uniform_like", fake=lambda x, seed: x.new_empty(x.shape, dtype=torch.float32))


def _backward(
    saved: Any, p: float, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """The gradients of what was kept, by the same draws."""
    (grad_y,) = grads
    return None if grad_y is None else dropout(grad_y, *saved, p), None, None


#: (x, seed, p) -> y
dropout = DifferentiableOp(
    "dropout",
    fake=lambda x, seed, p: x.new_empty(x.shape),
    save=lambda args, output: (args[1:2], args[2]),
    backward=_backward,
    formula=lambda x, seed, p: reference.dropout(x, p, seed=seed),
    differentiable_backward=True,
)
