"""The definition of attention in tiles: some queries and heads of a sequence, and what they see.

Second and forward-mode derivatives evaluate one tile after another (dispatch/pieces.py), in O(T)
memory, where the kernel for tangents (attention_kernel.py) does not compute them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn.encoding.attention import decode, score_sides, split_parts
from omniattn.encoding.masks import MaskKind, Rules, Sizes, key_range, visible
from omniattn.encoding.masks import of_sequence as rules_of_sequence
from omniattn.encoding.options import TABLES, Options, ScoreKind
from omniattn.ops.derivatives.attention_kernel import AttentionKernel, has_tangent_kernel
from omniattn.ops.derivatives.tangent_kernels import KernelPieces
from omniattn.ops.dispatch.pieces import ELEMENTS, Index, Piece, Pieces
from omniattn.reference.attention.attention import Part, attention_of_part, of_sequence
from omniattn.reference.precision import compute_dtype
from omniattn.reference.vmap import require_not_mapped

__all__ = ["attention_pieces"]

#: Numbers of queries of a tile: with fewer, products are slow; with more, masks are cut coarsely.
_ROWS = (64, 256)


class _Sequence(NamedTuple):
    """One sequence of a call: its index n, the entry of the batch and the rows of q and of k that
    hold it. They are the queries from first_q and the keys from first_k on of tq and tk."""

    n: int
    entry: int
    queries: range
    keys: range
    first_q: int
    first_k: int
    tq: int
    tk: int
    cached: bool = False


def attention_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aux: Sequence[Tensor],
    seed: Tensor | None,
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
) -> Pieces | None:
    """Returns the tiles of a call of `attention`, functions of q, k, v, seed and aux, or None if it
    is small enough to be evaluated at once."""
    (batch, tq, heads, _), (tk, kv_heads) = q.shape, k.shape[1:3]
    if batch * heads * tq * tk <= ELEMENTS or (mask and mask[0] == MaskKind.PAGED):
        return None
    parts, rules = split_parts(mask)
    layout, options = decode(aux, rules, score, params, (tq, tk))
    if parts and layout is not None:
        return None
    sides = score_sides(score)
    pieces = []
    for one in _sequences(q, k, layout, parts):
        for tile in _tiles(one, options["mask"], heads, kv_heads):
            codes = (one, tile, heads, rules, score, params)
            pieces.append(_piece(codes, q, k, aux, sides))
    lse = torch.Size((batch, heads, tq))
    out = torch.Size((*q.shape[:3], v.shape[3]))
    outputs = ((out, q.dtype), (lse, compute_dtype(q)))
    if not has_tangent_kernel(q, score):
        return Pieces(tuple(pieces), outputs)
    kernel = AttentionKernel(mask, score, params)
    return KernelPieces(tuple(pieces), outputs, kept=kernel.results, kernel=kernel)


def _sequences(
    q: Tensor, k: Tensor, layout: Any, parts: dict[int, tuple[int, int]]
) -> Iterator[_Sequence]:
    batch, tq, tk = q.shape[0], q.shape[1], k.shape[1]
    if layout is None:
        first_q, whole_q = parts.get(MaskKind.QUERIES, (0, tq))
        first_k, whole_k = parts.get(MaskKind.KEYS, (0, tk))
        for n in range(batch):
            yield _Sequence(n, n, range(tq), range(tk), first_q, first_k, whole_q, whole_k)
    elif layout[0] == MaskKind.PACKED:
        for name, t in zip(("cu_seqlens_q", "cu_seqlens_k"), layout[3], strict=True):
            require_not_mapped("attention_varlen", name, t)
        ends_q, ends_k = (t.tolist() for t in layout[3])
        for n in range(len(ends_q) - 1):
            queries, keys = range(*ends_q[n : n + 2]), range(*ends_k[n : n + 2])
            yield _Sequence(n, 0, queries, keys, 0, 0, len(queries), len(keys))
    else:
        require_not_mapped("attention_cached", "cache_seqlens", layout[3][0])
        for n, length in enumerate(layout[3][0].tolist()):
            yield _Sequence(n, n, range(tq), range(length), 0, 0, tq, length, cached=True)


class _Tile(NamedTuple):
    """Queries and keys of a sequence, counted from its first ones, and heads [first, last)."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    heads: tuple[int, int]
    kv_heads: tuple[int, int]


def _tiles(one: _Sequence, mask: Rules, heads: int, kv_heads: int) -> Iterator[_Tile]:
    group = heads // max(1, kv_heads)

    def seen_by(first: int, count: int) -> tuple[int, int]:
        among = key_range(mask.rules(), one.tk - one.tq, one.tk, (first, first + count))
        start = max(among.start, one.first_k)
        return start, max(start, min(among.stop, one.first_k + len(one.keys)))

    at, end = one.first_q, one.first_q + len(one.queries)
    while at < end:
        rows = min(end - at, _ROWS[1])
        start, stop = seen_by(at, rows)
        rows = min(rows, max(_ROWS[0], ELEMENTS // max(1, group * (stop - start))))
        start, stop = seen_by(at, rows)
        step = max(1, min(kv_heads, ELEMENTS // max(1, group * rows * (stop - start))))
        for h in range(0, kv_heads, step):
            own = (h, min(h + step, kv_heads))
            of_q = (own[0] * group, own[1] * group)
            yield _Tile((at, at + rows), (start, stop), of_q, own)
        at += rows


def _piece(
    codes: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    aux: Sequence[Tensor],
    sides: dict[int, ScoreKind],
) -> Piece:
    one, tile, *_ = codes
    entry, of_q, of_kv = slice(one.entry, one.entry + 1), slice(*tile.heads), slice(*tile.kv_heads)
    rows = _shifted(tile.queries, one.queries.start - one.first_q)
    columns = _shifted(tile.keys, one.keys.start - one.first_k)
    reads: list[Index] = [(entry, rows, of_q), (entry, columns, of_kv), (entry, columns, of_kv), ()]
    for i, t in enumerate(aux):
        kind = sides.get(i)
        if kind == ScoreKind.BIAS:
            reads.append(_of_bias(t, one, tile))
        elif kind in TABLES:
            reads.append((slice(None), slice(None), of_q))
        elif kind in (ScoreKind.RELATIVE_KEYS, ScoreKind.RELATIVE_QUERIES):
            reads.append((slice(None), of_q))
        else:
            reads.append(() if kind is None else (of_q,))
    adds_to = ((entry, rows, of_q), (entry, of_q, rows))
    return Piece(partial(_formula_of_tile, codes), tuple(reads), adds_to)


def _shifted(bounds: tuple[int, int], by: int) -> slice:
    return slice(bounds[0] + by, bounds[1] + by)


def _of_bias(t: Tensor, one: _Sequence, tile: _Tile) -> Index:
    """Returns the part of a bias, which may cover only the rows and columns of a part."""
    sizes = ((one.first_q, len(one.queries), one.tq), (one.first_k, len(one.keys), one.tk))
    rows, columns = (
        _shifted(bounds, -first if size == own != whole else 0)
        for bounds, size, (first, own, whole) in zip(
            (tile.queries, tile.keys), t.shape[-2:], sizes, strict=True
        )
    )
    ranges = (slice(one.n, one.n + 1), slice(*tile.heads), rows, columns)
    given = zip(ranges[4 - t.dim() :], t.shape, strict=True)
    return tuple(slice(None) if size == 1 else part for part, size in given)


def _formula_of_tile(
    codes: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, *aux: Tensor
) -> tuple[Tensor, Tensor]:
    one, tile, heads, mask, score, params = codes
    _, options = decode(aux, mask, score, params, (one.tq, one.tk))
    rules = rules_of_sequence(options.pop("mask").rules(), one.n, one.tq, one.tk)
    record = Options(**options, dropout_p=params[1], seed=seed)
    record = of_sequence(record, one.n, one.tq, one.tk, cached=one.cached)
    seen = visible(rules, Sizes(one.tq, one.tk, q.device, heads), tile.queries, tile.keys)
    if seen.dim() > 2 and seen.shape[-3] > 1:
        seen = seen[..., slice(*tile.heads), :, :]
    finite, hidden = False, True
    if all(not side for *_, side in rules):  # whose values vmap may hide
        added = (record.bias, record.relative, record.score_mod)
        finite = bool(seen.any(-1).all()) and all(term is None for term in added)
        hidden = not seen.all()
    first = (one.n, tile.heads[0], tile.queries[0], tile.keys[0])
    part = Part(first, one.tq, one.tk, heads, finite)
    return attention_of_part(q, k, v, record._replace(mask=seen if hidden else None), part)
