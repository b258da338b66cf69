"""Attention to a memory of a few slots: gated slot attention, ABC and cyclic flow attention."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    cast_like,
    full_precision,
    implementation,
    require_float,
    require_shape,
    require_strided,
)
from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import Sequences
from omniattn.functional.recurrences._common import (
    NO_DECAY,
    OF_CHANNELS,
    attempt,
    log_decays,
    repeated,
    require_heads,
    run,
    sequence_count,
    state_parts,
    widened,
)
from omniattn.functional.recurrences._running_softmax import running_softmax
from omniattn.ops import scan as scans
from omniattn.ops.dispatch.plain import is_plain
from omniattn.reference.precision import widen
from omniattn.reference.recurrences.slots import slot_waves, turned, wave_angles

__all__ = ["abc_attention", "cyclic_flow_attention", "gated_slot_attention"]

Sums = tuple[Tensor, Tensor, Tensor, Tensor]


@over_sequences("q", "k", "v", "s", "g")
def gated_slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Softmax attention to M slots, which keep decaying sums of keys and of values.

    ``K_t = K_{t-1} diag(exp(g_t)) + k_t s_t^T``, ``V_t = diag(exp(g_t)) V_{t-1} + s_t v_t^T``,
    ``o_t = V_t^T softmax(scale * K_t^T q_t)``. In the paper ``s = 1 - exp(g)``.

    Args:
        q: (B, T, Hq, K), float64, float32, bfloat16 or float16, any strides; Hq is a multiple of H,
            and head h of q reads the slots of head h // (Hq / H).
        k: (B, T, H, K), of q's dtype.
        v: (B, T, H, V), of q's dtype.
        s: (B, T, H, M), of q's dtype: the share of a token that each slot takes.
        g: (B, T, H, M), logarithms of the decays of the slots, <= 0.
        scale: default K^-0.5.
        initial_state: (K, V) of shapes (N, H, K, M) and (N, H, M, V), of any floating dtype, but
            computed in float32 (float64 for float64); None for zeros. N is B, or the number of
            sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and the output has them, too.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        o (B, T, Hq, V) of q's dtype, and the state (K, V) after the last token in float32 (float64
        for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        This is `gated_linear_attention` twice: with the slots as channels of its values, whose
        decays are `gv`, and then as channels of its keys; in fp32 for half types. With Hq > H it
        repeats keys and values.

    Reference:
        Zhang et al., Gated Slot Attention for Efficient Linear-Time Sequence Modeling, 2024,
        arXiv:2409.07146. Verified against `ops/gsa/naive.py` of fla-org/flash-linear-attention,
        commit bc3b101d.

    Example:
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> half = torch.full((1, 2, 1, 1), 0.5)
        >>> gated_slot_attention(one, one, v, half, half.log())[0].flatten()  # 4 / 2, (2 + 8) / 2
        tensor([2., 5.])
    """
    op = "gated_slot_attention"
    sequences = Sequences(None, cu_seqlens, backend)
    found = _attempt(op, q, k, v, s, g, scale, initial_state, sequences)
    if found is not None:
        return found
    k, v, copies = _require_heads(op, q, k, v)
    s = cast_like(op, "s", s, q)
    require_strided(op, "s", s)
    slots = s.shape[-1] if s.ndim == 4 else 1
    of_slots = (*v.shape[:3], slots)
    require_shape(op, "s", s, of_slots)
    g = log_decays(op, "g", g, v, (of_slots,))
    state = _checked_slots(op, initial_state, "K, V", q, v, slots, sequences)
    dtype, q = q.dtype, widen(q)
    k, v, s, g = (repeated(widen(t), copies) for t in (k, v, s, g))
    keys, values = (None, None) if state is None else _each(state, copies)
    logits, keys = run(op, q, k, s, None, scale, sequences._replace(initial_state=keys), gv=g)
    before = sequences._replace(initial_state=values)
    o, values = run(op, logits.softmax(-1), s, v, g, 1.0, before)
    return o.to(dtype), (keys[:, ::copies], values[:, ::copies])


@over_sequences("q", "k", "v", "s")
def abc_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    *,
    scale: float | None = None,
    initial_state: Sums | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Sums]:
    """Softmax attention to M slots, which keep weighted means of past keys and values.

    With the weights ``w_tj = softmax_{j <= t}(s_j)`` of each slot, ``K_t = sum_j k_j w_tj^T``,
    ``V_t = sum_j w_tj v_j^T``, ``o_t = V_t^T softmax(scale * K_t^T q_t)`` (attention with
    bounded-memory control).

    Args:
        q, k, v, scale, cu_seqlens, backend: as in `gated_slot_attention`.
        s: (B, T, H, M), floating-point: finite logits of the slots.
        initial_state: (K, V, n, m) of shapes (N, H, K, M), (N, H, M, V), (N, H, M) and (N, H, M):
            with the largest logit m, the sums of ``k exp(s - m)``, of ``v exp(s - m)`` and of
            ``exp(s - m)``; None for no tokens, which are zeros. fla's states are K / n and V / n.

    Returns:
        o (B, T, Hq, V) of q's dtype, and the state (K, V, n, m) after the last token in float32
        (float64 for float64), whose m has no gradient, since its value cancels.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Computed as `gated_slot_attention`, from sums that are relative to the largest logit so
        far. So logits of any size keep their accuracy.

    Reference:
        Peng et al., ABC: Attention with Bounded-memory Control, 2021, arXiv:2110.02488. Verified
        against both functions of `ops/abc/naive.py` of fla-org/flash-linear-attention, commit
        bc3b101d.

    Example:
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> abc_attention(one, one, v, 0 * one)[0].flatten()  # one slot of equal weights
        tensor([4., 6.])
    """
    op = "abc_attention"
    sequences = Sequences(None, cu_seqlens, backend)
    k, v, copies = _require_heads(op, q, k, v)
    dtype = q.dtype
    slots = s.shape[-1] if isinstance(s, Tensor) and s.ndim == 4 else 1
    s = widened(op, "s", s, v, ((*v.shape[:3], slots),))
    state = _checked_slots(op, initial_state, "K, V, n, m", q, v, slots, sequences)
    weights = running_softmax(op, s, None if state is None else state[2:], sequences)
    dtype, q = q.dtype, widen(q)
    k, v = repeated(widen(k), copies), repeated(widen(v), copies)
    shares, decays, totals = (repeated(t, copies) for t in weights[:3])
    keys, values = (None, None) if state is None else _each(state[:2], copies)
    logits, keys = run(
        *(op, q, k, shares, None, scale, sequences._replace(initial_state=keys)), gv=decays
    )
    read = (logits / totals).softmax(-1) / totals
    o, values = run(op, read, shares, v, decays, 1.0, sequences._replace(initial_state=values))
    return o.to(dtype), (keys[:, ::copies], values[:, ::copies], weights.n, weights.m)


@over_sequences("q", "k", "v", "g", "delta", "beta")
def cyclic_flow_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    delta: Tensor,
    beta: Tensor,
    readout: Tensor,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Softmax attention to slots of relative time, through which tokens flow with a learned clock.

    With P slots on a circle, the clock ``c_t = delta_1 + .. + delta_t`` and ``w_tj = exp(g_{j+1} +
    .. + g_t) beta_j D(c_t - c_j)``, D(a) (P) a band-limited unit pulse at the place a:
    ``K_t = sum_{j <= t} k_j w_tj^T``, ``V_t = sum_{j <= t} w_tj v_j^T``,
    ``o_t = (R V_t)^T softmax(scale * R K_t^T q_t)``.

    Args:
        q: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, H, K), of q's dtype.
        v: (B, T, H, V), of q's dtype.
        g: (B, T, H), logarithms of the decays, <= 0.
        delta: (B, T, H), floating-point, the slots that a token goes on; in the paper in (0, 1).
        beta: (B, T, H), floating-point, the strengths of writes, in the paper in (0, 1).
        readout: (H, P, P), floating-point, R of each head, with odd P; in the paper P is 127.
        scale: default K^-0.5.
        initial_state: (K, V, c) of shapes (N, H, K, P + 1), (N, H, P + 1, V) and (N, H); None for
            zeros. N is B, or the number of sequences. K and V are waves over slots, cosines and
            sines that the clock c has not turned: fla's layout.
        cu_seqlens, backend: as in `gated_slot_attention`.

    Returns:
        o (B, T, H, V) of q's dtype, and the state (K, V, c) after the last token in float32
        (float64 for float64); c is in [0, P).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        A pulse is a sum of (P + 1) / 2 waves, which flows turn and do not mix. So this is
        `gated_linear_attention` twice, with waves as values and then as keys, in fp32 for half
        types. Clocks are summed in fp64, so that places are exact after any number of tokens.

    Reference:
        CyFA: Linear Sequence Modeling with Relative-Time-Partitioned Memory, 2026,
        arXiv:2609.36259. Verified against `naive_recurrent_cyfa` of `ops/cyfa/naive.py` of
        fla-org/flash-linear-attention, commit ef747b38, which also has a norm of q and k.

    Example:
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> g, half = torch.zeros(1, 2, 1), torch.full((1, 2, 1), 0.5)
        >>> cyclic_flow_attention(one, one, v, g, half, half, torch.ones(1, 1, 1))[0].flatten()
        tensor([2., 6.])
    """
    op = "cyclic_flow_attention"
    k, v = require_heads(op, q, k, v)
    require_shape(op, "v", v, (*q.shape[:3], v.shape[3]))
    of_heads, heads = tuple(q.shape[:3]), q.shape[2]
    g = log_decays(op, "g", g, v, (of_heads,))
    beta = widened(op, "beta", beta, v, (of_heads,))
    delta = widened(op, "delta", delta, v, (of_heads,))
    slots = readout.shape[-1] if isinstance(readout, Tensor) and readout.ndim == 3 else 1
    readout = widened(op, "readout", readout, v, ((heads, slots, slots),))
    if slots % 2 == 0:
        raise ValueError(
            f"{op}: readout must have shape (H, P, P) with odd P, "
            f"got readout.shape={tuple(readout.shape)}"
        )
    count = sequence_count(op, q, cu_seqlens)
    shapes = (count, heads, q.shape[3], slots + 1), (count, heads, slots + 1, v.shape[3])
    state = state_parts(op, initial_state, "K, V, c", v, (*shapes, (count, heads)))
    keys, values, before = (None, None, None) if state is None else state
    scan = implementation(op, backend, q, scans.linear_scan)
    steps, start = delta.double(), None if before is None else before.double()
    clock, after = scan(steps, torch.zeros_like(steps), start, cu_seqlens)
    with full_precision(q):
        waves = slot_waves(readout)
        table = readout @ waves
        angles = wave_angles(clock, slots, g.dtype)
        shares = beta[..., None] * turned(waves[0], -angles)
        sequences = Sequences(keys, cu_seqlens, backend)
        logits, keys = run(op, widen(q), widen(k), shares, g, scale, sequences)
        logits = torch.einsum("hrm,bthm->bthr", table, turned(logits, angles))
        read = turned(torch.einsum("hrm,bthr->bthm", table, logits.softmax(-1)), -angles)
        o, values = run(
            *(op, read, shares, widen(v), g, 1.0, sequences._replace(initial_state=values))
        )
    return o.to(v.dtype), (keys, values, after.remainder(slots).to(g.dtype))


def _attempt(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor,
    scale: float | None,
    state: tuple[Tensor, Tensor] | None,
    sequences: Sequences,
) -> tuple[Tensor, tuple[Tensor, Tensor]] | None:
    """Runs both passes of plain tensors in fp32 or fp64, without the checks; see `attempt`."""
    given = q, k, v, s, g
    if any(t is None for t in given) or not is_plain(*given):
        return None
    if q.dtype.itemsize < 4 or q.ndim != 4 or k.ndim != 4:
        return None
    if not q.shape[:3] == k.shape[:3] == v.shape[:3] == s.shape[:3] or s.shape != g.shape:
        return None
    keys, values = None, None
    if state is not None:
        if not isinstance(state, tuple) or len(state) != 2 or any(t is None for t in state):
            return None
        keys, values = state
    found = attempt(
        *(op, q, k, s, None, scale, sequences._replace(initial_state=keys), (NO_DECAY,)), gv=g
    )
    if found is None:
        return None
    logits, keys = found
    weights, before = logits.softmax(-1), sequences._replace(initial_state=values)
    found = attempt(op, weights, s, v, g, 1.0, before, (OF_CHANNELS,))
    return None if found is None else (found[0], (keys, found[1]))


def _require_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Checks q, k and v; returns k, v and the number of heads of q for each of k and v."""
    require_float(op, "q", q)
    k, v = cast_like(op, "k", k, q, "q"), cast_like(op, "v", v, q, "q")
    for name, t in (("q", q), ("k", k), ("v", v)):
        require_strided(op, name, t)
    if q.ndim != 4:
        raise ValueError(f"{op}: q must have shape (B, T, Hq, K), got q.shape={tuple(q.shape)}")
    batch, steps, heads, size = q.shape
    shared = k.shape[2] if k.ndim == 4 else 0
    fits = k.ndim == 4 and k.shape == (batch, steps, shared, size)
    if not fits or heads % max(1, shared) or (heads == 0) != (shared == 0):
        raise ValueError(
            f"{op}: k must have shape (B, T, H, K) with B, T and K of q and H a divisor of its "
            f"heads, got k.shape={tuple(k.shape)}, q.shape={tuple(q.shape)}"
        )
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{op}: v must have shape (B, T, H, V) with B, T and H of k, "
            f"got v.shape={tuple(v.shape)}, k.shape={tuple(k.shape)}"
        )
    return k, v, max(1, heads // max(1, shared))


def _checked_slots(
    op: str,
    state: tuple[Tensor, ...] | None,
    names: str,
    q: Tensor,
    v: Tensor,
    slots: int,
    sequences: Sequences,
) -> tuple[Tensor, ...] | None:
    """Checks the boundaries and a state (K, V) or (K, V, n, m), as `names` says."""
    count, heads = sequence_count(op, q, sequences.cu_seqlens), v.shape[2]
    shapes: tuple[tuple[int, ...], ...] = (
        (count, heads, q.shape[3], slots),
        (count, heads, slots, v.shape[3]),
        *((count, heads, slots),) * 2,
    )
    return state_parts(op, state, names, v, shapes[: names.count(",") + 1])


def _each(state: tuple[Tensor, ...], copies: int) -> tuple[Tensor, ...]:
    """Repeats the states of a head for each of its queries."""
    return tuple(t.repeat_interleave(copies, 1) if copies > 1 else t for t in state)
