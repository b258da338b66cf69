"""rope: rotary embedding of q and k, out of place and in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp, is_transformed
from omniattn.reference.vmap import is_mapped

__all__ = ["rope", "rope_inplace"]

_inplace_op = torch.ops.omniattn.rope_.default


def _fake(q: Tensor, k: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((0,) if k is None else k.shape)


@_library.register_fake("rope_")
def _fake_inplace(*args: Any) -> None:
    return None


def _save(args: Any, output: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    _, _, cos, sin, positions, *kept = args
    return (cos, sin, positions), kept


def refuse_table_gradients(op: str, needs: Sequence[Any]) -> None:
    """`needs`: of q or x, one more, cos and sin."""
    if needs[2] or needs[3]:
        raise NotImplementedError(
            f'{op}: cos and sin get no gradient; detach them or use backend="reference"'
        )


def _backward(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """The gradients turn by the negative angle."""
    start, interleaved, inverse = kept
    wanted = [grad if need else None for grad, need in zip(grads, needs, strict=False)]
    found = [grad for grad in wanted if grad is not None]
    if not found:
        return (None,) * 8
    second = found[1] if len(found) == 2 else None
    turned = iter(rope(found[0], second, *saved, start, interleaved, not inverse))
    dq, dk = (None if grad is None else next(turned) for grad in wanted)
    return dq, dk, None, None, None, None, None, None


def _formula(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    start: int,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor | None]:
    return reference.apply_rotary(
        q,
        k,
        cos,
        sin,
        positions=positions,
        rotary_start=start,
        interleaved=interleaved,
        inverse=inverse,
    )


def is_shared(cos: Tensor, sin: Tensor, positions: Tensor | None) -> bool:
    """Whether all sequences of a batch turn by the same angles."""
    return cos.dim() == 2 and (positions is None or positions.dim() == 1)


#: (q, k, cos, sin, positions, start, interleaved, inverse) -> (q_out, k_out)
rope = DifferentiableOp(
    "rope",
    fake=_fake,
    save=_save,
    backward=_backward,
    formula=_formula,
    differentiable_backward=True,
    refuse=functools.partial(refuse_table_gradients, "apply_rotary"),
    fold=lambda q, k, *tables: (0, 1) if is_shared(*tables[:3]) else (),
)


class _TurnInPlace(torch.autograd.Function):
    """One tensor per call: torch lets a function modify a view only where it returns nothing
    else."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        start: int,
        interleaved: bool,
        inverse: bool,
    ) -> Tensor:
        _inplace_op(x, None, cos, sin, positions, start, interleaved, inverse)
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin, positions)
        ctx.kept = start, interleaved, not inverse
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dx, _ = rope(grads[0], None, *ctx.saved_tensors, *ctx.kept)
        return dx, None, None, None, None, None, None, None


def rope_inplace(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    *options: Any,
) -> None:
    """Turns q and k in place, with gradients; options: start, interleaved, inverse."""
    tensors = [x for x in (q, k) if x is not None]
    if is_transformed(*tensors):
        for x in tensors:  # one by one: where vmap maps over one of two, both results are batches
            y, _ = rope(x, None, cos, sin, positions, *options)
            if is_mapped(y) and not is_mapped(x):
                raise ValueError(
                    "apply_rotary: with inplace q and k must be mapped over by vmap where cos, sin "
                    f"or positions are, got one {'q' if x is q else 'k'} for all"
                )
            x.copy_(y)
    elif torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        for x in tensors:
            _TurnInPlace.apply(x, cos, sin, positions, *options)
    else:
        _inplace_op(q, k, cos, sin, positions, *options)
