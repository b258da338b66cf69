"""Log-linear attention: products over chunks, and states of blocks of 2^m chunks in a tree."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from omniattn.compositions._python_ops import implement
from omniattn.compositions._rows import batches
from omniattn.compositions.recurrences._log_linear_tree import Tokens, differentiate, outputs
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.reference.precision import compute_dtype
from omniattn.reference.recurrences.log_linear import log_linear_attention as definition

__all__ = ["log_linear_attention"]

#: q, k, v, g and level_scales.
Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _rows(inputs: Inputs, rows: slice, steps: slice) -> Inputs:
    q, k, v, g, scales = (t[rows, steps] for t in inputs)
    return q, k, v, g, scales


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _state(q: Tensor, v: Tensor, level_scales: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns an empty final state."""
    levels = level_scales.shape[3]
    shape = (_sequences(q, cu_seqlens), v.shape[2], levels, q.shape[3], v.shape[3])
    return v.new_empty(shape, dtype=compute_dtype(v))


def _require_sequences(
    q: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Requires as many states and positions as sequences, and groups of equal size."""
    op, count = "log_linear_attention", _sequences(q, cu_seqlens)
    if (initial_state is None) != (position is None):
        raise ValueError(f"{op}: initial_state and position must be given together, got one")
    for name, t in (("initial_state", initial_state), ("position", position)):
        if t is not None and t.shape[0] != count:
            raise ValueError(f"{op}: {name} must have {count} rows, got {tuple(t.shape)}")
    if cu_seqlens is not None and (q.shape[0] != 1 or count < 0):
        raise ValueError(f"{op}: packed q must have a batch of 1, got q.shape={tuple(q.shape)}")
    if q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise ValueError(f"{op}: heads of v must be a multiple of q's, got {tuple(v.shape)}")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    initial_state: Tensor | None,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _require_sequences(q, v, initial_state, position, cu_seqlens)
    if q.shape[1] == 1 and position is not None and cu_seqlens is None:
        assert initial_state is not None
        return _step(q, k, v, g, level_scales, initial_state, position)
    inputs = q, k, v, g, level_scales
    y, final = v.new_empty(v.shape), _state(q, v, level_scales, cu_seqlens)
    for rows, steps, own, place in batches(q, position, cu_seqlens):
        if steps.start == steps.stop or y.numel() == 0:
            final[own] = 0 if initial_state is None else _held(initial_state, position)[own]
            continue
        state = None if initial_state is None else initial_state[own]
        tokens = Tokens.of(*_rows(inputs, rows, steps), state, place)
        y[rows, steps], final[own] = outputs(tokens)
    return y, final


def _held(state: Tensor, position: Tensor | None) -> Tensor:
    """Sets the states of bits of the position that are 0 to 0."""
    assert position is not None
    return state.masked_fill((_bits(state, position) == 0)[:, None, :, None, None], 0)


def _bits(state: Tensor, position: Tensor) -> Tensor:
    """Returns the bits (N, L) of positions (N,)."""
    return (position[:, None] >> torch.arange(state.shape[2], device=state.device)) & 1


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scales: Tensor, state: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes one token of each sequence, as the definition does."""
    dtype = state.dtype
    group = v.shape[2] // max(1, q.shape[2])
    q, k = (t[:, 0].to(dtype).repeat_interleave(group, 1) for t in (q, k))
    u, scales = v[:, 0].to(dtype), scales[:, 0]
    state = _held(state, position) * g[:, 0].exp()[..., None, None, None]
    mixed = torch.einsum("nhl,nhlkv->nhkv", scales[..., 1:], state[:, :, :-1])
    o = torch.einsum("nhk,nhkv->nhv", q, mixed) + scales[..., :1] * (q * k).sum(-1, True) * u
    joined = _bits(state, position).cumprod(-1)
    lowest, joined = joined.sum(-1), joined.to(dtype)
    fresh = torch.einsum("nl,nhlkv->nhkv", joined, state) + k[..., None] * u[..., None, :]
    state *= (1 - joined)[:, None, :, None, None]
    state[torch.arange(len(lowest), device=state.device), :, lowest] = fresh
    return o[:, None].to(v.dtype), state


def _backward(
    grad_y: Tensor | None,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    initial_state: Tensor | None,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state_grad: bool,
) -> tuple[Tensor, ...]:
    _require_sequences(q, v, initial_state, position, cu_seqlens)
    inputs = q, k, v, g, level_scales
    grads = [t.new_zeros(t.shape) for t in inputs]
    none = grads[-1].new_empty(0)
    of_state = none if initial_state is None else torch.zeros_like(initial_state)
    for rows, steps, own, place in batches(q, position, cu_seqlens):
        if steps.start == steps.stop or v.numel() == 0:
            if initial_state is not None and grad_final_state is not None:
                of_state[own] = _held(grad_final_state, position)[own]
            continue
        state = None if initial_state is None else initial_state[own]
        tokens = Tokens.of(*_rows(inputs, rows, steps), state, place)
        incoming = None if grad_y is None else grad_y[rows, steps]
        last = None if grad_final_state is None else grad_final_state[own]
        found, before = differentiate(tokens, incoming, last)
        for grad, part in zip(grads, found, strict=True):
            grad[rows, steps] = part
        if before is not None:
            of_state[own] = before
    return (*grads, of_state if initial_state_grad else none)


#: N sequences; G heads of values.
_SHAPES = {
    **{"q": "B T H K", "k": "B T H K", "v": "B T G V", "g": "B T G"},
    **{"level_scales": "B T G L", "initial_state": "N G L K V"},
    **{"position": "N", "cu_seqlens": "N+1"},
}


def _state_gradient(g: Tensor, initial_state: Tensor | None) -> Tensor:
    return g.new_empty(0 if initial_state is None else initial_state.shape)


implement("log_linear_attention", _forward, _SHAPES, differentiable=True)
implement(
    "log_linear_attention_backward",
    _backward,
    {"grad_y": "B T G V", "grad_final_state": "N G L K V"} | _SHAPES,
)
#: (q, k, v, g, level_scales, initial_state, position, cu_seqlens) -> (y, final_state)
log_linear_attention = DifferentiableOp(
    "log_linear_attention",
    fakes={"y": lambda v: v.new_empty(v.shape), "final_state": _state},
    backward_op=BackwardOp(
        "log_linear_attention_backward",
        fakes={"dinitial_state": _state_gradient},
    ),
    formula=lambda *args: definition(
        *args[:5], initial_state=args[5], position=args[6], cu_seqlens=args[7]
    ),
)
