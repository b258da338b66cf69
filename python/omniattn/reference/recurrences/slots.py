"""Memories of a few slots, token by token: gated slot attention, ABC and cyclic flows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn.reference.empty import nothing_of
from omniattn.reference.precision import compute_dtype
from omniattn.reference.recurrences.scan import over_time
from omniattn.reference.values import sequence_count

Parts = tuple[Tensor, ...]


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
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """K_t = K_{t-1} diag(e^(g_t)) + k_t s_t^T, V_t = diag(e^(g_t)) V_{t-1} + s_t v_t^T,
    o_t = V_t^T softmax(scale K_t^T q_t); the state is (K, V)."""
    rows = tuple(t.to(compute_dtype(v)) for t in (q, k, v, s, g))
    factor = max(1, q.shape[3]) ** -0.5 if scale is None else scale

    def step(
        state: Parts, q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor
    ) -> tuple[Parts, Parts]:
        state = _written(state, k, v, s, g.exp())
        return (_read(state, q, factor),), state

    start = initial_state or _empty(rows, sequence_count("gated_slot_attention", q, cu_seqlens))
    outputs, after = over_time(step, rows, tuple(t.to(rows[0]) for t in start), cu_seqlens)
    return _rounded(outputs, rows, v), (after[0], after[1])


def abc_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """o_t = (V_t / n_t)^T softmax(scale (K_t / n_t)^T q_t) with the sums K_t = sum_j k_j w_j^T,
    V_t = sum_j w_j v_j^T and n_t = sum_j w_j of w_j = e^(s_j - m_t), m_t = max_j s_j, over j <= t;
    the state is (K, V, n, m)."""
    rows = tuple(t.to(compute_dtype(v)) for t in (q, k, v, s))
    factor = max(1, q.shape[3]) ** -0.5 if scale is None else scale

    def step(state: Parts, q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Parts, Parts]:
        *pair, n, m = state
        share, kept, m = newest(s, n, m)
        keys, values = _written(tuple(pair), k, v, share, kept)
        n = kept * n + share
        means = keys / n[..., None, :], values / n[..., None]
        return (_read(means, q, factor),), (keys, values, n, m)

    if initial_state is None:
        pair = _empty(rows, sequence_count("abc_attention", q, cu_seqlens))
        start: Parts = (*pair, *(torch.zeros_like(pair[0][:, :, 0]) for _ in "nm"))
    else:
        start = tuple(t.to(rows[0]) for t in initial_state)
    outputs, after = over_time(step, rows, start, cu_seqlens)
    return _rounded(outputs, rows, v), (after[0], after[1], after[2], after[3])


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
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """K_t = e^(g_t) K_{t-1} + beta_t k_t w(c_t)^T, V_t = e^(g_t) V_{t-1} + beta_t w(c_t) v_t^T,
    o_t = V_t^T w_t, w_t = turn(R^T softmax(R turn(scale K_t^T q_t, c_t)), -c_t) with the clock
    c_t = c_{t-1} + delta_t, the readout R of waves and waves w(c) of 1 that are turned by -c; the
    state is (K, V, c)."""
    rows = tuple(t.to(compute_dtype(v)) for t in (q, k, v, g, beta))
    factor = max(1, q.shape[3]) ** -0.5 if scale is None else scale
    slots = readout.shape[-1]
    waves = slot_waves(readout.to(rows[0]))
    table = readout.to(rows[0]) @ waves

    def step(
        state: Parts, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, delta: Tensor
    ) -> tuple[Parts, Parts]:
        clock = state[2] + delta
        angles = wave_angles(clock, slots, q.dtype)
        shares = beta[..., None] * turned(waves[0], -angles)
        keys, values = _written(state[:2], k, v, shares, g.exp()[..., None])
        logits = turned(factor * (keys * q[..., None]).sum(-2), angles)
        weights = (table * logits[..., None, :]).sum(-1).softmax(-1)
        read = turned((table * weights[..., None]).sum(-2), -angles)
        return ((values * read[..., None]).sum(-2),), (keys, values, clock)

    if initial_state is None:
        count = sequence_count("cyclic_flow_attention", q, cu_seqlens)
        shares = rows[4][..., None].expand(*rows[4].shape, slots + 1)
        pair = _empty((*rows[:3], shares), count)
        start: Parts = (*pair, torch.zeros_like(pair[0][:, :, 0, 0], dtype=torch.float64))
    else:
        start = (*(t.to(rows[0]) for t in initial_state[:2]), initial_state[2].double())
    outputs, after = over_time(step, (*rows, delta.double()), start, cu_seqlens, (readout,))
    o = _rounded(outputs, (*rows, delta, readout), v)
    return o, (after[0], after[1], after[2].remainder(slots).to(rows[0]))


def slot_waves(like: Tensor) -> Tensor:
    """Returns an orthonormal basis of waves over P slots (P, P + 1), P the odd width of `like`.

    Columns 2 n and 2 n + 1 are a cosine and a sine of frequency n; column 1 is 0.
    """
    slots = like.shape[-1]
    places = torch.arange(slots, device=like.device).double()
    angles = wave_angles(places, slots, torch.float64)
    size = torch.full_like(places, slots).rsqrt()[:, None]  # a tensor, as traces round numbers
    waves = torch.stack((angles.cos(), angles.sin()), -1).flatten(-2)
    return torch.cat((size, waves[:, 1:] * size * 2**0.5), -1).to(like)


def wave_angles(clock: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """Returns the angles (.., M / 2) of all waves after a float64 clock, between -pi and pi."""
    rates = torch.arange((slots + 1) // 2, device=clock.device).double() / slots
    turns = clock[..., None] * rates
    return (turns - turns.detach().round()).to(dtype) * (2 * math.pi)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Turns waves (.., M), pairs of a cosine and a sine, by angles (.., M / 2)."""
    (even, odd), cos, sin = x.unflatten(-1, (-1, 2)).unbind(-1), angles.cos(), angles.sin()
    return torch.stack((cos * even - sin * odd, sin * even + cos * odd), -1).flatten(-2)


def newest(s: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weight of a logit s, the factor of former sums, and the largest logit.

    m is the largest logit before s, or anything where n, the sum of weights before s, is 0.
    """
    m = torch.where(n == 0, s, m).detach()
    top = torch.maximum(m, s.detach())
    return (s - top).exp(), (m - top).exp(), top


def _empty(rows: Parts, count: int) -> tuple[Tensor, Tensor]:
    """Creates slots of zeros for the tokens q, k, v, s."""
    _, k, v, s = rows[:4]
    heads, slots = s.shape[2:]
    return k.new_zeros(count, heads, k.shape[3], slots), v.new_zeros(
        count, heads, slots, v.shape[3]
    )


def _written(state: Parts, k: Tensor, v: Tensor, s: Tensor, kept: Tensor) -> Parts:
    keys, values = state
    keys = keys * kept[..., None, :] + k[..., None] * s[..., None, :]
    return keys, values * kept[..., None] + s[..., None] * v[..., None, :]


def _read(state: Parts, q: Tensor, factor: float) -> Tensor:
    """Reads the slots for queries (B, Hq, K); Hq / H queries share the slots of a head."""
    copies = q.shape[1] // max(1, state[0].shape[1])
    keys, values = (t.repeat_interleave(copies, 1) for t in state)
    weights = (factor * (keys * q[..., None]).sum(-2)).softmax(-1)
    return (values * weights[..., None]).sum(-2)


def _rounded(outputs: Parts, rows: Parts, v: Tensor) -> Tensor:
    """Returns outputs in the dtype of v; without tokens, zeros with gradients to all rows."""
    if outputs:
        return outputs[0].to(v.dtype)
    empty = v.new_zeros(*rows[0].shape[:3], v.shape[3], dtype=rows[0].dtype)
    return (empty + nothing_of(*rows)).to(v.dtype)
