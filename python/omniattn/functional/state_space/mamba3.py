"""Mamba-3's state space: trapezoidal steps, states that rotate, several inputs for each token."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.checks.arguments import (
    cast_like,
    implementation,
    require_bool,
    require_float,
    require_shape,
    require_strided,
    require_tensor,
    shown,
)
from omniattn.checks.jagged import over_sequences
from omniattn.checks.ranks import ACTIVE
from omniattn.compositions.state_space.mamba3 import mamba3_inputs, mamba3_inputs_of_ranks
from omniattn.encoding.sequences import Sequences
from omniattn.functional.recurrences._common import (
    composed_sequence_count,
    edge,
    first_of,
    is_step,
    log_decays,
    run,
    state_parts,
    widened,
)
from omniattn.reference.precision import widen

__all__ = ["mamba3"]

State = tuple[Tensor, Tensor, Tensor, Tensor]


@over_sequences("q", "k", "v", "adt", "dt", "trap", "angles", "z")
def mamba3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    adt: Tensor,
    dt: Tensor,
    trap: Tensor,
    q_bias: Tensor,
    k_bias: Tensor,
    angles: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    *,
    mimo_v: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    interleaved: bool = True,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Mamba-3's state-space layer, with one decay per head and token and R inputs and outputs.

    With the angles ``theta_t = theta_{t-1} + pi tanh(angles_t) dt_t``, ``l = sigmoid(trap)``,
    ``a = exp(adt)``, the rotated ``k'_r = R(theta) (k_r + k_bias_r)`` and ``q'_r`` alike, and the
    inputs ``U = sum_r v_r k'_r^T`` with ``v_r = mimo_v_r * v``:

    ``h_t = a_t (h_{t-1} + (1 - l_t) dt_t U_{t-1}) + l_t dt_t U_t``,
    ``y_r = (h q'_r + D v_r) * silu(mimo_z_r * z)``, ``y = sum_r mimo_out_r * y_r``.

    Args:
        q: (B, T, G, N), or with mimo_v (B, T, R, G, N), floating-point with even N; any strides.
        k: of q's shape and dtype.
        v: (B, T, H, P) of q's dtype; H is a multiple of G, and head h reads group h // (H / G).
        adt: (B, T, H), floating-point, at most 0: A dt, the logarithms of the decays.
        dt: (B, T, H), floating-point, the step sizes.
        trap: (B, T, H), floating-point, before the sigmoid. Large ones give Euler's rule, as in
            Mamba-2; 0 gives the trapezoidal rule.
        q_bias, k_bias: (H, N), or with mimo_v (H, R, N), floating-point.
        angles: (B, T, H, A) or (B, T, 1, A), floating-point, with A <= N / 2 rotated pairs.
        D: (H,), floating-point: factors of v in y.
        z: (B, T, H, P) of q's dtype: the gate of y.
        mimo_v: (H, R, P), floating-point; None for one input (SISO).
        mimo_z: (H, R, P), floating-point, with mimo_v and z.
        mimo_out: (H, R, P), floating-point, with mimo_v; None to return all y_r.
        interleaved: True if rotated pairs are (2 i, 2 i + 1), as in mamba-ssm's kernels for one
            input; False for (i, i + N / 2), as in those for R inputs.
        initial_state: (theta, h, k, v) of shapes (S, H, A), (S, H, P, N), (S, H, N) or with mimo_v
            (S, R, H, N), and (S, H, P): angles, state, rotated keys and values of the last token;
            None for zeros. S is B, or the number of sequences.
        cu_seqlens: (S + 1,) int32 or int64: B is 1, and tokens cu_seqlens[s] .. cu_seqlens[s + 1]
            are sequence s, with a state of its own; they grow from 0 to T. Jagged nested tensors
            (B, j, ...) in place of (B, T, ...) bring their own boundaries, and y has them, too.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        y (B, T, H, P), or (B, T, R, H, P) with mimo_v and without mimo_out, of q's dtype, and the
        state after the last token in float32 (float64 for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Computed by the kernels of `gated_linear_attention`, with R tokens for each, in fp32 (fp64
        for fp64). A token is written once, with the factors of its own step and of the next, and
        outputs leave out the latter. Angles are summed in float64 and stored modulo 2 pi. Gradients
        flow to all tensors, from y and from the final state.

    Reference:
        Lahoti et al., Mamba-3: Improved Sequence Modeling using State Space Principles, 2026,
        arXiv:2603.15569. Verified against `mamba3_siso_step_ref` and `mamba3_MIMO_step_ref` of the
        tests of state-spaces/mamba, commit e9594ce1.

    Example:
        >>> one, zero = torch.ones(1, 3, 1, 2), torch.zeros(1, 2)
        >>> dt, trap = torch.ones(1, 3, 1), torch.zeros(1, 3, 1)
        >>> y, _ = mamba3(one, one, one, -dt, dt, trap, zero, zero, 0 * one[..., :1])
        >>> y[0, :, 0, 0]  # 1; (1 + 1) / e + 1; ...
        tensor([1.0000, 1.7358, 2.0064])
    """
    op = "mamba3"
    require_bool(op, "interleaved", interleaved)
    single = mimo_v is None
    rank = _rank(op, q, v, single)
    k, v = cast_like(op, "k", k, q, "q"), cast_like(op, "v", v, q, "q")
    require_shape(op, "k", k, tuple(q.shape))
    for name, t in (("q", q), ("k", k), ("v", v)):
        require_strided(op, name, t)
    batch, steps, heads, size = v.shape
    states, of_heads = q.shape[-1], (batch, steps, heads)
    of_biases = ((heads, states) if single else (heads, rank, states),)
    adt = log_decays(op, "adt", adt, v, (of_heads,))
    dt = widened(op, "dt", dt, v, (of_heads,))
    trap = widened(op, "trap", trap, v, (of_heads,))
    q_bias = widened(op, "q_bias", q_bias, v, of_biases)
    k_bias = widened(op, "k_bias", k_bias, v, of_biases)
    angles = _checked_angles(op, angles, v, states)
    mimo_v, mimo_z, mimo_out = (
        t if t is None else _rank_first(widened(op, name, t, v, ((heads, rank, size),)))
        for name, t in (("mimo_v", mimo_v), ("mimo_z", mimo_z), ("mimo_out", mimo_out))
    )
    skips = None if D is None else widened(op, "D", D, v, ((heads,),))
    if z is not None:
        z = cast_like(op, "z", z, q, "q")
        require_strided(op, "z", z)
        require_shape(op, "z", z, tuple(v.shape))
    _require_pairs(op, single, z, mimo_z, mimo_out)
    count = composed_sequence_count(op, q, cu_seqlens)
    shapes = (
        (count, heads, angles.shape[3]),
        (count, heads, size, states),
        (count, heads, states) if single else (count, rank, heads, states),
        (count, heads, size),
    )
    before = state_parts(op, initial_state, "theta, h, k, v", v, shapes)

    if single:
        q, k, q_bias, k_bias = q[:, :, None], k[:, :, None], q_bias[:, None], k_bias[:, None]
    theta = None if before is None else before[0]
    angles = angles.expand(-1, -1, heads, -1)
    given, region = (q, k, dt, trap, q_bias, k_bias, angles), ACTIVE.region
    if region is None:
        call = implementation(op, backend, q, mamba3_inputs)
        q, k, weights, reads, phases = call(*given, theta, cu_seqlens, interleaved)
    else:
        _require_sequences_of_region(op, before, cu_seqlens)
        q, k, weights, reads, phases = mamba3_inputs_of_ranks(region, *given, interleaved)
    wide = widen(v)
    x = _inputs(wide, mimo_v)
    rows = _Rows(q, k, x, adt, weights)
    start = None
    if before is not None and is_step(v, cu_seqlens):
        start, rows = before[1].mT, _after_last(before, rows, dt, mimo_v)
    elif before is not None:
        start = _with_last(before, dt, trap, mimo_v, cu_seqlens)
    with nullcontext() if region is None else region.several(rank):
        y, h = run(
            *(op, rows.q.flatten(1, 2), rows.k.flatten(1, 2), rows.x.flatten(1, 2)),
            *(first_of(rank, rows.g), 1.0),
            Sequences(start, None if cu_seqlens is None else cu_seqlens * rank, backend),
            beta=rows.weights[:, :, None].expand(-1, -1, rank, -1).flatten(1, 2),
        )
    y = (
        y.unflatten(1, (-1, rank))[:, -steps:]
        if steps > 0
        else y[:, :, None].expand(-1, -1, rank, -1, -1)
    )
    if skips is not None:
        same = torch.eye(rank, dtype=x.dtype, device=x.device)
        reads = reads + same[:, None] * skips[:, None]
    # One write alone has no other to leave out.
    alone = skips is None and region is None and rank * steps <= 1
    for r in range(0 if alone else rank):
        y = torch.addcmul(y, x[:, :, r : r + 1], reads[..., r, None])
    if z is not None:
        y = y * nnf.silu(_inputs(widen(z), mimo_z))
    if single:
        y = y[:, :, 0]
    elif mimo_out is not None:
        y = (y * mimo_out).sum(2)
    old = before or tuple(v.new_zeros(shape, dtype=wide.dtype) for shape in shapes)
    state = (
        edge(phases, cu_seqlens, old[0]),
        h.mT,
        edge(k[:, :, 0] if single else k, cu_seqlens, old[2]),
        edge(wide, cu_seqlens, old[3]),
    )
    return y.to(v.dtype), state


def _require_sequences_of_region(
    op: str, before: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
) -> None:
    """Requires what a call within context_parallel can take."""
    if before is not None:
        raise NotImplementedError(f"{op}: in context_parallel initial_state must be None")
    if cu_seqlens is not None:
        raise NotImplementedError(
            f"{op}: in context_parallel cu_seqlens must be given to context_parallel, with the "
            "boundaries in the whole row"
        )


def _rank(op: str, q: Tensor, v: Tensor, single: bool) -> int:
    """Checks the sizes of q and v; returns R."""
    require_float(op, "q", q)
    wanted = "(B, T, G, N)" if single else "(B, T, R, G, N) with mimo_v"
    if q.ndim != 5 - single or q.shape[-1] % 2:
        raise ValueError(
            f"{op}: q must have shape {wanted} and an even N, got q.shape={tuple(q.shape)}"
        )
    require_tensor(op, "v", v)
    groups = q.shape[-2]
    if v.ndim != 4 or v.shape[:2] != q.shape[:2] or groups == 0 or v.shape[2] % groups:
        raise ValueError(
            f"{op}: v must have shape (B, T, H, P) with B and T of q and H a multiple of its G >= "
            f"1, got v.shape={tuple(v.shape)}, q.shape={tuple(q.shape)}"
        )
    rank = 1 if single else q.shape[2]
    if rank < 1:
        raise ValueError(f"{op}: q must have R >= 1, got q.shape={tuple(q.shape)}")
    return rank


def _checked_angles(op: str, angles: Tensor, v: Tensor, states: int) -> Tensor:
    """Returns angles (B, T, H or 1, A) in fp32 (fp64 for fp64)."""
    require_tensor(op, "angles", angles)
    pairs = angles.shape[-1] if angles.ndim == 4 else 0
    if pairs > states // 2:
        raise ValueError(
            f"{op}: angles must have at most N / 2 = {states // 2} pairs, "
            f"got angles.shape={tuple(angles.shape)}"
        )
    shapes = ((*v.shape[:3], pairs), (*v.shape[:2], 1, pairs))
    return widened(op, "angles", angles, v, shapes)


def _require_pairs(
    op: str, single: bool, z: Tensor | None, mimo_z: Tensor | None, mimo_out: Tensor | None
) -> None:
    """Requires factors of several inputs only with them, and mimo_z exactly with their gate."""
    for name, t in (("mimo_z", mimo_z), ("mimo_out", mimo_out)):
        if single and t is not None:
            raise ValueError(f"{op}: {name} must be None without mimo_v, got {name}={shown(t)}")
    if not single and (z is None) != (mimo_z is None):
        raise ValueError(
            f"{op}: mimo_z must be given exactly where z and mimo_v are, "
            f"got z={shown(z)}, mimo_z={shown(mimo_z)}"
        )


def _rank_first(t: Tensor) -> Tensor:
    """Returns t (H, R, P) as (R, H, P), so that products with tokens have their layout."""
    return t.transpose(0, 1).contiguous()


def _inputs(t: Tensor, factors: Tensor | None) -> Tensor:
    """Returns t (B, T, H, P) as (B, T, 1, H, P), or times factors (R, H, P)."""
    t = t[:, :, None]
    return t if factors is None else t * factors


class _Rows(NamedTuple):
    """Arguments of the recurrence, with R tokens for each."""

    q: Tensor
    k: Tensor
    x: Tensor
    g: Tensor
    weights: Tensor


def _after_last(
    before: tuple[Tensor, ...], rows: _Rows, dt: Tensor, mimo_v: Tensor | None
) -> _Rows:
    """Puts the last token of a state before the rows of one token, so that the kernel adds it to
    the state's matrix on the way."""
    _, _, k, v = before
    k = k[:, None] if mimo_v is not None else k[:, None, None]
    return _Rows(
        rows.q.expand(-1, 2, -1, -1, -1),
        torch.cat((k, rows.k), 1),
        torch.cat((_inputs(v[:, None], mimo_v), rows.x), 1),
        nnf.pad(rows.g, (0, 0, 1, 0)),
        torch.cat((dt - rows.weights, rows.weights), 1),  # no next token: weights are l dt
    )


def _with_last(
    before: tuple[Tensor, ...],
    dt: Tensor,
    trap: Tensor,
    mimo_v: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Adds the last token of a state, with the factor of its first step, to the state's matrix."""
    _, h, k, v = before
    none = v.new_zeros(v.shape[:-1])
    dt, trap = (edge(t, cu_seqlens, none, first=True) for t in (dt, trap))
    v = v * ((1 - trap.sigmoid()) * dt)[..., None]
    if mimo_v is None:
        return h.mT + k[..., None] * v[..., None, :]
    return h.mT + (k[..., None] * (v[:, None] * mimo_v)[..., None, :]).sum(1)
