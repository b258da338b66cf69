"""Rows of queries, next to the heads of the keys that they see."""

from __future__ import annotations

from torch import Tensor

from omniattn.reference.precision import widen

__all__ = ["grouped", "heads_first", "of_rows", "rows_of"]


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
