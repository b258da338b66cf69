"""rope: rotary embedding of q and k, out of place and in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops.dispatch import library as _library
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.names import like
from omniattn.ops.dispatch.plain import is_transformed
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.vmap import is_mapped

__all__ = ["rope", "rope_inplace"]

_inplace_op = torch.ops.omniattn.rope_.default


_library.register_fake("rope_")(lambda *_: None)


def refuse_table_gradients(op: str, cos_grad: bool, sin_grad: bool) -> None:
    if cos_grad or sin_grad:
        raise NotImplementedError(
            f'{op}: cos and sin get no gradient; detach them or use backend="reference"'
        )


def is_shared(cos: Tensor, positions: Tensor | None) -> bool:
    """Returns True if all sequences of a batch are rotated by the same angles."""
    return cos.dim() == 2 and (positions is None or positions.dim() == 1)


def _backward(
    grad_q_out: Tensor | None,
    grad_k_out: Tensor | None,
    q_grad: bool,
    k_grad: bool,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    start: int,
    interleaved: bool,
    inverse: bool,
) -> dict[str, Tensor]:
    """Rotates the gradients by the negative angle."""
    given = {"q": grad_q_out if q_grad else None, "k": grad_k_out if k_grad else None}
    found = {name: grad for name, grad in given.items() if grad is not None}
    if not found:
        return {}
    first, second = (*found.values(), None)[:2]
    turned = rope(first, second, cos, sin, positions, start, interleaved, not inverse)
    return dict(zip(found, turned, strict=False))


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


#: (q, k, cos, sin, positions, start, interleaved, inverse) -> (q_out, k_out)
rope = DifferentiableOp(
    "rope",
    fakes={"k_out": lambda q, k: q.new_empty(0) if k is None else like(k)},
    backward=_backward,
    formula=_formula,
    differentiable_backward=True,
    refuse=partial(refuse_table_gradients, "apply_rotary"),
    fold=Fold(("q", "k"), when=is_shared),
)


class _TurnInPlace(torch.autograd.Function):
    """Rotates one tensor per call, since an autograd function that modifies a view may have only
    one output."""

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
    """Rotates q and k in place, with gradients; options: start, interleaved, inverse."""
    tensors = [x for x in (q, k) if x is not None]
    if is_transformed(*tensors):
        for x in tensors:  # one by one: if vmap maps over one of two, both results would be batched
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
