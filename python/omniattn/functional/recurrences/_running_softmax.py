"""Softmax weights over the tokens so far, for states that are weighted sums of the past."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn.checks.arguments import implementation
from omniattn.checks.ranks import ACTIVE
from omniattn.encoding.sequences import Sequences
from omniattn.functional.recurrences._common import edge, is_step
from omniattn.ops import scan as ops


class Running(NamedTuple):
    """Weights of logits s (B, T, H, M) relative to m_t, the largest logit up to token t.

    ``S_t = exp(decays_t) S_{t-1} + weights_t x_t``, divided by `totals`, is the mean of x with the
    weights ``softmax_{j <= t}(s_j)``. m cancels there, so that it has no gradient.
    """

    weights: Tensor  # (B, T, H, M), e^(s_t - m_t)
    decays: Tensor  # (B, T, H, M), m_{t-1} - m_t
    totals: Tensor  # (B, T, H, M), n_t = sum_j e^(s_j - m_t)
    n: Tensor  # (N, H, M), the last total
    m: Tensor  # (N, H, M), the last m_t


def running_softmax(
    op: str, s: Tensor, before: tuple[Tensor, ...] | None, sequences: Sequences
) -> Running:
    """Computes the weights of s in fp32 (fp64 for fp64), after tokens whose n and m are `before`.

    n is 0 where there are no tokens before.
    """
    cu_seqlens, backend = sequences.cu_seqlens, sequences.backend
    if before is not None and is_step(s, cu_seqlens):
        return _step(s, *before)
    logits, sizes = s.detach().flatten(2), s.shape[2:]
    region = ACTIVE.region
    first = None if region is None else region.first(logits)
    n: Tensor | None = None
    m: Any = None
    if first is not None:
        # Logits relative to the first of their sequence, which may be on another rank.
        s, logits = s - first.unflatten(2, sizes), logits - first
    else:
        if before is None:
            count = s.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            n = m = logits.new_zeros(count, logits.shape[2])
        else:
            n, m = before[0].flatten(1), before[1].detach().flatten(1)
        m = torch.where(n == 0, edge(logits, cu_seqlens, m, first=True), m)
    gates = implementation(op, backend, s, ops.exponential_gates)
    nothing = logits.new_zeros(1, 1, logits.shape[2]).expand_as(logits)
    decays, _, most, m = gates(nothing, logits, m, cu_seqlens)
    weights = (s.flatten(2) - most).exp()
    totals, last = implementation(op, backend, s, ops.linear_scan)(weights, decays, n, cu_seqlens)
    if first is not None:
        m = m + first[:, -1]
    weights, decays, totals = (t.unflatten(2, sizes) for t in (weights, decays, totals))
    return Running(weights, decays, totals, last.unflatten(1, sizes), m.unflatten(1, sizes))


def _step(s: Tensor, n: Tensor, m: Tensor) -> Running:
    """Computes the weight of one token, in place of passes over all tokens."""
    logits = s.detach()[:, 0]
    m = torch.where(n == 0, logits, m.detach())
    most = torch.maximum(m, logits)
    decays, weights = m - most, (s[:, 0] - most).exp()
    n = torch.addcmul(weights, n, decays.exp())
    return Running(weights[:, None], decays[:, None], n[:, None], n, most)
