"""Attention with static sparsity patterns, by dense masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.options import FormOptions, ScoreOptions, pack, spelled_out
from omniattn.reference.attention.attention import (
    attend,
    default_scale,
    dropped,
    softmax,
    transformed,
)
from omniattn.reference.empty import nothing_of
from omniattn.reference.layers import philox
from omniattn.reference.precision import widen


@spelled_out(FormOptions)
def longformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_global: Tensor | None = None,
    k_global: Tensor | None = None,
    v_global: Tensor | None = None,
    *,
    window: int,
    global_index: Tensor | None = None,
    key_padding: Tensor | None = None,
    dilation: int | tuple[int, ...] = 1,
    causal: bool = False,
    **options: Unpack[FormOptions],
) -> Tensor:
    """q (B,T,Hq,D), k, v (B,T,Hkv,.) -> O (B,T,Hq,Dv).

    A token sees keys at most window / 2 steps of `dilation` away, and the keys in global_index
    (B,G). A global token sees all keys, by the second projections. Where key_padding (B,T) is
    False, keys are masked and rows are 0.
    """
    record = pack("longformer_attention", options, FormOptions)
    batch, length, heads = q.shape[:3]
    at = torch.arange(length, device=q.device)
    marked = torch.zeros(batch, length, dtype=torch.bool, device=q.device)
    if global_index is not None:
        marked = (global_index[..., None] == at).any(1)
    each = dilation if isinstance(dilation, Sequence) else (dilation,) * heads
    steps = torch.tensor(each, device=q.device)[:, None, None]
    away = at[:, None] - at
    local = (away % steps == 0) & (away.abs() <= steps * (window // 2))
    allowed = away >= 0 if causal else torch.ones_like(away, dtype=torch.bool)
    real = torch.ones_like(marked) if key_padding is None else key_padding
    allowed = allowed & real[:, None, None]
    seen = (local | marked[:, None, None]) & allowed
    near, _ = attend(q, k, v, record._replace(mask=seen))
    if global_index is None:
        return _rows(near, real)
    q, k, v = (
        first if other is None else other
        for first, other in ((q, q_global), (k, k_global), (v, v_global))
    )
    seen = allowed.expand(batch, 1, length, length)
    far, _ = attend(q, k, v, record._replace(mask=seen))
    return _rows(torch.where(marked[..., None, None], far, near), real)


def _rows(out: Tensor, real: Tensor) -> Tensor:
    return out.masked_fill(~real[..., None, None], 0)


def bigbird_random_blocks(
    blocks: int, heads: int, n_random: int, seed: int, *, draw: int = 0, causal: bool = False
) -> Tensor:
    """Draws random key blocks (H, blocks - 2, r) int64 for query blocks 1 .. blocks - 2; -1: none.

    Each row draws r different blocks, except itself, its neighbors, the first and the last block;
    if causal, only earlier blocks. Pick m takes place floor(u n / 2^32) of the n blocks left, which
    are in ascending order at first; the last one then moves to that place. u is the first word of
    Philox(key = seed, counter = (4096 draw + m, I, h, 0xB16B1D)).
    """
    rows = range(1, blocks - 1)
    key = tuple(torch.tensor(seed >> shift & 0xFFFFFFFF) for shift in (0, 32))
    sizes = map(torch.arange, (heads, max(blocks, 0), n_random))
    head, row_of, pick = torch.meshgrid(*sizes, indexing="ij")
    counter = (4096 * draw + pick, row_of, head, torch.full_like(pick, 0xB16B1D))
    words = philox.philox4x32(counter, key)[0].tolist()  # type: ignore[arg-type]
    found = torch.full((heads, len(rows), n_random), -1)
    for h in range(heads):
        for row in rows:
            left = [j for j in rows if abs(j - row) > 1 and (j < row or not causal)]
            for m in range(min(n_random, len(left))):
                place = words[h][row][m] * len(left) >> 32
                found[h, row - 1, m] = left[place]
                left[place] = left[-1]
                left.pop()
    return found


def bigbird_counts(
    blocks: int, heads: int, rand_blocks: Tensor | None, n_random: int = 3
) -> Tensor:
    """Counts how often query block I lists key block J, (H, blocks, blocks).

    Without random blocks, and with at most 5 + 2 r blocks, all are listed once.
    """
    if rand_blocks is None and blocks <= 5 + 2 * n_random:
        return torch.ones(heads, blocks, blocks, dtype=torch.int64)
    counts = torch.zeros(heads, blocks, blocks, dtype=torch.int64)
    for row in range(blocks):
        if row in (0, blocks - 1):
            counts[:, row] = 1
            continue
        for column in {0, blocks - 1, row - 1, row, row + 1}:
            counts[:, row, column] = 1
        if rand_blocks is not None:
            for h in range(heads):
                for column in rand_blocks[h, row - 1].tolist():
                    if column >= 0:
                        counts[h, row, column] += 1
    return counts


@spelled_out(ScoreOptions, last=("dropout_p", "dropout_seed"))
def bigbird_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int = 64,
    n_random: int = 3,
    seed: int = 0,
    draw: int = 0,
    rand_blocks: Tensor | None = None,
    count_duplicates: bool = False,
    num_global_tokens: int = 0,
    key_padding: Tensor | None = None,
    causal: bool = False,
    length: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    **options: Unpack[ScoreOptions],
) -> Tensor:
    """q (B,Tq,Hq,D), k, v (B,T,Hkv,.) -> O (B,Tq,Hq,Dv), one softmax over keys of listed blocks.

    A key counts once, or with `count_duplicates` as often as its block is listed. Global tokens
    come first. The pattern is that of `length` tokens.
    """
    record = pack("bigbird_attention", options, ScoreOptions)
    tokens, tk, heads = num_global_tokens, k.shape[1], q.shape[2]
    length = (tk if length is None else length) - tokens
    blocks = max(1, -(-length // block))
    if rand_blocks is None and blocks > 5 + 2 * n_random:
        rand_blocks = bigbird_random_blocks(blocks, heads, n_random, seed, draw=draw, causal=causal)
    counts = bigbird_counts(blocks, heads, rand_blocks, n_random).to(q.device)
    if not count_duplicates:
        counts = counts.clamp(max=1)
    at = torch.arange(tk, device=q.device)
    rows, of = slice(tk - q.shape[1], tk), (at - tokens).clamp(min=0) // block
    is_global = (at < tokens) | (at[rows, None] < tokens)
    counts = counts[:, of[rows, None], of].masked_fill(is_global, 1)
    allowed = counts > 0
    if causal:
        allowed = allowed & (at <= at[rows, None])
    real = key_padding
    if real is None:
        real = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    bias = counts.clamp(min=1).to(widen(q).dtype).log()[None]
    record = record._replace(mask=allowed & real[:, None, None], bias=bias)
    out, _ = attend(q, k, v, record._replace(dropout_p=dropout_p, seed=dropout_seed))
    return _rows(out, real[:, rows])


@spelled_out(FormOptions)
def hub_spoke_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_global: Tensor | None = None,
    k_global: Tensor | None = None,
    v_global: Tensor | None = None,
    *,
    window: int,
    global_index: tuple[int, ...] = (),
    global_every: int | None = None,
    causal: bool = True,
    dual: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor:
    """q (B,Tq,Hq,D), k, v (B,Tk,Hkv,.) -> O (B,Tq,Hq,Dv).

    Pairs within the window and all pairs with a hub are visible. With dual="disjoint" pairs with a
    hub use the second projections, in the same softmax; with "longformer" the rows of hubs use
    them, for all keys.
    """
    record = pack("hub_spoke_attention", options, FormOptions)
    (tq, tk), device = (q.shape[1], k.shape[1]), q.device
    i, j = torch.arange(tq, device=device)[:, None] + tk - tq, torch.arange(tk, device=device)
    hubs = set(global_index)
    if global_every is not None:
        hubs |= set(range(0, tk, global_every))
    is_hub = torch.tensor([n in hubs for n in range(tk)], dtype=torch.bool, device=device)
    row_hub = is_hub[i.clamp(min=0)] & (i >= 0) if tk else torch.zeros_like(i, dtype=torch.bool)
    pairs = row_hub | is_hub
    near = (i - j <= window) if causal else (i - j).abs() <= window
    allowed = (near | pairs) & (j <= i) if causal else near | pairs
    record = record._replace(mask=allowed)
    if dual is None:
        return attend(q, k, v, record)[0]
    assert q_global is not None and k_global is not None and v_global is not None
    if dual == "longformer":
        own, _ = attend(q, k, v, record)
        other, _ = attend(q_global, k_global, v_global, record)
        return torch.where(row_hub[:, None], other, own)
    group = q.shape[2] // k.shape[2]
    s, s_hub = (
        widen(x).transpose(1, 2) @ widen(y).repeat_interleave(group, 2).permute(0, 2, 3, 1)
        for x, y in ((q, k), (q_global, k_global))
    )
    scale = default_scale(q.shape[3]) if record.scale is None else record.scale
    s = transformed(torch.where(pairs, s_hub, s) * scale, record)
    p = dropped(softmax(s.masked_fill(~allowed, -torch.inf), None)[0], record)
    v, v_global = (widen(x).repeat_interleave(group, 2).transpose(1, 2) for x in (v, v_global))
    out = (p * ~pairs) @ v + (p * pairs) @ v_global
    return out.transpose(1, 2).to(q.dtype)


@spelled_out(FormOptions)
def detsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    stride: int,
    global_index: tuple[int, ...] = (0,),
    anchor: str = "relative",
    representative: str = "token",
    count_bias: bool = False,
    levels: tuple[tuple[int, int], ...] | None = None,
    **options: Unpack[FormOptions],
) -> Tensor:
    """q (B,Tq,Hq,D), k, v (B,Tk,Hkv,.) -> O (B,Tq,Hq,Dv), query by query.

    A query sees the keys from `window` before it on, the global keys, and a representative of each
    group further back: its last key (anchor "absolute"), its first key ("relative"), or the mean of
    its keys and values. Dropout of means is by their indices, with the seed's next offset.
    """
    record = pack("detsa_attention", options, FormOptions)
    tq, tk, group = q.shape[1], k.shape[1], q.shape[2] // max(k.shape[2], 1)
    most = tk * (2 if levels is None else 1 + len(levels))  # number of means
    scale = default_scale(q.shape[3]) if record.scale is None else record.scale
    drop = record.dropout_p
    keep, keep_means = _kept(q, (tk, most), drop, record.seed)
    wide_q = widen(q)
    wide_k, wide_v = (widen(t).repeat_interleave(group, 2) for t in (k, v))
    none = wide_v.new_zeros(q.shape[0], *wide_v.shape[2:]) + nothing_of(q, k, v)
    rows = []
    for i in range(tk - tq, tk):
        single = {j for j in range(max(i - window, 0), i + 1)}
        single |= {j for j in global_index if j <= i}
        groups = _groups(max(i - window, 0), stride, anchor, levels)
        if representative == "token":
            single |= {(g[-1] if anchor == "absolute" else g[0]) for g, whole in groups if whole}
            groups = []
        keys = [wide_k[:, j] for j in sorted(single)]
        values = [wide_v[:, j] for j in sorted(single)]
        keys += [wide_k[:, list(g)].mean(1) for g, _ in groups]
        values += [wide_v[:, list(g)].mean(1) for g, _ in groups]
        counts = [1] * len(single) + [len(g) if count_bias else 1 for g, _ in groups]
        if not keys:
            rows.append(none)
            continue
        s = torch.einsum("bhd,bnhd->bhn", wide_q[:, i - tk + tq], torch.stack(keys, 1))
        s = transformed(s * scale, record)
        p = (s + torch.tensor(counts, device=s.device).to(s.dtype).log()).softmax(-1)
        if keep is not None and keep_means is not None:
            means = [_number_of_mean(g, w, tk, stride, anchor, levels) for g, w in groups]
            row = i - tk + tq
            kept = torch.cat((keep[:, :, row, sorted(single)], keep_means[:, :, row, means]), -1)
            p = p * kept * (1 / (1 - drop) if drop < 1 else 0)
        rows.append(torch.einsum("bhn,bnhd->bhd", p, torch.stack(values, 1)))
    return torch.stack(rows or [none], 1)[:, :tq].to(q.dtype)


def _kept(
    q: Tensor, counts: tuple[int, int], dropout_p: float, seed: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns dropout masks (B,Hq,Tq,.) for the weights of counts[0] keys and counts[1] means."""
    if dropout_p == 0:
        return None, None
    assert seed is not None
    seed = seed.to(q.device)
    size = (q.shape[0], q.shape[2], q.shape[1])
    return (
        philox.attention_keep(*size, counts[0], dropout_p, seed),
        philox.attention_keep(*size, counts[1], dropout_p, seed + seed.new_tensor([0, 1])),
    )


def _number_of_mean(
    group: range,
    whole: bool,
    tk: int,
    stride: int,
    anchor: str,
    levels: tuple[tuple[int, int], ...] | None,
) -> int:
    """Returns the index of a mean. Absolute means are numbered consecutively.

    Relative means are ordered by size, smallest first, then by their first key. The means of the
    first 1, 2, ... keys follow them.
    """
    if anchor == "absolute":
        return group[0] // stride
    sizes = {stride} if levels is None else {size for _, size in levels}
    before = sum(tk - size + 1 for size in sizes if size <= tk and (size < len(group) or not whole))
    return before + (group[0] if whole else len(group) - 1)


def _groups(
    before: int, stride: int, anchor: str, levels: tuple[tuple[int, int], ...] | None
) -> list[tuple[range, bool]]:
    """Returns the groups of keys 0 .. before - 1; True marks a complete group."""
    if anchor == "absolute":
        return [(range(n, n + stride), True) for n in range(0, before - stride + 1, stride)]
    sizes = [size for count, size in levels for _ in range(count)] if levels is not None else None
    found = []
    end, n = before, 0
    while end > 0 and (sizes is None or n < len(sizes)):
        size = stride if sizes is None else sizes[n]
        found.append((range(max(end - size, 0), end), end >= size))
        end, n = end - size, n + 1
    return found
