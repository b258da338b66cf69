"""Attention of `xformers.ops.fmha`, with tensors (B, T, H, D), (B, T, D) or (B, T, G, H, D)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import FLOATS, require_number, require_shape, shown
from omniattn.compat._errors import errors_of, require_flags, require_real
from omniattn.compat.xformers.attn_bias import AttentionBias, LowerTriangularMaskWithTensorBias
from omniattn.compat.xformers.block_diagonal import BlockDiagonalMask, PackedBias
from omniattn.compat.xformers.cached import (
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)

#: Mask, or tensor (B, H, Tq, Tk) that is added to the logits.
Bias = Tensor | AttentionBias | None
AttentionMask = AttentionBias
VARLEN_BIASES = (
    BlockDiagonalMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_bias", "dropout_p": "p"}


class AttentionOpBase:
    """Base class of kernels in xformers, whose choice has no effect here."""

    NAME = "omniattn"


class AttentionFwOpBase(AttentionOpBase):
    """Kernel of the forward."""


class AttentionBwOpBase(AttentionOpBase):
    """Kernel of the backward."""


AttentionOp = tuple[type[AttentionFwOpBase] | None, type[AttentionBwOpBase] | None]
MemoryEfficientAttentionCutlassOp: AttentionOp = (AttentionFwOpBase, AttentionBwOpBase)
MemoryEfficientAttentionCutlassBlackwellOp = MemoryEfficientAttentionCutlassOp
MemoryEfficientAttentionCutlassFwdFlashBwOp = MemoryEfficientAttentionCutlassOp
MemoryEfficientAttentionFlashAttentionOp = MemoryEfficientAttentionCutlassOp
MemoryEfficientAttentionCkOp = MemoryEfficientAttentionCutlassOp
MemoryEfficientAttentionSplitKCkOp = MemoryEfficientAttentionCutlassOp


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes :func:`functional.attention` with the arguments of xformers.

    Args:
        query: (B, Tq, H, D), or (B, Tq, D) for one head, or (B, Tq, G, H, D) for groups of heads
            that share keys.
        key: (B, Tk, H, D), or the form of query; groups share keys that are expanded over H.
        value: (B, Tk, H, Dv), or the form of query.
        attn_bias: tensor (B, H, Tq, Tk) of query's dtype that is added to the logits, or a mask.
            Packed masks, such as `BlockDiagonalMask`, have B = 1.
        p: probability of dropping an attention weight.
        scale: factor of q k^T; None is 1 / sqrt(D).
        op: has no effect.
        output_dtype: dtype of the result; None is that of query.

    Returns:
        O (B, Tq, H, Dv), or the form of query. A query without a key gives 0.
    """
    name = "memory_efficient_attention"
    return _attend(name, (query, key, value), attn_bias, p, scale, output_dtype)[0]


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes :func:`memory_efficient_attention` without gradients."""
    name = "memory_efficient_attention_forward"
    with torch.no_grad():
        return _attend(name, (query, key, value), attn_bias, p, scale, output_dtype)[0]


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns O and lse (B, H, Tq) for :func:`memory_efficient_attention_backward`.

    Packed queries have lse (1, H, Tq). Dropout is not available.
    """
    name = "memory_efficient_attention_forward_requires_grad"
    _require_no_dropout(name, p)
    with torch.no_grad():
        return _attend(name, (query, key, value), attn_bias, p, scale, output_dtype)


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value for the gradient of the result.

    `output` and `lse` may be those of more keys than `key` has, as in ring attention.

    Args:
        grad: gradient of output.
        output, lse: results of :func:`memory_efficient_attention_forward_requires_grad`.
        query, key, value, attn_bias, p, scale, op: see :func:`memory_efficient_attention`.
    """
    name = "memory_efficient_attention_backward"
    _require_no_dropout(name, p)
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    with torch.enable_grad():
        own, own_lse = _attend(name, tuple(leaves), attn_bias, p, scale, None)
    for label, t, like in (("grad", grad, own), ("output", output, own), ("lse", lse, own_lse)):
        require_real(name, **{label: t})
        require_shape(name, label, t, tuple(like.shape))
    # O = sum_n w_n O_n over sets of keys with w_n = exp(lse_n - lse), which gives the gradients of
    # O_n and lse_n. With the results of these keys alone w is 1, and the gradient of lse is 0.
    out, found = _heads(name, "output", own), own_lse.flatten(1, -2)
    weight = (found.detach() - lse.flatten(1, -2)).exp()
    grad_out = _heads(name, "grad", grad) * weight.transpose(1, 2)[..., None]
    grad_lse = grad_out * (out.detach() - _heads(name, "output", output))
    gradients = [grad_out.to(out.dtype), grad_lse.sum(-1).transpose(1, 2).to(found.dtype)]
    dq, dk, dv = torch.autograd.grad([out, found], leaves, gradients)
    return dq, dk, dv


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns O and lse (B, H, Tq) of some of the keys, for :func:`merge_attentions`.

    Both are differentiable. Dropout is not available.
    """
    name = "memory_efficient_attention_partial"
    _require_no_dropout(name, p)
    return _attend(name, (query, key, value), attn_bias, p, scale, output_dtype)


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merges attention to disjoint sets of keys, see :func:`functional.merge_attention`.

    Args:
        attn_split: O (B, T, H, D) or (B, T, G, H, D) of each set, a list or one tensor.
        lse_split: lse (B, H, T) or (B, G, H, T) of each set.
        write_lse: False to return None for lse.
        output_dtype: dtype of O; None is that of attn_split.
    """
    name = "merge_attentions"
    require_flags(name, write_lse=write_lse)
    outs = [_heads(name, "attn_split", t) for t in attn_split]
    with errors_of(name, outs="attn_split", lses="lse_split"):
        lses = [t.flatten(1, -2) for t in lse_split]
        out, lse = functional.merge_attention(outs, lses)
    shape, dtype = attn_split[0].shape, _output_dtype(name, output_dtype, out)
    return out.reshape(shape).to(dtype), lse.reshape(lse_split[0].shape) if write_lse else None


def _attend(
    op: str,
    tensors: tuple[Tensor, ...],
    bias: Bias,
    p: float,
    scale: float | None,
    output_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Returns O in the form of query, and lse."""
    query, key, value = tensors
    require_real(op, query=query, key=key, value=value)
    require_number(op, "p", p, 0, 1)
    if scale is not None:
        require_number(op, "scale", scale)
    if query.ndim not in (3, 4, 5) or key.ndim != query.ndim or value.ndim != query.ndim:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(
            f"{op}: query, key and value must have shapes (B, T, H, D), (B, T, D) or "
            f"(B, T, G, H, D), got {shapes}"
        )
    q = _heads(op, "query", query)
    k, v = _keys(op, query, key, value)
    options: dict[str, Any] = {"scale": scale, "dropout_p": p}
    with errors_of(op, **_NAMES):
        if isinstance(bias, PackedBias):
            out, lse = _packed(op, q, k, v, bias, options)
        else:
            options |= _options(op, query, bias)
            out, lse = functional.attention(q, k, v, return_lse=True, **options)
    out = out.reshape(*query.shape[:-1], value.shape[-1]).to(_output_dtype(op, output_dtype, out))
    return out, lse.reshape(len(query), *query.shape[2:-1], -1) if query.ndim == 5 else lse


def _heads(op: str, name: str, x: Tensor) -> Tensor:
    """Returns (B, T, H, D)."""
    if x.ndim not in (3, 4, 5):
        raise ValueError(f"{op}: {name} must have 3 to 5 dimensions, got {tuple(x.shape)}")
    return x.unsqueeze(2) if x.ndim == 3 else x.flatten(2, -2)


def _keys(op: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns k and v (B, T, Hkv, D), one head for each group if they are expanded."""
    if query.ndim == 5 and key.stride(3) == 0 and value.stride(3) == 0:
        return key[:, :, :, 0], value[:, :, :, 0]
    return _heads(op, "key", key), _heads(op, "value", value)


def _options(op: str, query: Tensor, bias: Bias) -> dict[str, Any]:
    """Returns mask and bias of `functional.attention`."""
    if bias is None:
        return {}
    if not isinstance(bias, (Tensor, AttentionBias)):
        raise TypeError(
            f"{op}: attn_bias must be None, a tensor or an AttentionBias, got {shown(bias)}"
        )
    mask = bias.window().mask() if isinstance(bias, AttentionBias) else None
    if isinstance(bias, LowerTriangularMaskWithTensorBias):
        bias = bias._bias
    if not isinstance(bias, Tensor):
        return {"mask": mask}
    require_real(op, attn_bias=bias)
    forms = {3: "B, T, T", 4: "B, H, T, T", 5: "B, G, H, T, T"}
    if bias.ndim != query.ndim:
        raise ValueError(
            f"{op}: attn_bias must have shape ({forms[query.ndim]}), got {tuple(bias.shape)}"
        )
    return {"mask": mask, "bias": bias[:, None] if bias.ndim == 3 else bias.flatten(1, -3)}


def _packed(
    op: str, q: Tensor, k: Tensor, v: Tensor, bias: PackedBias, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns O (1, T, H, D) and lse (1, H, T) of packed sequences."""
    starts = bias.q_seqinfo.seqstart_py
    if len(q) != 1 or q.shape[1] != starts[-1] or len(k) != 1:
        raise ValueError(
            f"{op}: query must have shape (1, {starts[-1]}, ...) and key B = 1 with "
            f"{type(bias).__name__}, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    options["mask"] = bias.window().mask()
    lengths = {last - first for first, last in bias.q_seqinfo.intervals()}
    padded = isinstance(bias, (BlockDiagonalPaddedKeysMask, PagedBlockDiagonalPaddedKeysMask))
    if padded and len(lengths) == 1 and 0 not in lengths:
        return _cached(q, k, v, bias, options)
    rows = bias.key_rows(q.device)
    if rows is None and k.shape[1] != bias.k_seqinfo.seqstart_py[-1]:
        raise ValueError(
            f"{op}: key must have {bias.k_seqinfo.seqstart_py[-1]} rows with "
            f"{type(bias).__name__}, got {k.shape[1]}"
        )
    keys, values = (t[0] if rows is None else t[0, rows] for t in (k, v))
    ends = [0, *accumulate(bias.key_lengths())]
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32, device=q.device) for n in (starts, ends))
    longest = max(lengths, default=0), max(bias.key_lengths(), default=0)
    out, lse = functional.attention_varlen(
        q[0], keys, values, cu_q, cu_k, *longest, return_lse=True, **options
    )
    return out[None], lse[None]


def _cached(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns O and lse of sequences with equally many queries, without gathering their keys."""
    lengths = bias.k_seqinfo.seqlen.to(q.device)
    if isinstance(bias, PagedBlockDiagonalPaddedKeysMask):
        size, table = bias.page_size, bias.block_tables.to(q.device)
    else:
        size, table = bias.k_seqinfo.padding, None
    keys, values = (t[0].unflatten(0, (-1, size)) for t in (k, v))
    queries = q[0].unflatten(0, (len(lengths), -1))
    out, lse = functional.attention_cached(
        queries, keys, values, lengths, block_table=table, return_lse=True, **options
    )
    return out.flatten(0, 1)[None], lse.transpose(0, 1).flatten(1)[None]


def _output_dtype(op: str, dtype: torch.dtype | None, out: Tensor) -> torch.dtype:
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(
            f"{op}: output_dtype must be None, float64, float32, bfloat16 or float16, got {dtype}"
        )
    return dtype or out.dtype


def _require_no_dropout(op: str, p: float) -> None:
    if p != 0:
        raise NotImplementedError(f"{op}: p must be 0 without autograd, got p={p}")
