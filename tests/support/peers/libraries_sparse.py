"""Plain torch versions of sparse attention of NATTEN, fla and MoBA, see libraries.py."""

from itertools import pairwise

import torch


def _attend(q, k, v, seen, scale=None):
    """q (B, T, H, D), k, v (B, S, Hkv, D), seen broadcastable to (B, H, T, S)."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), p


def _near(length, kernel, dilation, causal):
    """Returns the neighborhood mask of one axis: True if a token sees another."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        same = range(i % dilation, length, dilation)
        place = i // dilation
        first = place - kernel + 1 if causal else min(place - kernel // 2, len(same) - kernel)
        last = place + 1 if causal else max(first, 0) + kernel
        seen[i, list(same)[max(first, 0) : last]] = True
    return seen


def natten_na2d(query, key, value, kernel_size, dilation=1, is_causal=False, scale=None):
    """Without strides."""
    shape = query.shape[1:3]
    axes = [(t, t) if isinstance(t, (int, bool)) else t for t in (kernel_size, dilation, is_causal)]
    rows, columns = (_near(*each) for each in zip(shape, *axes, strict=True))
    seen = rows[:, None, :, None] & columns[None, :, None]
    q, k, v = (t.flatten(1, 2) for t in (query, key, value))
    return _attend(q, k, v, seen.flatten(2).flatten(0, 1), scale)[0].unflatten(1, shape)


def fla_nsa(q, k, v, g_cmp, g_slc, g_swa, block_counts=16, block_size=64, window_size=0):
    """For lengths that are multiples of block_size."""
    t = torch.arange(q.shape[1])[:, None]
    pooled = [x.unflatten(1, (-1, block_size)).mean(2) for x in (k, v)]
    block = torch.arange(pooled[0].shape[1])
    compressed, p = _attend(q, *pooled, (block + 1) * block_size - 1 <= t)
    own = t // block_size
    scores = p.unflatten(1, (k.shape[2], -1)).mean(2)
    forced = (block == own) | (block == 0) | (block == own - 1)
    scores = torch.where(forced, 1.0, scores).masked_fill(block > own, -1.0)
    top = scores.topk(min(block_counts, len(block)), -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top, True)
    j = torch.arange(k.shape[1])
    listed = chosen.repeat_interleave(q.shape[2] // k.shape[2], 1)[..., j // block_size]
    selected = _attend(q, k, v, listed & (j <= t))[0]
    near = _attend(q, k, v, (j <= t) & (j > t - window_size))[0]
    gated = zip((g_cmp, g_slc, g_swa), (compressed, selected, near), strict=True)
    return sum(g[..., None] * o for g, o in gated)


def moba_attn_varlen(q, k, v, cu_seqlens, max_seqlen, moba_chunk_size, moba_topk):
    """MoonshotAI's name, and fla's."""
    outs = []
    for a, b in pairwise(cu_seqlens):
        parts = [x[None, a:b] for x in (q, k, v)]
        t = torch.arange(int(b - a))
        own, chunks = t[:, None] // moba_chunk_size, -(-len(t) // moba_chunk_size)
        means = torch.stack([c.mean(1) for c in parts[1].split(moba_chunk_size, 1)], 1)
        gate = torch.einsum("bihd,bjhd->bhij", parts[0], means)
        chunk = torch.arange(chunks)
        gate = gate.masked_fill(chunk == own, torch.inf).masked_fill(chunk > own, -torch.inf)
        top = gate.topk(min(moba_topk, chunks), -1).indices
        chosen = torch.zeros_like(gate, dtype=torch.bool).scatter(-1, top, True)
        outs.append(_attend(*parts, chosen[..., t // moba_chunk_size] & (t <= t[:, None]))[0][0])
    return torch.cat(outs)
