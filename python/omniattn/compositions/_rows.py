"""Rows of a call: those of its sequences, and of queries next to the heads of their keys."""

from __future__ import annotations

from torch import Tensor

from omniattn.reference.precision import widen

__all__ = ["batches", "grouped", "heads_first", "of_rows", "rows_of"]


def grouped(t: Tensor, heads: int) -> Tensor:
    """Returns rows (T, Hq, D) of the queries as (Hkv, G, T, D), widened."""
    return widen(t).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)


def rows_of(t: Tensor, heads: int) -> Tensor:
    """Returns rows (T, Hq, D) of the queries as (Hkv, G T, D), widened."""
    return grouped(t, heads).flatten(1, 2)


def of_rows(rows: Tensor, count: int) -> Tensor:
    """Undoes `rows_of` for `count` tokens."""
    return rows.unflatten(1, (-1, count)).permute(2, 0, 1, 3).flatten(1, 2)


def heads_first(t: Tensor) -> Tensor:
    """Returns (T, H, D) as (H, T, D), widened."""
    return widen(t).transpose(0, 1)


def batches(
    x: Tensor, position: Tensor | None, cu_seqlens: Tensor | None
) -> list[tuple[slice, slice, slice, int]]:
    """Returns (rows, tokens, sequences, position) of calls whose sequences have one position."""
    steps = slice(0, x.shape[1])
    if cu_seqlens is None:
        if position is None:
            return [(slice(None), steps, slice(None), 0)]
        places = position.tolist()
        if len(set(places)) < 2:
            return [(slice(None), steps, slice(None), place) for place in places[:1]]
        each = ((slice(n, n + 1), place) for n, place in enumerate(places))
        return [(rows, steps, rows, place) for rows, place in each]
    ends = cu_seqlens.tolist()
    places = [0] * (len(ends) - 1) if position is None else position.tolist()
    return [
        (slice(None), slice(first, last), slice(n, n + 1), place)
        for n, (first, last, place) in enumerate(zip(ends, ends[1:], places, strict=False))
    ]
