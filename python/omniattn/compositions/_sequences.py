"""Sequences of a call, whose numbers of past tokens may differ."""

from __future__ import annotations

from torch import Tensor

__all__ = ["batches"]


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
