"""Inputs of the recurrence that computes Mamba-3, and their definition in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.compositions._python_ops import implement, recomputed
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.ops.dispatch.names import like_or_wide
from omniattn.ops.dispatch.ranks import Region
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.precision import compute_dtype, widen

__all__ = ["mamba3_inputs", "mamba3_inputs_of_ranks"]

#: A turn in integers.
_TURN = 1 << 56


def _definition(
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    trap: Tensor,
    q_bias: Tensor,
    k_bias: Tensor,
    angles: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the rotated queries and keys (B, T, R, H, N), the factors (B, T, H) of writes, those
    (B, T, R, H, R) of a token's own inputs in its outputs, and the angles (B, T, H, A)."""
    start = initial_state
    if start is not None and cu_seqlens is not None:
        rows = start.repeat_interleave(cu_seqlens.diff(), 0, output_size=dt.shape[1])
        start = rows[None]
    elif start is not None:
        start = start[:, None]
    options = q, k, dt, trap, q_bias, k_bias, angles, start, interleaved
    return _inputs(*options, partial(_sums, cu_seqlens), partial(_after, cu_seqlens))


def mamba3_inputs_of_ranks(
    region: Region,
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    trap: Tensor,
    q_bias: Tensor,
    k_bias: Tensor,
    angles: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns `mamba3_inputs` of this rank's tokens in context_parallel."""
    options = q, k, dt, trap, q_bias, k_bias, angles, None, interleaved
    return _inputs(*options, region.sums, region.after)


def _inputs(
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    trap: Tensor,
    q_bias: Tensor,
    k_bias: Tensor,
    angles: Tensor,
    start: Tensor | None,
    interleaved: bool,
    sums: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the inputs from the angles `start` before each token's sequence, the sums over the
    tokens so far, and the rows of the next tokens."""
    phases = _phases(angles, dt, start, sums)
    rows = _with_bias(q, q_bias), _with_bias(k, k_bias)
    queries, keys = _turned(*rows, phases[:, :, None], interleaved)
    share = trap.sigmoid()
    own, following = share * dt, after((1 - share) * dt)
    own, following = own[:, :, None, :, None], following[:, :, None, :, None]
    dots = (queries[..., None, :] * keys.transpose(2, 3)[:, :, None]).sum(-1)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)[:, None]
    reads = dots * torch.where(later, own, -following)
    return queries, keys, (own + following)[:, :, 0, :, 0], reads, phases


def _phases(
    angles: Tensor, dt: Tensor, start: Tensor | None, sums: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns theta (B, T, H, A) modulo 2 pi.

    Integers hold the turns, so that sums over any number of tokens are exact, and wrap around.
    """
    steps = (math.pi * angles.tanh() * dt[..., None]).double()
    turns = steps.detach() * (0.5 / math.pi)
    parts = ((turns - turns.round()) * _TURN).round().long()
    theta = sums(parts).bitwise_and(_TURN - 1).double() * (2 * math.pi / _TURN)
    if start is not None:
        theta = theta + start
        theta = torch.sub(theta, (theta.detach() * (0.5 / math.pi)).floor(), alpha=2 * math.pi)
    slopes = sums(steps)  # also NaN where a step is not finite
    return (theta + (slopes - slopes.detach())).to(dt.dtype)


def _after(cu_seqlens: Tensor | None, t: Tensor) -> Tensor:
    """Returns the rows of the next tokens of t (B, T, H), 0 at the ends of sequences."""
    following = nnf.pad(t, (0, 0, 0, 1))[:, 1:]
    if cu_seqlens is None:
        return following
    goes_on = torch.ones(t.shape[1] + 1, dtype=t.dtype, device=t.device)
    return following * goes_on.index_fill(0, cu_seqlens[1:].long(), 0.0)[1:, None]


def _sums(cu_seqlens: Tensor | None, t: Tensor) -> Tensor:
    """Sums t (B, T, H, A) over the tokens of each sequence so far."""
    if cu_seqlens is None:
        return t.cumsum(1)
    # Two more rows: torch traces a gradient of cumsum only where it knows that T is not 1.
    sums = nnf.pad(t[0], (0, 0, 0, 0, 1, 1)).cumsum(0)
    first = sums[cu_seqlens[:-1].long()]
    spread = first.repeat_interleave(cu_seqlens.diff(), 0, output_size=t.shape[1])
    return (sums[1:-1] - spread)[None]


def _with_bias(t: Tensor, bias: Tensor) -> Tensor:
    """Adds a bias (H, R, N) to t (B, T, R, G, N); returns (B, T, R, H, N)."""
    bias = bias.transpose(0, 1).unflatten(1, (t.shape[3], -1))
    return (widen(t)[:, :, :, :, None] + bias).flatten(3, 4)


def _turned(q: Tensor, k: Tensor, theta: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotates pairs of q and k (..., N) by theta (..., A); the last N / 2 - A pairs stay."""
    pairs, turned = q.shape[-1] // 2, theta.shape[-1]
    cos, sin = theta.cos(), theta.sin()
    if interleaved:
        rest = (0, pairs - turned)
        turn = torch.complex(nnf.pad(cos, rest, value=1.0), nnf.pad(sin, rest))
        q, k = (t.unflatten(-1, (pairs, 2)).contiguous() for t in (q, k))
        q, k = (torch.view_as_complex(t) * turn for t in (q, k))
        return torch.view_as_real(q).flatten(-2), torch.view_as_real(k).flatten(-2)
    parts = (turned, pairs - turned) * 2

    def rotated(t: Tensor) -> Tensor:
        a, kept_a, b, kept_b = t.split(parts, -1)
        return torch.cat((a * cos - b * sin, kept_a, a * sin + b * cos, kept_b), -1)

    return rotated(q), rotated(k)


def _rows(q: Tensor, dt: Tensor) -> Tensor:
    """Returns empty queries or keys."""
    batch, steps, rank, _, width = q.shape
    return q.new_empty((batch, steps, rank, dt.shape[2], width), dtype=compute_dtype(q))


def _reads(q: Tensor, dt: Tensor) -> Tensor:
    rank = q.shape[2]
    return dt.new_empty((*dt.shape[:2], rank, dt.shape[2], rank))


#: S sequences, P rotated pairs.
_SHAPES = {
    **{"q": "B T R G N", "k": "B T R G N", "dt": "B T H", "trap": "B T H"},
    **{"q_bias": "H R N", "k_bias": "H R N", "angles": "B T H P"},
    **{"initial_state": "S H P", "cu_seqlens": "S+1"},
}
_PHASES = {"phases": "B T H P"}
_GRADIENTS = {
    **{"grad_queries": "B T R H N", "grad_keys": "B T R H N", "grad_weights": "B T H"},
    **{"grad_reads": "B T R H R", "grad_phases": "B T H P"},
}
_differentiate = recomputed(_definition, 5, 8)


def _backward(*values: Any) -> tuple[Tensor, ...]:
    *others, _, interleaved = values  # the angles are found again
    return _differentiate(*others, interleaved)


implement("mamba3_inputs", _definition, _SHAPES, differentiable=True)
implement("mamba3_inputs_backward", _backward, _GRADIENTS | _SHAPES | _PHASES)
#: (q, k, dt, trap, q_bias, k_bias, angles, initial_state, cu_seqlens, interleaved) -> (queries,
#: keys, weights, reads, phases), as `_definition`
mamba3_inputs = DifferentiableOp(
    "mamba3_inputs",
    fakes={
        **dict.fromkeys(("queries", "keys"), _rows),
        "weights": lambda dt: dt.new_empty(dt.shape),
        "reads": _reads,
        "phases": lambda angles: angles.new_empty(angles.shape),
    },
    backward_op=BackwardOp(
        "mamba3_inputs_backward",
        fakes={"dinitial_state": lambda dt, initial_state: like_or_wide(initial_state, dt)},
    ),
    formula=_definition,
    fold=Fold(
        ("q", "k", "dt", "trap", "angles", "initial_state"),
        when=lambda cu_seqlens: cu_seqlens is None,
    ),
)
