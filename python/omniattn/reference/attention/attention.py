"""Softmax attention, O = softmax(f(scale q k^T) + bias) v, layout (B, T, H, D)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.masks import EncodedMask, cut
from omniattn.encoding.options import (
    NORMALIZERS,
    TRANSFORMS,
    AttentionOptions,
    Indices,
    Options,
    WeightOptions,
    break_stick,
    pack,
    pick,
    spelled_out,
    transform_of,
)
from omniattn.reference.attention.score_mod import PlacedMod, apply_score_mod
from omniattn.reference.layers import philox
from omniattn.reference.precision import widen
from omniattn.reference.values import require_all_rows, require_values
from omniattn.reference.vmap import require_not_mapped


@spelled_out(AttentionOptions)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq,Hq,Dv) [, lse (B,Hq,Tq)].

    Query head h reads kv head h // (Hq / Hkv). `mask` (True = attend) and `bias` broadcast to
    (B,Hq,Tq,Tk). Fully masked rows have O = 0, lse = -inf and zero gradients. With stick_breaking
    lse is the logarithm of the remainder, 0 without keys. Other normalizers compute each weight
    from its own logit; their lse is 0.
    """
    out, lse = attend(q, k, v, pack("attention", options))
    return (out, lse) if return_lse else out


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns O and lse of :func:`attention` with packed options."""
    return attention_of_part(q, k, v, seeded(options), _whole(q, k))


@spelled_out(AttentionOptions)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """q (Nq,Hq,D), k (Nk,Hkv,D), v (Nk,Hkv,Dv) -> O (Nq,Hq,Dv) [, lse (Hq,Nq)].

    Sequence n is a separate problem: rows cu_seqlens_q[n] .. cu_seqlens_q[n + 1] of q and rows
    cu_seqlens_k[n] .. cu_seqlens_k[n + 1] of k and v. Masks and biases broadcast to
    (N, Hq, max_seqlen_q, max_seqlen_k).
    """
    op = "attention_varlen"
    require_not_mapped(op, "cu_seqlens_q", cu_seqlens_q)
    require_not_mapped(op, "cu_seqlens_k", cu_seqlens_k)
    require_all_rows(op, cu_seqlens_q, q.shape[0], name="cu_seqlens_q", limit="the rows of q")
    require_all_rows(op, cu_seqlens_k, k.shape[0], name="cu_seqlens_k", limit="the rows of k")
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if len(ends_q) == 1:  # one empty sequence, so that gradients are zeros and not None
        ends_q, ends_k = [0, 0], [0, 0]
    record = seeded(pack(op, options))
    outs, lses = [], []
    for n in range(len(ends_q) - 1):
        (q0, q1), (k0, k1) = ends_q[n : n + 2], ends_k[n : n + 2]
        mine = of_sequence(record, n, q1 - q0, k1 - k0, cached=False)
        if mine.sinks is not None and mine.sinks.dim() > 1:  # (Hq,Nq)
            mine = mine._replace(sinks=mine.sinks[None, :, q0:q1])
        part = q[None, q0:q1], k[None, k0:k1], v[None, k0:k1]
        out, lse = attention_of_part(*part, mine, _whole(*part[:2], n))
        outs.append(out.reshape(out.shape[1:]))
        lses.append(lse.reshape(lse.shape[1:]))
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    return (out, lse) if return_lse else out


@spelled_out(AttentionOptions)
def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B,Tq,Hq,D) to the first cache_seqlens[b] keys of each sequence b.

    Options mean the same as in :func:`attention` with Tk = cache_seqlens[b]. With block_table (B,N)
    k and v are pages (pages,size,Hkv,.), and row b lists the pages of sequence b.
    """
    op = "attention_cached"
    require_not_mapped(op, "cache_seqlens", cache_seqlens)
    if block_table is not None:
        _require_pages(op, block_table, cache_seqlens, k)
        k, v = (t[block_table.clamp(0, max(0, t.shape[0] - 1))].flatten(1, 2) for t in (k, v))
    lies = (cache_seqlens >= 0) & (cache_seqlens <= k.shape[1])
    require_values(f"{op}: cache_seqlens must lie in [0, capacity]", lies)
    record = seeded(pack(op, options))
    outs, lses = [], []
    for n, tk in enumerate(cache_seqlens.tolist() or [0]):  # an empty batch has gradients, too
        one = slice(n, n + 1)
        mine = of_sequence(record, n, q.shape[1], tk, cached=True)
        if mine.sinks is not None and mine.sinks.dim() > 1:
            mine = mine._replace(sinks=mine.sinks[one])
        part = q[one], k[one, :tk], v[one, :tk]
        out, lse = attention_of_part(*part, mine, _whole(*part[:2], n))
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses)
    return (out, lse) if return_lse else out


def _require_pages(op: str, block_table: Tensor, cache_seqlens: Tensor, k: Tensor) -> None:
    """Requires that the entries of block_table up to each sequence's last key are pages of k."""
    first = torch.arange(block_table.shape[1], device=k.device) * k.shape[1]
    exists = (block_table >= 0) & (block_table < k.shape[0])
    read = first < cache_seqlens[:, None]
    require_values(f"{op}: block_table must name pages of k", exists | ~read)


def seeded(options: Options) -> Options:
    """Returns the options with a seed if there is dropout, drawing one if needed, else None."""
    if options.dropout_p == 0:
        return options._replace(seed=None)
    return options if options.seed is not None else options._replace(seed=philox.new_seed())


def of_sequence(options: Options, n: int, tq: int, tk: int, *, cached: bool) -> Options:
    """Returns the options for sequence n, of lengths tq and tk, in a packed or cached batch."""
    mask, bias, slopes = options.mask, options.bias, options.alibi_slopes
    relative = options.relative
    if isinstance(mask, Tensor):
        mask = cut(mask, n, tq, tk)
    elif isinstance(mask, EncodedMask):
        mask = mask.of_sequence(n, tq, tk)
    if bias is not None:
        bias = cut(bias, n, tq, tk)
    if slopes is not None and slopes.dim() > 1 and len(slopes) > 1:
        slopes = slopes[n : n + 1]
    if relative is not None:
        relative = relative.of_sequence(n)
    score_mod = options.score_mod
    if score_mod is not None:
        score_mod = PlacedMod(score_mod, n, tk - tq if cached else 0)
    return options._replace(
        mask=mask, bias=bias, alibi_slopes=slopes, relative=relative, score_mod=score_mod
    )


class Part(NamedTuple):
    """Where tensors of a call lie in the whole call, of Tq queries, Tk keys and Hq heads."""

    first: Indices
    tq: int
    tk: int
    heads: int
    #: True if each query is known to have a finite logit.
    finite: bool = False

    def positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the positions of queries q (B,Tq,..) and keys k (B,Tk,..) among all keys, (Tq,1)
        and (Tk,)."""
        *_, first_q, first_k = self.first
        i = torch.arange(q.shape[1], device=q.device)[:, None] + (first_q + self.tk - self.tq)
        return i, torch.arange(k.shape[1], device=q.device) + first_k


def _whole(q: Tensor, k: Tensor, n: int = 0) -> Part:
    return Part((n, 0, 0, 0), q.shape[1], k.shape[1], q.shape[2])


def attention_of_part(
    q: Tensor, k: Tensor, v: Tensor, options: Options, part: Part
) -> tuple[Tensor, Tensor]:
    """Returns O and lse of some queries and heads to some keys of a call.

    Tensors among the options, and a mask that is not one, belong to the part alone.
    """
    (batch, tq, heads), kv_heads = q.shape[:3], k.shape[2]
    vw = widen(v).transpose(1, 2)
    if kv_heads != heads:
        vw = vw.repeat_interleave(heads // kv_heads, 1)
    s = attention_logits(q, k, options, part)
    if options.normalizer == "softmax":
        sinks = None if options.sinks is None else widen(options.sinks).to(s.dtype)
        p, lse = softmax(s, sinks, finite=part.finite)
    elif options.normalizer == "stick_breaking":
        p, lse = break_stick(s)
    elif options.normalizer == "softpick":
        p, lse = pick(s)
    else:
        p = NORMALIZERS[options.normalizer](s)
        lse = s.new_zeros(batch, heads, tq)
    out = (dropped(p, options, part) @ vw).transpose(1, 2).to(q.dtype)
    return out, lse


def dropped(p: Tensor, options: Options, part: Part | None = None) -> Tensor:
    """Applies dropout to the weights p (B,Hq,Tq,Tk) of a call or of a part of one."""
    drop = options.dropout_p
    if drop == 0:
        return p
    assert options.seed is not None
    (batch, heads, tq, tk), seed = p.shape, options.seed.to(p.device)
    first, all_heads = ((0, 0, 0, 0), heads) if part is None else (part.first, part.heads)
    keep = philox.attention_keep(batch, heads, tq, tk, drop, seed, first=first, all_heads=all_heads)
    return p * keep * (1 / (1 - drop) if drop < 1 else 0)


def attention_logits(q: Tensor, k: Tensor, options: Options, part: Part | None = None) -> Tensor:
    """Computes the logits (B,Hq,Tq,Tk) of :func:`attention`, -inf where masked."""
    (heads, dim), kv_heads = q.shape[2:], k.shape[2]
    part = _whole(q, k) if part is None else part
    i, at = part.positions(q, k)
    distance = at - i
    qw, kw = (widen(t).transpose(1, 2) for t in (q, k))
    if kv_heads != heads:
        kw = kw.repeat_interleave(heads // kv_heads, 1)

    scale = default_scale(dim) if options.scale is None else options.scale
    s = qw @ kw.transpose(-1, -2)
    if options.relative_keys is not None:
        s = s + options.relative_keys.times_queries(qw, distance)
    if options.relative_queries is not None:
        s = s + options.relative_queries.times_keys(kw, distance)
    s = scale * s
    if options.head_scale is not None:
        s = s * widen(options.head_scale).to(s.dtype)[:, None, None]
    s = transformed(s, options)
    if options.bias is not None:
        s = s + widen(options.bias).to(s.dtype)
    if options.alibi_slopes is not None:
        slopes = torch.atleast_2d(widen(options.alibi_slopes).to(s.dtype))
        s = s + slopes[..., None, None] * -distance.abs().to(s.dtype)
    if options.relative is not None:
        s = s + options.relative.term(i, at, s.dtype)
    if options.score_mod is not None:
        s = apply_score_mod(options.score_mod, s, (0, *part.first[1:]))
    if options.mask is None and not options.causal and options.window_size == (-1, -1):
        return s
    return torch.where(visible(options, distance, heads), s, -math.inf)


def transformed(s: Tensor, options: Options) -> Tensor:
    """Applies the score transform of the options, if any."""
    transform = transform_of(options)
    if transform is None:
        return s
    name, c = transform
    return c * TRANSFORMS[name](s / c)


def visible(options: Options, distance: Tensor, heads: int) -> Tensor:
    """Boolean, True = attend, broadcastable to (B,Hq,Tq,Tk); `distance` is key - query (Tq,Tk)."""
    (tq, tk), (left, right) = distance.shape, options.window_size
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        allowed = allowed & (distance >= -left)
    if options.causal or right >= 0:
        allowed = allowed & (distance <= (0 if options.causal else right))
    if isinstance(options.mask, Tensor):
        allowed = allowed & options.mask
    elif isinstance(options.mask, EncodedMask):
        allowed = allowed & options.mask.visible(tq, tk, distance.device, heads)
    return allowed


@spelled_out(WeightOptions)
def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    column_sums: bool = False,
    group_sums: bool = False,
    **options: Unpack[WeightOptions],
) -> Tensor:
    """Weights P (B,Hq,Tq,Tk) of :func:`attention`, from its lse.

    `column_sums` gives P's sums over queries (B,Hq,Tk), `group_sums` its sums over the query heads
    of each kv head (B,Hkv,Tq,Tk), both together (B,Hkv,Tk). `sinks` have no effect, because lse
    contains them.
    """
    record = pack("attention_weights", options, WeightOptions)
    s = attention_logits(q, k, record)
    if record.normalizer == "softmax":
        nothing = lse == -math.inf
        p = torch.exp(s - lse.masked_fill(nothing, 0)[..., None])
        p = p.masked_fill(nothing[..., None], 0)
    else:
        p = NORMALIZERS[record.normalizer](s)
    if group_sums:
        p = p.unflatten(1, (k.shape[2], q.shape[2] // max(k.shape[2], 1))).sum(2)
    if column_sums:
        p = p.sum(-2)
    return p if column_sums or group_sums else p.to(q.dtype)


def merge_attention(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Combines O (B,Tq,Hq,Dv) and lse (B,Hq,Tq) of disjoint key sets into those of their union."""
    lse = torch.stack([widen(x) for x in lses])
    if sinks is not None:
        shape = (1, *lse.shape[1:])
        lse = torch.cat((lse, _of_queries(widen(sinks).to(lse.dtype)).expand(shape)))
    top = lse.detach().amax(0)
    top = top.masked_fill(top == -math.inf, 0)
    weights = torch.exp(lse - top)
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    shares = (weights / total)[: len(outs)].transpose(-1, -2)[..., None]
    out = (shares * torch.stack([widen(x) for x in outs])).sum(0).to(outs[0].dtype)
    return out, (top + total.log()).masked_fill(empty, -math.inf)


def _of_queries(sinks: Tensor) -> Tensor:
    """Returns sinks (Hq,) or (B,Hq,Tq) as a tensor that broadcasts to (B,Hq,Tq)."""
    return sinks if sinks.dim() > 1 else sinks[:, None]


def softmax(s: Tensor, sinks: Tensor | None, *, finite: bool = False) -> tuple[Tensor, Tensor]:
    """Returns P and lse (B,Hq,Tq); sinks (Hq,) or (B,Hq,Tq) add a logit to the sum, but no column
    to P.

    `finite`: True if each row is known to have a finite logit, so that torch's softmax is defined.
    """
    if sinks is not None:
        s = torch.cat((s, _of_queries(sinks)[..., None].expand(*s.shape[:-1], 1)), -1)
    if finite:
        p, lse = s.softmax(-1), s.logsumexp(-1)
        return (p if sinks is None else p[..., :-1]), lse
    # In a fully masked row, finite values replace maximum and sum: gradients are 0, not NaN.
    # The added column is the maximum of no keys, whose number a graph may not know.
    top = torch.nn.functional.pad(s.detach(), (0, 1), value=-math.inf).amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (top + total.log()).masked_fill(empty, -math.inf).squeeze(-1)
    p = p / total
    return (p if sinks is None else p[..., :-1]), lse


def default_scale(dim: int) -> float:
    """Returns 1 / sqrt(D), or 1 for D = 0, where all logits are 0."""
    return 1 / math.sqrt(dim) if dim > 0 else 1.0


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with torch's signature and layout (..., H, T, D); `is_causal` is top-left aligned,
    as in torch."""
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (key, value))
    lead = torch.broadcast_shapes(*(t.shape[:-2] for t in (query, key, value)))
    tq, tk = query.shape[-2], key.shape[-2]
    count = math.prod(lead)
    mask = bias = None
    if is_causal:
        mask = torch.ones(tq, tk, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        given = attn_mask.expand(*lead, tq, tk).reshape(count, 1, tq, tk)
        if given.dtype == torch.bool:
            mask = given if mask is None else given & mask
        else:
            bias = given
    q, k, v = (
        t.expand(*lead, *t.shape[-2:]).reshape(count, 1, *t.shape[-2:]).transpose(1, 2)
        for t in (query, key, value)
    )
    record = Options(mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    out, _ = attend(q, k, v, record)
    return out.transpose(1, 2).reshape(*lead, tq, value.shape[-1])
