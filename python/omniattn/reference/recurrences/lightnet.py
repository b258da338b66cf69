"""LightNet's attention, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.reference.empty import nothing_of
from omniattn.reference.precision import compute_dtype
from omniattn.reference.recurrences.scan import over_time
from omniattn.reference.recurrences.slots import newest
from omniattn.reference.values import sequence_count

Parts = tuple[Tensor, ...]


def lightnet_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """o_t = scale S_t^T (q_t / n_t) with the sums S_t = sum_j w_j v_j^T and n_t = sum_j w_j of
    w_j = e^(k_j - m_t), m_t = max_j k_j, over j <= t; the state is (S, n, m)."""
    rows = tuple(t.to(compute_dtype(v)) for t in (q, k, v))
    (_, _, heads, size), v_heads = q.shape, v.shape[2]
    factor, copies = max(1, size) ** -0.5 if scale is None else scale, v_heads // max(1, heads)

    def step(state: Parts, q: Tensor, k: Tensor, v: Tensor) -> tuple[Parts, Parts]:
        sums, n, m = state
        share, kept, m = newest(k, n, m)
        n = kept * n + share
        read, share, kept = (
            t.repeat_interleave(copies, 1)[..., None] for t in (q / n, share, kept)
        )
        sums = kept * sums + share * v[..., None, :]
        return (factor * (sums * read).sum(-2),), (sums, n, m)

    if initial_state is None:
        count = sequence_count("lightnet_attention", q, cu_seqlens)
        zeros = (rows[0].new_zeros(count, heads, size) for _ in range(2))
        start: Parts = (rows[2].new_zeros(count, v_heads, size, v.shape[3]), *zeros)
    else:
        start = tuple(t.to(rows[0]) for t in initial_state)
    outputs, after = over_time(step, rows, start, cu_seqlens)
    o = outputs[0] if outputs else torch.zeros_like(rows[2]) + nothing_of(*rows)
    return o.to(v.dtype), (after[0], after[1], after[2])
