"""Attention baselines: torch's kernels with our layouts and options."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from baselines._common import Function, compile_once, lacks
from omniattn import reference
from omniattn.functional import masks


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | masks.Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor:
    lacks(softcap=softcap, seeded_dropout=dropout_p, lse=return_lse, options=options)
    tq, tk = q.shape[1], k.shape[1]
    if alibi_slopes is not None:
        distance = torch.arange(tk) - (torch.arange(tq)[:, None] + tk - tq)
        slopes = alibi_slopes.reshape(-1, q.shape[2], 1, 1)
        term = slopes * -distance.abs().to(slopes)
        bias = term if bias is None else bias + term
    mask = mask.dense(tq, tk, heads=q.shape[2]) if isinstance(mask, masks.Mask) else mask
    top_left = causal and tq == tk and window_size == (-1, -1) and mask is None and bias is None
    attn_mask = mask
    if (causal or window_size != (-1, -1)) and not top_left:
        left, right = window_size
        seen = masks.SlidingWindow(left, 0 if causal else right).dense(tq, tk).to(q.device)
        attn_mask = seen if mask is None else mask & seen
    if bias is not None:
        hidden = float("-inf")
        attn_mask = bias if attn_mask is None else bias.masked_fill(~attn_mask, hidden)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask,
        is_causal=top_left,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Computes the definition, for options that torch's kernel lacks."""
    lacking = ("softcap", "sinks", "head_scale", "score_mod", "dropout_p", "relative_keys")
    if "normalizer" not in options and not any(name in options for name in lacking):
        raise NotImplementedError("torch has a kernel")
    return reference.attention(q, k, v, **options)


def padded_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """Computes packed attention by padding and masking, then selects the real rows."""
    lacks(options=options)
    lengths_q, lengths_k = cu_seqlens_q.diff()[:, None], cu_seqlens_k.diff()[:, None]
    rows_q = torch.arange(max_seqlen_q) < lengths_q
    rows_k = torch.arange(max_seqlen_k) < lengths_k

    def pad(t: Tensor, rows: Tensor) -> Tensor:
        return t.new_zeros(*rows.shape, *t.shape[1:]).index_put((rows,), t)

    mask = rows_k[:, None, None, :].expand(-1, 1, max_seqlen_q, -1)
    if causal:
        i = torch.arange(max_seqlen_q)[:, None] + (lengths_k - lengths_q)[..., None]
        mask = mask & (torch.arange(max_seqlen_k) <= i)[:, None]
    out = sdpa_attention(pad(q, rows_q), pad(k, rows_k), pad(v, rows_k), mask=mask)
    return out[rows_q]


def masked_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    causal: bool = False,
    block_table: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attends to a whole static cache with a mask, as transformers does; gathers pages first."""
    lacks(full=not causal, options=options)
    if block_table is not None:
        k, v = (t[block_table].flatten(1, 2) for t in (k, v))
    lengths = cache_seqlens[:, None, None, None]
    i = torch.arange(q.shape[1])[:, None] + lengths - q.shape[1]
    return sdpa_attention(q, k, v, mask=torch.arange(k.shape[1]) <= i)


def eager_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    column_sums: bool = False,
    **options: Any,
) -> Tensor:
    lacks(options=options)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[3] ** -0.5
    p = torch.exp(s - lse[..., None])
    if causal:
        seen = masks.Causal().dense(q.shape[1], k.shape[1]).to(q.device)
        p = p.masked_fill(~seen, 0)
    return p.sum(-2) if column_sums else p


def held_to(backend: SDPBackend, function: Function) -> Function:
    """Restricts `function` to one of torch's attention kernels."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(backend):
            return function(*args, **kwargs)

    return call


def compiled_flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    score_mod: Any = None,
    **options: Any,
) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    lacks(options=options, backward=torch.is_grad_enabled() and q.requires_grad)
    block_mask = flex_mask(q.shape[1], k.shape[1], causal, window_size, q.device.type)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = compile_once(flex_attention)(
        q, k, v, score_mod, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


@functools.cache
def flex_mask(tq: int, tk: int, causal: bool, window: tuple[int, int], device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    left, right = window[0], 0 if causal else window[1]
    if left < 0 and right < 0:
        return None

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - (i + (tk - tq))
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen = seen & (distance >= -left) if left >= 0 else seen
        return seen & (distance <= right) if right >= 0 else seen

    return create_block_mask(rule, None, None, tq, tk, device=device)


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    query_block: int = 1,
    causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor:
    """Gathers keys and values to (B, Hkv, Tq, n, D), then computes two products per query."""
    (batch, tq, heads, dim), (tk, groups) = q.shape, k.shape[1:3]
    each_head = indices.shape[1] > groups
    lacks(sinks=sinks, lse=return_lse, options=options, queries=query_block != 1, heads=each_head)
    lists = indices.expand(batch, groups, -1, -1).long()
    key = lists[..., None] * block_size + torch.arange(block_size, device=q.device)
    key = key.flatten(3)
    position = torch.arange(tq, device=q.device)[:, None] + tk - tq
    seen = (key >= 0) & (key < tk) & ((key <= position) | (not causal))
    entry = torch.arange(batch, device=q.device)[:, None, None, None]
    head = torch.arange(groups, device=q.device)[:, None, None]
    at = key.clamp(0, tk - 1)
    chosen_k, chosen_v = k[entry, at, head], v[entry, at, head]
    rows = q.view(batch, tq, groups, heads // groups, dim).transpose(1, 2)
    factor = dim**-0.5 if scale is None else scale
    s = (rows @ chosen_k.mT * factor).masked_fill(~seen[..., None, :], float("-inf"))
    out = torch.softmax(s.float(), -1).to(q.dtype) @ chosen_v
    return out.transpose(1, 2).reshape(batch, tq, heads, v.shape[3])


def wall_attention(q: Tensor, *args: Any, **options: Any) -> Any:
    lacks(memory=q.shape[1] > 512)  # T x T decays of every channel
    return reference.wall_attention(q, *args, **options)


def convolved_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    head_weight: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    lead: int = 0,
) -> Tensor:
    """Multi-token attention with a grouped conv2d over the logits of all pairs."""
    (heads, rows, width), (tq, tk) = weight.shape, (q.shape[1], k.shape[1])
    lacks(queries_without_keys=causal and tq > tk)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    hidden = torch.ones(tq, tk, dtype=torch.bool).triu(1 + tk - tq) & causal
    k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = (scale * q @ k.mT).masked_fill(hidden, 0)
    s = F.pad(s, (width // 2, width // 2, rows - 1, 0))
    p = F.conv2d(s, weight[:, None], groups=heads).masked_fill(hidden, -torch.inf).softmax(-1)
    if head_weight is not None:
        p = p.unflatten(1, head_weight.shape[:2])
        p = torch.einsum("bncij,nco->bnoij", p, head_weight).flatten(1, 2)
    return (p[:, :, lead:] @ v).transpose(1, 2)


BASELINES = {
    "attention": {
        "aten": sdpa_attention,
        "math": held_to(SDPBackend.MATH, sdpa_attention),
        "flex": compiled_flex_attention,
        "eager": eager_attention,
    },
    "scaled_dot_product_attention": {
        "aten": F.scaled_dot_product_attention,
        "math": held_to(SDPBackend.MATH, F.scaled_dot_product_attention),
    },
    "attention_weights": {"eager": eager_weights},
    "attention_varlen": {"aten": padded_varlen},
    "attention_cached": {"aten": masked_cached},
    "attention_int8": {"eager": reference.attention_int8},
    "select_attention": {"eager": reference.select_attention},
    "selected_attention": {"eager": gathered_attention},
    "selective_attention": {"eager": reference.selective_attention},
    "forgetting_attention": {"eager": reference.forgetting_attention},
    "path_attention": {"eager": reference.path_attention},
    "wall_attention": {"eager": wall_attention},
    "stick_breaking_attention": {"eager": reference.stick_breaking_attention},
    "softpick_attention": {"eager": reference.softpick_attention},
    "sparsemax_attention": {"eager": reference.sparsemax_attention},
    "multi_token_attention": {"aten": convolved_attention},
    "parallax_attention": {"eager": reference.parallax_attention},
    "moba_attention": {"eager": reference.moba_attention},
    "nsa_attention": {"eager": reference.nsa_attention},
    "routed_block_attention": {"eager": reference.routed_block_attention},
}
#: Ops with other baselines on a GPU; "math" would store all scores of long sequences.
ON_GPU = {
    "attention": {
        "aten": sdpa_attention,
        "flash": held_to(SDPBackend.FLASH_ATTENTION, sdpa_attention),
        "cudnn": held_to(SDPBackend.CUDNN_ATTENTION, sdpa_attention),
        "flex": compiled_flex_attention,
    }
}
