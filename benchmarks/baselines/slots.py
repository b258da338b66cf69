"""Baselines of memories of slots: chunks of tokens, one after another."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from baselines._common import compiled, lacks
from baselines.recurrence import SMALL_CHUNK, _chunks, gated

__all__ = ["BASELINES"]


def _keys(
    q: Tensor, k: Tensor, s: Tensor, g: Tensor, scale: float | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes linear attention to the slots s, which decay by g."""
    steps, factor = q.shape[1], q.shape[3] ** -0.5 if scale is None else scale
    q, k, s, g = (_chunks(t.float(), SMALL_CHUNK) for t in (factor * q, k, s, g))
    total = g.cumsum(3)
    seen = torch.ones(SMALL_CHUNK, SMALL_CHUNK, dtype=torch.bool).tril()
    gap = total[..., :, None, :] - total[..., None, :, :]
    decay = gap.masked_fill(~seen[..., None], -torch.inf).exp()
    inside = torch.einsum("nbhij,nbhijm,nbhjm->nbhim", q @ k.mT, decay, s)
    last = total[..., -1:, :]
    added, kept, read = k.mT @ (s * (last - total).exp()), last.exp(), total.exp()
    start = torch.zeros_like(added[0]) if state is None else state
    out = []
    for n in range(len(q)):
        out.append(inside[n] + read[n] * (q[n] @ start))
        start = start * kept[n] + added[n]
    return torch.stack(out, 1).movedim(2, 3).flatten(1, 2)[:, :steps], start


def gated_slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns o and the slots' keys and values."""
    lacks(cu_seqlens=cu_seqlens is not None, grouped=q.shape[2] != k.shape[2], empty=v.numel() == 0)
    logits, keys = _keys(q, k, s, g, scale, keys)
    weights = logits.softmax(-1)
    o, values = gated(weights, s.float(), v.float(), g, scale=1.0, initial_state=values)
    return o.to(v.dtype), keys, values


def _running(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes softmax weights over the tokens so far, their decays, and the last normalizer."""
    z = s.float().logcumsumexp(1)
    return (s - z).exp(), torch.cat((z[:, :1], z[:, :-1]), 1) - z, z[:, -1:]


def abc_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    **state: Any,
) -> tuple[Tensor, ...]:
    lacks(initial_state=bool(state), empty=v.numel() == 0)
    shares, g, z = _running(s)
    return *gated_slot_attention(q, k, v, shares, g, scale=scale, cu_seqlens=cu_seqlens), z[:, 0]


def lightnet_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    **state: Any,
) -> tuple[Tensor, ...]:
    lacks(initial_state=bool(state), empty=v.numel() == 0)
    shares, g, z = _running(k)
    o, means = gated(q.float(), shares, v.float(), g, scale=scale, cu_seqlens=cu_seqlens)
    return o.to(v.dtype), means, z[:, 0]


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
    cu_seqlens: Tensor | None = None,
    **state: Any,
) -> tuple[Tensor, ...]:
    """Softmax over the waves of slots, as complex numbers; sums of clocks are in float64."""
    lacks(initial_state=bool(state), packed=cu_seqlens is not None, empty=v.numel() == 0)
    slots = readout.shape[-1]
    rates = torch.arange((slots + 1) // 2, dtype=torch.float64) * (2 * math.pi / slots)
    size = torch.full_like(rates, (2 / slots) ** 0.5)
    size[0] = slots**-0.5
    clock = delta.double().cumsum(1)
    turns = torch.polar(torch.ones(1).double(), clock[..., None] * rates).to(torch.complex64)
    waves = torch.polar(size, torch.arange(slots).double()[:, None] * rates).to(torch.complex64)
    table = readout @ torch.view_as_real(waves).flatten(-2)
    writes = beta[..., None, None] * torch.view_as_real(size.float() * turns.conj())
    writes = writes.flatten(-2)
    logits, keys = gated(q, k, writes, g, scale=scale)
    logits = torch.view_as_complex(logits.unflatten(-1, (-1, 2)).contiguous()) * turns
    logits = torch.einsum("hrm,bthm->bthr", table, torch.view_as_real(logits).flatten(-2))
    read = torch.einsum("hrm,bthr->bthm", table, logits.softmax(-1))
    read = torch.view_as_complex(read.unflatten(-1, (-1, 2)).contiguous()) * turns.conj()
    o, values = gated(torch.view_as_real(read).flatten(-2), writes, v, g, scale=1.0)
    last = clock[:, -1] * (2 * math.pi / slots)
    return o, keys, values, last.cos().float(), last.sin().float()


BASELINES = {
    "cyclic_flow_attention": {"aten": cyclic_flow_attention},
    "gated_slot_attention": {
        "aten": gated_slot_attention,
        "compiled": compiled(gated_slot_attention),
    },
    "lightnet_attention": {"aten": lightnet_attention},
    "abc_attention": {"aten": abc_attention},
}
