"""flash-attn 3: `flash_attn_interface`, attention functions for packed sequences and caches.

`num_splits`, `pack_gqa`, `sm_margin`, `deterministic` and `scheduler_metadata` affect only the
kernels of flash-attn and have no effect. Factors of FP8 (`q_descale`, `k_descale`, `v_descale`)
must be None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import require_int, require_shape
from omniattn.compat._errors import require_flags, require_form, require_index, require_real
from omniattn.compat.flash_attn.cute import flash_attn_combine as _combine
from omniattn.compat.flash_attn.cute import with_qv
from omniattn.compat.flash_attn.interface import options_of
from omniattn.compat.flash_attn.kvcache import picked, with_cache
from omniattn.compat.flash_attn.lengths import Lengths, attend
from omniattn.functional import masks

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

#: O, or (O, lse) with `return_attn_probs`.
Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Computes :func:`functional.attention` with the arguments of flash-attn 3.

    Args:
        q: (B, Tq, Hq, D).
        k: (B, Tk, Hkv, D).
        v: (B, Tk, Hkv, Dv).
        softmax_scale: factor of the logits; None is 1 / sqrt(D), or 1 / sqrt(D + Dv) with qv.
        causal: True for a causal mask, aligned bottom-right.
        qv: (B, Tq, Hq, Dv), whose products with v are added to those of q and k (absorbed MLA).
        q_descale, k_descale, v_descale: must be None.
        window_size: (left, right); -1 is unlimited.
        attention_chunk: size of chunks, aligned bottom-right, that see only themselves; 0 is off.
        softcap: limit of the logits; 0 is off.
        num_splits, pack_gqa, deterministic, sm_margin: have no effect.
        return_attn_probs: if True, returns (O, lse).

    Returns:
        O (B, Tq, Hq, Dv), and lse (B, Hq, Tq) in fp32. A query without a key gives O = 0.
    """
    op = "flash_attn_func"
    _require_no_fp8(op, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = _options(op, softmax_scale, causal, window_size, attention_chunk, softcap)
    require_flags(op, deterministic=deterministic, return_attn_probs=return_attn_probs)
    q, k = with_qv(op, q, k, v, qv, options)
    out, lse = attend(op, q, k, v, Lengths(), options)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Computes :func:`flash_attn_func` with one tensor qkv.

    Args:
        qkv: (B, T, 3, H, D), or with `num_heads_q` (B, T, Hq + 2 Hkv, D).
        num_heads_q: Hq, or None.
        softmax_scale, causal, window_size, attention_chunk, softcap: see :func:`flash_attn_func`.
        q_descale, k_descale, v_descale: must be None.
        deterministic, sm_margin: have no effect.
        return_attn_probs: if True, returns (O, lse).
    """
    op = "flash_attn_qkvpacked_func"
    require_real(op, qkv=qkv)
    if num_heads_q is None:
        require_form(op, "qkv", qkv, "B, T, 3, H, D")
        require_shape(op, "qkv", qkv, (*qkv.shape[:2], 3, *qkv.shape[3:]))
        q, k, v = qkv.unbind(2)
    else:
        require_int(op, "num_heads_q", num_heads_q, 1)
        require_form(op, "qkv", qkv, "B, T, H, D")
        heads = qkv.shape[2] - num_heads_q
        if heads < 2 or heads % 2:
            raise ValueError(
                f"{op}: qkv must have num_heads_q + 2 Hkv heads, got num_heads_q={num_heads_q}, "
                f"qkv.shape={tuple(qkv.shape)}"
            )
        q, k, v = qkv.split([num_heads_q, heads // 2, heads // 2], dim=2)
    _require_no_fp8(op, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = _options(op, softmax_scale, causal, window_size, attention_chunk, softcap)
    require_flags(op, deterministic=deterministic, return_attn_probs=return_attn_probs)
    out, lse = attend(op, q, k, v, Lengths(), options)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Computes :func:`functional.attention_varlen` with the arguments of flash-attn 3.

    Args:
        q: (total_q, Hq, D).
        k: (total_k, Hkv, D).
        v: (total_k, Hkv, Dv).
        cu_seqlens_q: (N + 1,) int: rows cu_seqlens_q[n] .. cu_seqlens_q[n + 1] are sequence n.
        cu_seqlens_k: (N + 1,), for keys and values.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        seqused_q, seqused_k: (N,) int, the number of rows in use of each sequence.
        softmax_scale, causal, window_size, attention_chunk: see :func:`flash_attn_func`.
        qv: (total_q, Hq, Dv), see :func:`flash_attn_func`.
        q_descale, k_descale, v_descale: must be None.
        softcap: limit of the logits; 0 is off.
        num_splits, pack_gqa, deterministic, sm_margin: have no effect.
        return_attn_probs: if True, returns (O, lse).

    Returns:
        O (total_q, Hq, Dv), and lse (Hq, total_q). Rows that are not in use have O = 0.
    """
    op = "flash_attn_varlen_func"
    _require_no_fp8(op, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = _options(op, softmax_scale, causal, window_size, attention_chunk, softcap)
    require_flags(op, deterministic=deterministic, return_attn_probs=return_attn_probs)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    q, k = with_qv(op, q, k, v, qv, options)
    out, lse = attend(op, q, k, v, lengths, options)
    return (out, lse) if return_attn_probs else out


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Appends keys and values to caches in place and attends to them, for inference.

    Args:
        q: (B, Tq, Hq, D), or (total_q, Hq, D) with cu_seqlens_q.
        k_cache: (rows, capacity, Hkv, D), or with a page table (pages, page size, Hkv, D).
        v_cache: (rows, capacity, Hkv, Dv), or (pages, page size, Hkv, Dv).
        k: (B, T, Hkv, D), written to entries cache_seqlens, cache_seqlens + 1, ... of the cache.
        v: (B, T, Hkv, Dv), written likewise.
        qv: (B, Tq, Hq, Dv), whose products with v_cache are added to those of q and k_cache, which
            copies the caches; not with k.
        rotary_cos: (P, Dr / 2), whose rows cache_seqlens, cache_seqlens + 1, ... rotate k, and q
            with `causal` or a window. Otherwise row cache_seqlens rotates all queries.
        rotary_sin: table of sines, of the shape of `rotary_cos`.
        cache_seqlens: (B,) int, or an int: the number of keys in the cache, without k. None is the
            capacity.
        cache_batch_idx: (B,) int, row of the cache, or of page_table, for each sequence.
        cache_leftpad: (B,) int, the number of entries at the start of the cache that are not seen.
        page_table: (B, M) int, pages of each sequence, of any size.
        cu_seqlens_q: (B + 1,) int, the first rows of packed queries; not with k.
        cu_seqlens_k_new: must be None: new keys have shape (B, T, Hkv, D).
        max_seqlen_q: upper bound of the lengths of queries.
        rotary_seqlens: (B,) int, the first position in place of cache_seqlens.
        q_descale, k_descale, v_descale: must be None.
        softmax_scale, causal, window_size: see :func:`flash_attn_func`.
        attention_chunk, softcap: see :func:`flash_attn_func`.
        rotary_interleaved: True if pairs are (2 i, 2 i + 1), False for (i, i + Dr / 2).
        scheduler_metadata, num_splits, pack_gqa, sm_margin: have no effect.
        return_softmax_lse: if True, returns (O, lse, empty tensor, empty tensor).

    Returns:
        O in the form of q, and lse (B, Hq, Tq) or (Hq, total_q).
    """
    op = "flash_attn_with_kvcache"
    _require_no_fp8(op, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    require_flags(op, return_softmax_lse=return_softmax_lse)
    if cu_seqlens_k_new is not None:
        raise NotImplementedError(f"{op}: cu_seqlens_k_new must be None; k has shape (B, T, H, D)")
    options = _options(op, softmax_scale, causal, window_size, attention_chunk, softcap)
    if k is not None and (qv is not None or cu_seqlens_q is not None):
        raise NotImplementedError(f"{op}: k must be None with qv and cu_seqlens_q")
    q, keys = with_qv(op, q, k_cache, v_cache, qv, options)
    if cu_seqlens_q is not None:
        places = cache_seqlens, cache_batch_idx, cache_leftpad, page_table
        queries = cu_seqlens_q, max_seqlen_q
        out, lse = _packed_queries(op, q, (keys, v_cache), queries, places, options)
    else:
        rotary = rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved
        where = cache_seqlens, cache_batch_idx, cache_leftpad, page_table, "page_table"
        out, lse = with_cache(op, q, (keys, v_cache), (k, v), rotary, where, options)
    empty = out.new_empty(0)
    return (out, lse, empty, empty) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention to disjoint sets of keys, see :func:`functional.merge_attention`.

    Args:
        out_partial: O of each set, (splits, B, T, H, D) or (splits, total, H, D).
        lse_partial: lse of each set, (splits, B, T, H) or (splits, total, H).
        out: tensor that takes the result, or None; without gradients.
        out_dtype: dtype of the result; None is that of out_partial.

    Returns:
        O (B, T, H, D) or (total, H, D), and lse (B, T, H) or (total, H).
    """
    found, lse = _combine(out_partial, lse_partial, out, out_dtype)
    assert lse is not None
    return found, lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """Returns None for the `scheduler_metadata` of :func:`flash_attn_with_kvcache`."""
    return None


def _packed_queries(
    op: str,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    queries: tuple[Tensor, int | None],
    places: tuple[Tensor | int | None, Tensor | None, Tensor | None, Tensor | None],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Returns attention of packed queries to caches."""
    (k, v), (cu_seqlens, longest) = caches, queries
    cache_seqlens, rows, leftpad, table = places
    require_real(op, k_cache=k, v_cache=v)
    require_form(op, "k_cache", k, "B, T, H, D")
    require_index(op, "cu_seqlens_q", cu_seqlens, tuple(cu_seqlens.shape), q, "q")
    count = len(cu_seqlens) - 1
    if rows is not None and table is not None:
        table = picked(op, table, rows, count, "page_table")
    elif rows is not None:
        require_index(op, "cache_batch_idx", rows, (count,), k, "k_cache")
        table = rows.int()[:, None]
    if table is None:
        table = torch.arange(len(k), dtype=torch.int32, device=k.device)[:, None]
    if leftpad is not None:
        raise NotImplementedError(f"{op}: cache_leftpad must be None with cu_seqlens_q")
    if cache_seqlens is None:
        cache_seqlens = table.shape[1] * k.shape[1]
    if not isinstance(cache_seqlens, Tensor):
        require_int(op, "cache_seqlens", cache_seqlens, 0)
        cache_seqlens = torch.full((count,), cache_seqlens, device=k.device)
    used = cache_seqlens
    lengths = Lengths(cu_seqlens, None, longest, None, None, used, table)
    return attend(op, q, k, v, lengths, options)


def _options(
    op: str,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    attention_chunk: int,
    softcap: float,
) -> dict[str, Any]:
    """Returns the options of `functional.attention`."""
    options = options_of(op, softmax_scale, causal, window_size, softcap, None)
    require_int(op, "attention_chunk", attention_chunk, 0)
    if attention_chunk:
        options["mask"] = masks.Chunked(attention_chunk, causal=False)
    return options


def _require_no_fp8(op: str, **factors: Tensor | None) -> None:
    for name, value in factors.items():
        if value is not None:
            raise NotImplementedError(
                f"{op}: {name} must be None, since FP8 is not supported, got a tensor"
            )
