"""Softmax attention with masks, biases, softcap and dropout; torch's drop-in beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from omniattn import reference
from omniattn.functional._checks import require_float, require_like, use_reference
from omniattn.functional.masks import All, BoolMask, Mask, SlidingWindow
from omniattn.functional.scores import RelativeBias, ScoreRule
from omniattn.ops import attention as ops
from omniattn.reference.attention import (
    AttentionOptions,
    Logits,
    Normaliser,
    Visibility,
    Weights,
    default_scale,
)
from omniattn.reference.masks import BLOCK, MaskKind, Rule
from omniattn.reference.philox import new_seed
from omniattn.reference.scores import ScoreKind

__all__ = [
    "attention",
    "attention_cached",
    "attention_varlen",
    "attention_weights",
    "merge_attention",
    "scaled_dot_product_attention",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    sinks: Tensor | None = None,
    head_scale: Tensor | None = None,
    normaliser: Normaliser = "softmax",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, tiled: memory grows with T, not with T^2; masked tiles cost nothing.

    ``O = softmax(f(head_scale * scale * q k^T) + bias - slope |k - i| + relative) v`` over the
    allowed keys, ``f`` the identity or ``softcap * tanh(. / softcap)``, i = q + Tk - Tq the place
    of query q among the keys. Query head h reads kv head ``h // (Hq / Hkv)``.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16; any strides, copied only where the
            last one is not 1. Under autocast q, k and v are cast to its dtype.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv.
        v: (B, Tk, Hkv, Dv) of q's dtype; Dv may differ from D.
        causal: query i sees keys up to i + Tk - Tq (bottom-right aligned).
        window_size: (left, right): keys from left before to right behind that position, inclusive;
            -1 is unbounded.
        mask: bool, True = attend, broadcastable to (B, Hq, Tq, Tk), or a value of
            `functional.masks`. Everything is ANDed.
        bias: added to the logits after scale and softcap, broadcastable to (B, Hq, Tq, Tk), of any
            floating dtype not wider than q's accumulator. Its gradient has its own shape and dtype.
        scale: factor on q k^T; None is 1 / sqrt(D).
        softcap: 0 is off.
        alibi_slopes: (Hq,) or (B, Hq), see :func:`alibi_slopes`; no (Tq, Tk) tensor is made.
        relative: a value of `functional.scores` that reads a table (T5, Swin, any function of the
            distance) without making a (Tq, Tk) tensor; not together with alibi_slopes.
        sinks: (Hq,), a logit per head that takes part in the softmax with a value of 0: it is not
            scaled, capped, masked or dropped.
        head_scale: (Hq,), a factor of scale per head.
        normaliser: what makes weights of the logits: "softmax", or of each logit by itself
            "sigmoid" (add its bias -ln Tk by `bias`) or "relu2", relu(logit)^2 (scale = 1 / Tk).
        dropout_p: probability of dropping an attention weight; kept ones are multiplied by
            1 / (1 - dropout_p).
        seed: int64 (2,) on the CPU, [seed, offset] of the dropout mask, which is a function of
            (seed, offset, b, h, i, j) alone. None draws one from torch's generator.
        return_lse: also return the log-sum-exp of the masked logits.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype, and with return_lse lse (B, Hq, Tq) in float32 (float64 for
        float64), the sink included. A query that sees no key gives O = 0, lse = -inf (the sink, if
        there is one) and zero gradients.

    Raises:
        TypeError: a dtype that is unsupported or does not fit the others.
        ValueError: a shape, device or value that does not fit.
        NotImplementedError: no native kernel for the device.

    Note:
        Logits, softmax and all sums are in fp32 (fp64 for fp64) and rounded once. Forward and
        backward do not depend on the number of threads. Gradients flow to q, k, v, bias,
        alibi_slopes, the table of `relative`, sinks and head_scale, each of its own shape and
        dtype, through O and lse; second and forward-mode derivatives recompute through the eager
        definition. softmax(s / T) with a temperature T is scale = 1 / T.

    Reference:
        Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762; Dao et al.,
        FlashAttention, 2022, arXiv:2205.14135; Dao, FlashAttention-2, 2023, arXiv:2307.08691;
        ALiBi: Press et al., Train Short, Test Long, 2021, arXiv:2108.12409; sinks: OpenAI, gpt-oss,
        2025, arXiv:2508.10925; sigmoid: Ramapuram et al., Theory, Analysis, and Best Practices for
        Sigmoid Self-Attention, 2024, arXiv:2409.04431; relu2: Hua et al., Transformer Quality in
        Linear Time, 2022, arXiv:2202.10447.

    Example:
        >>> q = k = torch.zeros(1, 2, 1, 4)
        >>> v = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
        >>> attention(q, k, v, causal=True).flatten()
        tensor([1., 2.])
    """
    op = "attention"
    q, k, v = _autocast(op, q, k, v)
    _check_shapes(op, q, k, v)
    options = AttentionOptions(
        Visibility(causal, window_size, mask),
        Logits(scale, head_scale, softcap, bias, alibi_slopes, relative),
        Weights(normaliser, sinks, dropout_p, seed),
    )
    return _run(op, q, k, v, _full(q, k), options, return_lse, backend)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    sinks: Tensor | None = None,
    head_scale: Tensor | None = None,
    normaliser: Normaliser = "softmax",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` of packed sequences of any lengths: no padding is stored or computed.

    Sequence n is a problem of its own, rows ``cu_seqlens_q[n] .. cu_seqlens_q[n + 1]`` of q against
    rows ``cu_seqlens_k[n] .. cu_seqlens_k[n + 1]`` of k and v, with its own Tq and Tk.

    Args:
        q: (total_q, Hq, D), as in :func:`attention`.
        k: (total_k, Hkv, D).
        v: (total_k, Hkv, Dv).
        cu_seqlens_q: (N + 1,) int32 or int64, growing, within total_q.
        cu_seqlens_k: (N + 1,) of the keys; the same tensor for self-attention.
        max_seqlen_q: at least the longest sequence of queries; None looks (on a GPU it waits).
        max_seqlen_k: the same of keys.
        causal, window_size, mask, bias, scale, softcap, alibi_slopes, relative, sinks, head_scale,
            normaliser, dropout_p, seed, return_lse, backend: see :func:`attention`. Tensors per
            batch entry or position are those of a batch (N, Hq, max_seqlen_q, max_seqlen_k).

    Returns:
        O (total_q, Hq, Dv), and with return_lse lse (Hq, total_q). Rows of no sequence give O = 0
        and lse = -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`; RuntimeError where
            cu_seqlens do not grow or leave their tensor.

    Example:
        >>> q, v = torch.zeros(3, 1, 4), torch.tensor([1.0, 3.0, 7.0]).view(3, 1, 1)
        >>> cu = torch.tensor([0, 2, 3])
        >>> attention_varlen(q, q, v, cu, cu).flatten()
        tensor([2., 2., 7.])
    """
    op = "attention_varlen"
    q, k, v = _autocast(op, q, k, v)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 3:
            raise ValueError(
                f"{op}: {name} must have 3 dimensions (total, H, D), "
                f"got {name}.shape={tuple(t.shape)}"
            )
    q, k, v = q[None], k[None], v[None]
    _check_shapes(op, q, k, v)
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_integers(op, name, cu, q)
        if cu.dim() != 1 or cu.shape[0] < 1 or cu.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"{op}: cu_seqlens must both have shape (N + 1,), "
                f"got {name}.shape={tuple(cu.shape)}"
            )
    longest_q = _longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
    longest_k = _longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k
    if longest_q < 0 or longest_k < 0:
        raise ValueError(
            f"{op}: max_seqlen must be >= 0, got max_seqlen_q={longest_q}, max_seqlen_k={longest_k}"
        )
    layout: Rule = (MaskKind.PACKED, longest_q, longest_k, (cu_seqlens_q, cu_seqlens_k))
    options = AttentionOptions(
        Visibility(causal, window_size, mask),
        Logits(scale, head_scale, softcap, bias, alibi_slopes, relative),
        Weights(normaliser, sinks, dropout_p, seed),
    )
    full = (len(cu_seqlens_q) - 1, q.shape[2], longest_q, longest_k)
    result = _run(op, q, k, v, full, options, return_lse, backend, layout)
    return (result[0][0], result[1][0]) if isinstance(result, tuple) else result[0]


def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    sinks: Tensor | None = None,
    head_scale: Tensor | None = None,
    normaliser: Normaliser = "softmax",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` to caches that hold another number of keys for every sequence.

    Sequence b is a problem of its own with ``Tk = cache_seqlens[b]``: its last query meets its last
    key, and what the cache holds behind is never read.

    Args:
        q: (B, Tq, Hq, D), as in :func:`attention`.
        k: (B, capacity, Hkv, D).
        v: (B, capacity, Hkv, Dv).
        cache_seqlens: (B,) int32 or int64, the keys of each sequence with those of its queries.
        causal, window_size, mask, bias, scale, softcap, alibi_slopes, relative, sinks, head_scale,
            normaliser, dropout_p, seed, return_lse, backend: see :func:`attention`, with Tk the
            capacity in the shapes of mask and bias.

    Returns:
        O (B, Tq, Hq, Dv), and with return_lse lse (B, Hq, Tq).

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`; RuntimeError where
            cache_seqlens exceed the capacity.

    Example:
        >>> q, k = torch.zeros(2, 1, 1, 4), torch.zeros(2, 3, 1, 4)
        >>> v = torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1).expand(2, 3, 1, 1)
        >>> attention_cached(q, k, v, torch.tensor([2, 3]), causal=True).flatten()
        tensor([2., 4.])
    """
    op = "attention_cached"
    q, k, v = _autocast(op, q, k, v)
    _check_shapes(op, q, k, v)
    _check_integers(op, "cache_seqlens", cache_seqlens, q)
    _require_mask_shape(op, "cache_seqlens", cache_seqlens, (q.shape[0],))
    options = AttentionOptions(
        Visibility(causal, window_size, mask),
        Logits(scale, head_scale, softcap, bias, alibi_slopes, relative),
        Weights(normaliser, sinks, dropout_p, seed),
    )
    layout: Rule = (MaskKind.CACHED, 0, 0, (cache_seqlens,))
    return _run(op, q, k, v, _full(q, k), options, return_lse, backend, layout)


def _run(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    full: tuple[int, ...],
    options: AttentionOptions,
    return_lse: bool,
    backend: str | None,
    layout: Rule | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Encodes the options of a call of shape (B, Hq, Tq, Tk) `full` and runs it."""
    normaliser, dropout_p = options.weights.normaliser, options.weights.dropout_p
    if return_lse and normaliser != "softmax":
        raise ValueError(f"{op}: return_lse needs softmax, got normaliser={normaliser!r}")
    aux, mask, score, params = _encode(op, q, full, options, layout)
    seed = _seed(op, options.weights.seed) if dropout_p > 0 else None
    run = ops.formula if use_reference(op, backend, q) else ops.attention
    out, lse = run(q, k, v, aux, seed, mask, score, params)
    return (out, lse) if return_lse else out


def _encode(
    op: str,
    q: Tensor,
    full: tuple[int, ...],
    options: AttentionOptions,
    layout: Rule | None = None,
) -> tuple[list[Tensor], list[int], list[int], list[float]]:
    """(aux, mask, score, params) of the op's schema, checked."""
    scale, dropout_p = options.logits.scale, options.weights.dropout_p
    params = [default_scale(q.shape[3]) if scale is None else scale, dropout_p]
    _check_numbers(op, params[0], options.logits.softcap, dropout_p)
    rules = _mask(op, options.visibility, q, full)
    aux: list[Tensor] = []
    mask: list[int] = []
    for kind, a, b, tensors in rules if layout is None else [layout, *rules]:
        mask += [kind, a, b, len(aux) if tensors else -1]
        aux += tensors
    score: list[int] = []
    for kind, side, parameters in _scores(op, options.logits, options.weights, q, full):
        score += [kind, -1 if side is None else len(aux), len(params) if parameters else -1]
        aux += () if side is None else (side,)
        params += parameters
    return aux, mask, score, params


def _full(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    return (q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    relative: RelativeBias | None = None,
    sinks: Tensor | None = None,
    head_scale: Tensor | None = None,
    normaliser: Normaliser = "softmax",
    column_sums: bool = False,
    backend: str | None = None,
) -> Tensor:
    """The weights P of :func:`attention`, to look at, from the lse it returned.

    ``P = exp(logits - lse)``, exactly those of the call with the same arguments, before dropout.

    Args:
        q: (B, Tq, Hq, D), as in :func:`attention`; k (B, Tk, Hkv, D).
        k: see q.
        lse: (B, Hq, Tq) as attention returned it, sinks included; not read but with softmax.
        causal, window_size, mask, bias, scale, softcap, alibi_slopes, relative, sinks, head_scale,
            normaliser, backend: those of the call.
        column_sums: the sums over queries instead, what each key received (the statistic of H2O,
            Zhang et al. 2023, arXiv:2306.14048); no (Tq, Tk) tensor is made.

    Returns:
        P (B, Hq, Tq, Tk) of q's dtype, 0 where not allowed, or their sums (B, Hq, Tk) in float32
        (float64 for float64).

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        Gradients, to q, k, lse and parameters, recompute through the eager definition.

    Example:
        >>> q = k = torch.zeros(1, 2, 1, 4)
        >>> _, lse = attention(q, k, k, causal=True, return_lse=True)
        >>> attention_weights(q, k, lse, causal=True)
        tensor([[[[1.0000, 0.0000],
                  [0.5000, 0.5000]]]])
    """
    op = "attention_weights"
    q, k, _ = _autocast(op, q, k, k)
    _check_shapes(op, q, k, k)
    full = _full(q, k)
    require_float(op, "lse", lse)
    widest = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse.dtype != widest or lse.device != q.device:
        raise TypeError(
            f"{op}: lse must be {widest} on the device of q, got {lse.dtype}, {lse.device}"
        )
    _require_mask_shape(op, "lse", lse, full[:3])
    options = AttentionOptions(
        Visibility(causal, window_size, mask),
        Logits(scale, head_scale, softcap, bias, alibi_slopes, relative),
        Weights(normaliser, sinks, 0.0, None),
    )
    codes = _encode(op, q, full, options)
    run = ops.weights_formula if use_reference(op, backend, q) else ops.attention_weights
    weights = run(q, k, lse, *codes, column_sums)
    assert isinstance(weights, Tensor)
    return weights


def merge_attention(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from what attention to each returned.

    ``lse = ln sum_n exp(lse_n)``, ``O = sum_n exp(lse_n - lse) O_n``: exact, so that keys may be
    split over calls, caches or machines in any way.

    Args:
        outs: O_n (B, Tq, Hq, Dv) of each set.
        lses: lse_n (B, Hq, Tq) of each set, without sinks.
        sinks: (Hq,), see :func:`attention`; they take part once, here.

    Returns:
        O of the dtype of outs[0], and lse.

    Raises:
        ValueError: no sets, or shapes that differ.

    Note:
        Differentiable through outs, lses and sinks. A query that no set has a key for gives 0.

    Example:
        >>> q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 3, 1, 4)
        >>> v = torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1)
        >>> first = attention(q, k[:, :2], v[:, :2], return_lse=True)
        >>> second = attention(q, k[:, 2:], v[:, 2:], return_lse=True)
        >>> merge_attention(*zip(first, second))[0].item()
        4.0
    """
    op = "merge_attention"
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(
            f"{op}: outs and lses must have the same length >= 1, got {len(outs)} and {len(lses)}"
        )
    b, t, h = outs[0].shape[:3]
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != (b, h, t):
            raise ValueError(
                f"{op}: all must have shapes {tuple(outs[0].shape)} and {(b, h, t)}, "
                f"got {tuple(out.shape)} and {tuple(lse.shape)}"
            )
    if sinks is not None:
        _require_parameter(op, "sinks", sinks, outs[0], [(h,)])
    return reference.merge_attention(outs, lses, sinks=sinks)


def _longest(cu_seqlens: Tensor) -> int:
    return int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0


def _check_integers(op: str, name: str, t: Tensor, q: Tensor) -> None:
    if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be an int32 or int64 tensor, got {name}={t!r}")
    if t.device != q.device:
        raise ValueError(
            f"{op}: {name} must be on the device of q, got {name}.device={t.device}, "
            f"q.device={q.device}"
        )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """Drop-in for torch.nn.functional.scaled_dot_product_attention, computed by :func:`attention`.

    Args:
        query: (..., Hq, Tq, D).
        key: (..., Hkv, Tk, D).
        value: (..., Hkv, Tk, Dv).
        attn_mask: bool (True = attend) or additive float, broadcastable to (..., Hq, Tq, Tk).
        dropout_p: applied whenever positive, as in torch. The mask of dropped weights is drawn from
            torch's generator, but is not torch's own.
        is_causal: query i sees keys up to i: aligned top-left, as in torch.
        scale: None is 1 / sqrt(D).
        enable_gqa: allow Hq to be a multiple of Hkv.
        backend: see :func:`attention`.

    Returns:
        (..., Hq, Tq, Dv) of the query's dtype; 0 for a query that sees no key.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Example:
        >>> q = torch.zeros(1, 1, 2, 4)
        >>> scaled_dot_product_attention(q, q, torch.ones(1, 1, 2, 1)).flatten()
        tensor([1., 1.])
    """
    op = "scaled_dot_product_attention"
    for name, t in (("query", query), ("key", key), ("value", value)):
        require_float(op, name, t)
        if t.dim() < 3 or t.dim() != query.dim():
            raise ValueError(
                f"{op}: {name} must have at least 3 dimensions and as many as query, "
                f"got {name}.shape={tuple(t.shape)}"
            )
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"{op}: heads must agree without enable_gqa, got Hq={query.shape[-3]}, "
            f"Hkv={key.shape[-3]}"
        )
    mask: Mask | None = None
    bias: Tensor | None = None
    if attn_mask is not None:
        if is_causal:
            raise ValueError(f"{op}: attn_mask must be None with is_causal=True")
        full = torch.Size((*query.shape[:-1], key.shape[-2]))
        attn_mask = _as_four_dims(op, attn_mask, full)
        if attn_mask.dtype == torch.bool:
            mask = BoolMask(attn_mask)
        else:
            bias = attn_mask
    elif is_causal:
        mask = SlidingWindow(-1, 0, top_left=True)
    q, k, v = (_merge_batch(t).transpose(1, 2) for t in (query, key, value))
    out = attention(
        q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, backend=backend
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])


def _as_four_dims(op: str, mask: Tensor, full: torch.Size) -> Tensor:
    """A mask broadcastable to (..., H, Tq, Tk) as one to (prod(...), H, Tq, Tk)."""
    if mask.dim() > len(full):
        raise ValueError(
            f"{op}: attn_mask must be broadcastable to {tuple(full)}, "
            f"got attn_mask.shape={tuple(mask.shape)}"
        )
    mask = mask[(None,) * (len(full) - mask.dim())]
    return mask if len(full) == 4 else _merge_batch(mask.expand(*full[:-3], *mask.shape[-3:]))


def _merge_batch(t: Tensor) -> Tensor:
    """(..., H, T, D) as (prod(...), H, T, D)."""
    return t if t.dim() == 4 else t.reshape(math.prod(t.shape[:-3]), *t.shape[-3:])


def _autocast(op: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    require_float(op, "q", q)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (
            t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t
            for t in (q, k, v)
        )
    require_like(op, "k", k, q, "q")
    require_like(op, "v", v, q, "q")
    return q, k, v


def _check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t, layout in (
        ("q", q, "(B, Tq, Hq, D)"),
        ("k", k, "(B, Tk, Hkv, D)"),
        ("v", v, "(B, Tk, Hkv, Dv)"),
    ):
        if t.dim() != 4:
            raise ValueError(
                f"{op}: {name} must have 4 dimensions {layout}, got {name}.shape={tuple(t.shape)}"
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{op}: q and k must have the same B and D, got q.shape={tuple(q.shape)}, "
            f"k.shape={tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{op}: k and v must have the same B, Tk and Hkv, got k.shape={tuple(k.shape)}, "
            f"v.shape={tuple(v.shape)}"
        )
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(f"{op}: Hq must be a multiple of Hkv, got Hq={heads}, Hkv={kv_heads}")


def _check_numbers(op: str, scale: float, softcap: float, dropout_p: float) -> None:
    if not math.isfinite(scale):
        raise ValueError(f"{op}: scale must be finite, got scale={scale}")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"{op}: softcap must be finite and >= 0, got softcap={softcap}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{op}: dropout_p must be in [0, 1], got dropout_p={dropout_p}")


def _mask(op: str, visibility: Visibility, q: Tensor, full: tuple[int, ...]) -> list[Rule]:
    """All rules of a call, checked."""
    (left, right), mask = visibility.window_size, visibility.mask
    if left < -1 or right < -1:
        raise ValueError(
            f"{op}: window_size must be (left, right) >= -1, got window_size={(left, right)}"
        )
    found: list[Mask] = []
    if visibility.causal or left >= 0 or right >= 0:
        found.append(SlidingWindow(left, 0 if visibility.causal else right))
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"{op}: mask must be bool, True = attend (additive masks go to bias), "
                f"got mask.dtype={mask.dtype}"
            )
        found.append(BoolMask(mask))
    elif isinstance(mask, Mask):
        found.append(mask)
    elif mask is not None:
        raise TypeError(f"{op}: mask must be a Tensor or a Mask, got mask={mask!r}")
    return [
        (kind, a, b, _side_tensors(op, kind, side, q, full))
        for kind, a, b, side in All(tuple(found)).rules()
    ]


def _side_tensors(
    op: str, kind: int, side: tuple[Tensor, ...], q: Tensor, full: tuple[int, ...]
) -> tuple[Tensor, ...]:
    batch, heads, tq, tk = full
    for t in side:
        if t.device != q.device:
            raise ValueError(
                f"{op}: the tensors of a mask must be on the device of q, got {t.device}, "
                f"q.device={q.device}"
            )
    if kind == MaskKind.TENSOR:
        return (_broadcastable(op, "mask", side[0], q, full),)
    if kind in (MaskKind.KEY_LENGTHS, MaskKind.PREFIX):
        _require_mask_shape(op, "lengths", side[0], (batch,))
    elif kind == MaskKind.DOCUMENTS:
        side = tuple(
            t.expand(batch, *t.shape[-1:]) if t.shape[:-1] in ((), (1,)) else t for t in side
        )
        _require_mask_shape(op, "documents of queries", side[0], (batch, tq))
        _require_mask_shape(op, "documents of keys", side[1], (batch, tk))
    elif kind == MaskKind.BLOCKS:
        blocks = (batch, heads, -(-tq // BLOCK), -(-tk // BLOCK))
        codes, bits = side
        fits = codes.dim() == 4 and codes.shape[2:] == blocks[2:]
        if not fits or codes.shape[0] not in (1, batch) or codes.shape[1] not in (1, heads):
            raise ValueError(
                f"{op}: mask codes must be broadcastable to {blocks}, blocks of {BLOCK} queries "
                f"and keys, got codes.shape={tuple(codes.shape)}"
            )
        _require_mask_shape(op, "bits", bits, (bits.shape[0], BLOCK))
    return side


def _require_mask_shape(op: str, name: str, t: Tensor, shape: tuple[int, ...]) -> None:
    if t.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {shape}, got {name}.shape={tuple(t.shape)}")


def _broadcastable(op: str, name: str, t: Tensor, q: Tensor, full: tuple[int, ...]) -> Tensor:
    """`t` with 4 dimensions; all but the last stay broadcast."""
    if t.device != q.device:
        raise ValueError(
            f"{op}: {name} must be on the device of q, got {name}.device={t.device}, "
            f"q.device={q.device}"
        )
    fits = t.dim() <= 4 and all(
        n in (1, m) for n, m in zip(reversed(t.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{op}: {name} must be broadcastable to (B, Hq, Tq, Tk)={full}, "
            f"got {name}.shape={tuple(t.shape)}"
        )
    t = t[(None,) * (4 - t.dim())]
    return t if t.shape[3] == full[3] else t.expand(*t.shape[:3], full[3])


def _bias(op: str, bias: Tensor, q: Tensor, full: tuple[int, ...]) -> Tensor:
    require_float(op, "bias", bias)
    widest = torch.float64 if q.dtype == torch.float64 else torch.float32
    if bias.dtype != q.dtype and bias.dtype != torch.float32 and widest != torch.float32:
        raise TypeError(
            f"{op}: bias must be float64 or float32 for float64 inputs, got bias.dtype={bias.dtype}"
        )
    if bias.dtype == torch.float64 and widest != torch.float64:
        raise TypeError(
            f"{op}: bias must not be float64 unless q is, got bias.dtype={bias.dtype}, "
            f"q.dtype={q.dtype}"
        )
    return _broadcastable(op, "bias", bias, q, full)


def _seed(op: str, seed: Tensor | None) -> Tensor:
    if seed is None:
        return new_seed()
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.shape != (2,):
        raise ValueError(f"{op}: seed must be an int64 tensor [seed, offset], got seed={seed!r}")
    return seed


def _scores(
    op: str, logits: Logits, weights: Weights, q: Tensor, full: tuple[int, ...]
) -> list[ScoreRule]:
    """All score rules of a call, checked."""
    batch, heads, tq, tk = full
    alibi_slopes, relative = logits.alibi_slopes, logits.relative
    sinks, normaliser = weights.sinks, weights.normaliser
    rules: list[ScoreRule] = []
    if logits.softcap > 0:
        rules.append((ScoreKind.SOFTCAP, None, (logits.softcap,)))
    if logits.bias is not None:
        rules.append((ScoreKind.BIAS, _bias(op, logits.bias, q, full), ()))
    for kind, name, t in (
        (ScoreKind.SINKS, "sinks", sinks),
        (ScoreKind.HEAD_SCALE, "head_scale", logits.head_scale),
    ):
        if t is not None:
            _require_parameter(op, name, t, q, [(heads,)])
            rules.append((kind, t, ()))
    if alibi_slopes is not None:
        if relative is not None:
            raise ValueError(f"{op}: alibi_slopes must be None with relative={relative!r}")
        _require_parameter(op, "alibi_slopes", alibi_slopes, q, [(heads,), (batch, heads)])
        rules.append((ScoreKind.ALIBI, alibi_slopes.reshape(-1, 1, heads), (0.0, 0.0)))
    if relative is not None:
        if not isinstance(relative, RelativeBias):
            raise TypeError(f"{op}: relative must be a RelativeBias, got relative={relative!r}")
        rule = relative.rule()
        code, table, parameters = rule
        assert table is not None
        _require_parameter(op, "the table of relative", table, q, [(1, table.shape[1], heads)])
        if code == ScoreKind.WINDOW and not tq == tk == math.prod(parameters):
            raise ValueError(
                f"{op}: Tq and Tk must be the tokens of a window, got Tq={tq}, Tk={tk}, "
                f"window={parameters}"
            )
        rules.append(rule)
    if normaliser not in ("softmax", "sigmoid", "relu2"):
        raise ValueError(
            f'{op}: normaliser must be "softmax", "sigmoid" or "relu2", '
            f"got normaliser={normaliser!r}"
        )
    if normaliser != "softmax":
        if sinks is not None:
            raise ValueError(f"{op}: sinks need softmax, got normaliser={normaliser!r}")
        rules.append((ScoreKind[normaliser.upper()], None, ()))
    return rules


def _require_parameter(
    op: str, name: str, t: Tensor, q: Tensor, shapes: list[tuple[int, ...]]
) -> None:
    require_float(op, name, t)
    if t.device != q.device:
        raise ValueError(
            f"{op}: {name} must be on the device of q, got {t.device}, q.device={q.device}"
        )
    if tuple(t.shape) not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{op}: {name} must have shape {wanted}, got {tuple(t.shape)}")
