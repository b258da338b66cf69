"""norm_rope: RMSNorm of heads and rotary embedding in one pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp, private_op, register_vmap
from omniattn.ops.rope import is_shared, refuse_table_gradients

__all__ = ["norm_rope"]

_backward_op = private_op("norm_rope_backward")


def _sums(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:3], dtype=_sums(x))


@_library.register_fake("norm_rope_backward")
def _fake_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rstd: Tensor,
    start: int,
    interleaved: bool,
    offset: float,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[3] if weight_grad else 0, dtype=_sums(x))


def _backward(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    if grads[0] is None:
        return (None,) * 10
    start, interleaved, _, offset, _ = kept
    dx, dweight = _backward_op(grads[0], *saved, start, interleaved, offset, needs[1])
    return (dx, dweight.to(dx.dtype) if needs[1] else None, *(None,) * 8)


def _formula(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    start: int,
    interleaved: bool,
    eps: float,
    offset: float,
    cast_first: bool,
) -> Tensor:
    y, _ = reference.qk_norm_rotary(
        x,
        None,
        cos,
        sin,
        q_weight=weight,
        eps=eps,
        offset=offset,
        casting="llama" if cast_first else "fp32",
        positions=positions,
        rotary_start=start,
        interleaved=interleaved,
    )
    return y


#: (x, weight, cos, sin, positions, start, interleaved, eps, offset, cast_first) -> y
norm_rope = DifferentiableOp(
    "norm_rope",
    fake=_fake,
    save=lambda args, output: ((*args[:5], output[1]), args[5:]),
    backward=_backward,
    private_outputs=1,
    formula=_formula,
    restore=lambda saved, kept: (*saved[:5], *kept),
    refuse=functools.partial(refuse_table_gradients, "qk_norm_rotary"),
    fold=lambda x, weight, *tables: (0,) if is_shared(*tables[:3]) else (),
)


def _fold_backward(
    grad_y: Any, x: Any, weight: Any, cos: Tensor, sin: Tensor, positions: Tensor | None, *rest: Any
) -> tuple[int, ...]:
    """The gradient of the weight is one per element."""
    weight_grad = rest[-1]
    return (0, 1, 6) if is_shared(cos, sin, positions) and not weight_grad else ()


register_vmap("norm_rope_backward", _fold_backward)
