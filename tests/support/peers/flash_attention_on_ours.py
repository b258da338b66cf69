"""The functions of flash-attention 2, as its tests call them, by ours."""

import pytest
import torch

from omniattn import functional as F
from omniattn.functional import masks


def _options(softmax_scale, causal, window_size, softcap, alibi_slopes) -> dict:
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window_size": tuple(int(n) for n in window_size),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }


def _without_dropout(dropout_p) -> None:
    if dropout_p:
        pytest.skip("dropout draws other bits")


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    _without_dropout(dropout_p)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = F.attention(q, k, v, return_lse=True, **options)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(q, kv, *args, **options):
    return flash_attn_func(q, *kv.unbind(2), *args, **options)


def flash_attn_qkvpacked_func(qkv, *args, **options):
    return flash_attn_func(*qkv.unbind(2), *args, **options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    _without_dropout(dropout_p)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is not None:
        k, v = (_unpaged(t, block_table, cu_seqlens_k) for t in (k, v))
    lengths = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)
    out, lse = F.attention_varlen(q, k, v, *lengths, return_lse=True, **options)
    return (out, lse, None) if return_attn_probs else out


def _unpaged(pages, block_table, cu_seqlens):
    rows = pages[block_table.long()].flatten(1, 2)
    return rows[torch.arange(rows.shape[1]) < cu_seqlens.diff()[:, None]]


def flash_attn_varlen_kvpacked_func(q, kv, *args, **options):
    return flash_attn_varlen_func(q, *kv.unbind(1), *args, **options)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *args, **options):
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(*qkv.unbind(1), *lengths, *args, **options)


def apply_rotary_emb(
    x,
    cos,
    sin,
    interleaved=False,
    inplace=False,
    seqlen_offsets=0,
    cu_seqlens=None,
    max_seqlen=None,
):
    if cu_seqlens is not None:
        offsets = torch.as_tensor(seqlen_offsets) * torch.ones(
            len(cu_seqlens) - 1, dtype=torch.long
        )
        positions = F.packed_positions(cu_seqlens, x.shape[0])
        positions = positions + offsets.repeat_interleave(cu_seqlens.diff())
        options = {"positions": positions[None], "interleaved": interleaved}
        return F.apply_rotary(x[None], None, cos, sin, **options)[0][0]
    positions = seqlen_offsets
    if isinstance(positions, torch.Tensor):
        positions = positions[:, None] + torch.arange(x.shape[1])
    if inplace and x.requires_grad:
        x = x.clone()  # theirs writes over the leaf and its gradient
    options = {"positions": positions, "interleaved": interleaved, "inplace": inplace}
    return F.apply_rotary(x, None, cos, sin, **options)[0]


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
):
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if cache_batch_idx is not None:
        pytest.skip("cache_batch_idx has no counterpart")
    if rotary_cos is not None:
        tables = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": rotary_interleaved}
        first = cache_seqlens[:, None]
        moving = causal or options["window_size"] != (-1, -1)
        places = first + torch.arange(q.shape[1]) * int(moving)
        q = F.apply_rotary(q, None, positions=places, **tables)[0]
        k = F.apply_rotary(k, None, positions=first + torch.arange(k.shape[1]), **tables)[0]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if k is not None:
        places = cache_seqlens[:, None].long() + torch.arange(k.shape[1])
        row = torch.arange(len(q))[:, None]
        if block_table is not None:
            row = block_table.long()[row, places // k_cache.shape[1]]
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[row, places % k_cache.shape[1]] = new
        cache_seqlens = cache_seqlens + k.shape[1]
    if cache_leftpad is not None:
        options["mask"] = masks.KeyPadding(torch.arange(capacity) >= cache_leftpad[:, None])
    return F.attention_cached(
        q, k_cache, v_cache, cache_seqlens, block_table=block_table, **options
    )


NAMES = {name: value for name, value in globals().items() if "attn_" in name or "rotary_" in name}
