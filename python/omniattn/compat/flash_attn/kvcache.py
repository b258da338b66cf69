"""Decoding with a cache: flash-attn's flash_attn_with_kvcache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import (
    is_traced,
    require_int,
    require_like,
    require_rows,
    require_shape,
)
from omniattn.compat._errors import (
    errors_of,
    require_flags,
    require_form,
    require_index,
    require_real,
    require_writable,
)
from omniattn.compat.flash_attn.interface import options_of
from omniattn.functional import masks


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends keys and values to caches in place and attends to them, for inference.

    Without k and v it only attends. Results have no gradients, as in flash-attn.

    Args:
        q: (B, Tq, Hq, D).
        k_cache: (rows, capacity, Hkv, D), or with a block table (pages, page size, Hkv, D).
        v_cache: (rows, capacity, Hkv, Dv), or (pages, page size, Hkv, Dv).
        k: (B, T, Hkv, D), written to entries cache_seqlens, cache_seqlens + 1, ... of the cache.
        v: (B, T, Hkv, Dv), written likewise.
        rotary_cos: (P, Dr / 2), whose rows cache_seqlens, cache_seqlens + 1, ... rotate k, and q
            with `causal` or a window. Otherwise row cache_seqlens rotates all queries.
        rotary_sin: table of sines, of the shape of `rotary_cos`.
        cache_seqlens: (B,) int, or an int: the number of keys in the cache, without k. None is the
            capacity.
        cache_batch_idx: (B,) int, row of the cache for each sequence; not with a block table.
        cache_leftpad: (B,) int, the number of entries at the start of the cache that are not seen.
        block_table: (B, M) int: key t of sequence b is row ``t % page size`` of page
            ``block_table[b, t // page size]``. Pages may have any size.
        softmax_scale, causal, window_size, softcap, alibi_slopes: see :func:`flash_attn_func`.
        rotary_interleaved: True if pairs are (2 i, 2 i + 1), False for (i, i + Dr / 2).
        num_splits: has no effect.
        return_softmax_lse: if True, returns (O, lse) instead of O.

    Returns:
        O (B, Tq, Hq, Dv), and lse (B, Hq, Tq).

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not match, or the cache is too short.
    """
    op = "flash_attn_with_kvcache"
    require_int(op, "num_splits", num_splits)
    options = options_of(op, softmax_scale, causal, window_size, softcap, alibi_slopes)
    rotary = rotary_cos, rotary_sin, None, rotary_interleaved
    places = cache_seqlens, cache_batch_idx, cache_leftpad, block_table, "block_table"
    out, lse = with_cache(op, q, (k_cache, v_cache), (k, v), rotary, places, options)
    require_flags(op, return_softmax_lse=return_softmax_lse)
    return (out, lse) if return_softmax_lse else out


def with_cache(
    op: str,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor | None, Tensor | None],
    rotary: tuple[Tensor | None, Tensor | None, Tensor | None, bool],
    places: tuple[Tensor | int | None, Tensor | None, Tensor | None, Tensor | None, str],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Appends to caches and attends to them; returns O and lse.

    Args:
        op: name for errors.
        q, caches, new: see :func:`flash_attn_with_kvcache`.
        rotary: cosines, sines, first positions instead of the lengths or None, interleaved.
        places: lengths, rows and left padding of caches, pages and their name.
        options: options of `functional.attention`.
    """
    (k_cache, v_cache), (k, v), (cos, sin, first, interleaved) = caches, new, rotary
    cache_seqlens, batch_idx, leftpad, pages, pages_name = places
    _require_caches(op, q, k_cache, v_cache)
    require_flags(op, rotary_interleaved=interleaved)
    table = _table(op, len(q), k_cache, pages, batch_idx, pages_name)
    size = k_cache.shape[1]
    capacity = size if table is None else size * table.shape[1]
    lengths = _lengths(op, q, cache_seqlens, capacity, k is not None)
    if cos is not None or sin is not None:
        if k is None or cos is None or sin is None:
            raise ValueError(
                f"{op}: rotary_cos and rotary_sin must be given together, and with k, got "
                f"rotary_cos is None: {cos is None}, rotary_sin is None: "
                f"{sin is None}, k is None: {k is None}"
            )
        moving = options["causal"] or tuple(options["window_size"]) != (-1, -1)
        start = lengths if first is None else first
        q, k = _rotated(op, q, k, (cos, sin, interleaved), start, moving)
    if (k is None) != (v is None):
        raise ValueError(f"{op}: k and v must be given together, got k is None: {k is None}")
    if k is not None and v is not None:
        _append(op, caches, (k, v), lengths, table, capacity, pages_name)
        lengths = lengths + k.shape[1]
    if leftpad is not None:
        require_index(op, "cache_leftpad", leftpad, (len(q),), q, "q")
        seen = masks.KeyPadding(torch.arange(capacity, device=q.device) >= leftpad[:, None])
        options["mask"] = options["mask"] & seen if "mask" in options else seen
    with errors_of(op, scale="softmax_scale", k="k_cache", v="v_cache"):
        out, lse = functional.attention_cached(
            q, k_cache, v_cache, lengths, block_table=table, return_lse=True, **options
        )
    return out, lse


def _rotated(
    op: str,
    q: Tensor,
    k: Tensor,
    tables: tuple[Tensor, Tensor, bool],
    first: Tensor,
    moving: bool,
) -> tuple[Tensor, Tensor]:
    """Returns q and k at positions first, first + 1, ...; all of q at `first` if not moving."""
    start = first.long()[:, None]
    steps = torch.arange(max(q.shape[1], k.shape[1]), device=q.device)
    options: dict[str, Any] = dict(zip(("cos", "sin", "interleaved"), tables, strict=True))
    with errors_of(op, cos="rotary_cos", sin="rotary_sin", positions="cache_seqlens"):
        places = start + steps[: q.shape[1]] * int(moving)
        q = functional.apply_rotary(q, None, positions=places, **options)[0]
        places = start + steps[: k.shape[1]]
        k = functional.apply_rotary(k, None, positions=places, **options)[0]
    return q, k


def _require_caches(op: str, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    require_real(op, q=q, k_cache=k_cache, v_cache=v_cache)
    require_form(op, "q", q, "B, T, H, D")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_form(op, name, cache, "B, T, H, D")
        require_like(op, name, cache, q, "q")
    require_shape(op, "v_cache", v_cache, (*k_cache.shape[:3], v_cache.shape[3]))


def _table(
    op: str,
    batch: int,
    cache: Tensor,
    block_table: Tensor | None,
    batch_idx: Tensor | None,
    name: str,
) -> Tensor | None:
    """Returns the pages of each sequence; rows of a cache are pages of its capacity."""
    if block_table is None and batch_idx is None:
        return None
    if block_table is not None and batch_idx is not None and name == "block_table":
        raise ValueError(f"{op}: cache_batch_idx must be None with {name}")
    if block_table is None and batch_idx is not None:
        require_index(op, "cache_batch_idx", batch_idx, (batch,), cache, "k_cache")
        require_rows(op, "cache_batch_idx", batch_idx, len(cache))
        return batch_idx.int()[:, None]
    if not isinstance(block_table, Tensor) or block_table.ndim != 2 or cache.shape[1] < 1:
        raise ValueError(f"{op}: {name} must be a tensor (B, M), and pages must have tokens")
    count = batch if batch_idx is None else len(block_table)
    require_index(op, name, block_table, (count, block_table.shape[1]), cache, "k_cache")
    return block_table if batch_idx is None else picked(op, block_table, batch_idx, batch, name)


def picked(op: str, table: Tensor, batch_idx: Tensor, batch: int, name: str) -> Tensor:
    """Returns the rows of a table of pages that `cache_batch_idx` names."""
    require_index(op, "cache_batch_idx", batch_idx, (batch,), table, name)
    require_rows(op, "cache_batch_idx", batch_idx, len(table))
    return table[batch_idx.long()]


def _lengths(
    op: str, q: Tensor, cache_seqlens: Tensor | int | None, capacity: int, appends: bool
) -> Tensor:
    if cache_seqlens is None and appends:
        raise ValueError(f"{op}: cache_seqlens must be given with k, got cache_seqlens=None")
    if not isinstance(cache_seqlens, Tensor):
        count = capacity if cache_seqlens is None else cache_seqlens
        require_int(op, "cache_seqlens", count, 0)
        return torch.full((len(q),), count, dtype=torch.int32, device=q.device)
    require_index(op, "cache_seqlens", cache_seqlens, (len(q),), q, "q")
    return cache_seqlens


def _append(
    op: str,
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    lengths: Tensor,
    table: Tensor | None,
    capacity: int,
    name_of_pages: str,
) -> None:
    """Writes new keys and values after the first `lengths` entries of each sequence."""
    batch, steps, size = len(lengths), new[0].shape[1], caches[0].shape[1]
    for name, cache, rows in zip("kv", caches, new, strict=True):
        require_real(op, **{name: rows})
        require_like(op, name, rows, cache, f"{name}_cache")
        require_shape(op, name, rows, (batch, steps, *cache.shape[2:]))
        require_writable(op, f"{name}_cache", cache)
    places = lengths.long()[:, None] + torch.arange(steps, device=lengths.device)
    if not is_traced() and not places.is_meta and bool((places >= capacity).any()):
        raise ValueError(
            f"{op}: k_cache must have room for the new keys, got a capacity of {capacity}, "
            f"cache_seqlens up to {int(lengths.max())} and k.shape={tuple(new[0].shape)}"
        )
    row = torch.arange(batch, device=lengths.device)[:, None]
    if table is not None:
        row = table[row, places // size].long()
        require_rows(op, name_of_pages, row, len(caches[0]))
    for cache, rows in zip(caches, new, strict=True):
        cache[row, places % size] = rows
