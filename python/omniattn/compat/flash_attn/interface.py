"""Attention functions of flash-attn 2, with tensors (B, T, H, D) or packed (total, H, D)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import (
    require_integers,
    require_number,
    require_rows,
    require_tensor,
)
from omniattn.compat._errors import errors_of, require_flags, require_index

#: O, or (O, lse, empty tensor) with `return_attn_probs`.
Result: TypeAlias = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Computes :func:`functional.attention` with the arguments of flash-attn.

    Args:
        q: (B, Tq, Hq, D).
        k: (B, Tk, Hkv, D).
        v: (B, Tk, Hkv, Dv).
        dropout_p: probability of dropping an attention weight.
        softmax_scale: factor of q k^T; None is 1 / sqrt(D).
        causal: True for a causal mask, aligned bottom-right.
        window_size: (left, right); -1 is unlimited.
        softcap: limit of the logits; 0 is off.
        alibi_slopes: (Hq,) or (B, Hq).
        deterministic: has no effect, since results are always deterministic.
        return_attn_probs: if True, returns (O, lse, empty tensor). Not available with dropout,
            where flash-attn's third result is the pattern of the dropout.

    Returns:
        O (B, Tq, Hq, Dv), and lse (B, Hq, Tq) in fp32. A query without a key gives O = 0 and
        lse = -inf (+inf in flash-attn).
    """
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    call = functional.attention
    return _attend("flash_attn_func", call, (q, k, v), rest, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Computes :func:`flash_attn_func` with keys and values in one tensor (B, Tk, 2, Hkv, D)."""
    op = "flash_attn_kvpacked_func"
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    tensors = q, *_unpacked(op, "kv", kv, "B, T, 2, H, D")
    return _attend(op, functional.attention, tensors, rest, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Computes :func:`flash_attn_func` with all inputs in one tensor (B, T, 3, H, D)."""
    op = "flash_attn_qkvpacked_func"
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    tensors = _unpacked(op, "qkv", qkv, "B, T, 3, H, D")
    return _attend(op, functional.attention, tensors, rest, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Computes :func:`functional.attention_varlen` with the arguments of flash-attn.

    Args:
        q: (total_q, Hq, D).
        k: (total_k, Hkv, D), or with a block table (pages, page size, Hkv, D).
        v: (total_k, Hkv, Dv), or with a block table (pages, page size, Hkv, Dv).
        cu_seqlens_q: (N + 1,) int32 or int64: rows cu_seqlens_q[n] .. cu_seqlens_q[n + 1] are
            sequence n.
        cu_seqlens_k: (N + 1,), for keys and values.
        max_seqlen_q: upper bound of the lengths of queries.
        max_seqlen_k: upper bound of the lengths of keys.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes: see
            :func:`flash_attn_func`.
        deterministic, return_attn_probs: see :func:`flash_attn_func`.
        block_table: (N, M) int: key t of sequence n is row ``t % page size`` of page
            ``block_table[n, t // page size]``. Pages may have any size.

    Returns:
        O (total_q, Hq, Dv), and with `return_attn_probs` lse (Hq, total_q).
    """
    op = "flash_attn_varlen_func"
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    if block_table is not None:
        k, v = (_gathered(op, n, t, block_table, cu_seqlens_k) for n, t in (("k", k), ("v", v)))
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    call = functional.attention_varlen
    return _attend(op, call, tensors, rest, deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Computes :func:`flash_attn_varlen_func` with one tensor kv (total_k, 2, Hkv, D)."""
    op = "flash_attn_varlen_kvpacked_func"
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    packed = _unpacked(op, "kv", kv, "total, 2, H, D")
    tensors = q, *packed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    call = functional.attention_varlen
    return _attend(op, call, tensors, rest, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Computes :func:`flash_attn_varlen_func` with one tensor qkv (total, 3, H, D)."""
    op = "flash_attn_varlen_qkvpacked_func"
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    packed = _unpacked(op, "qkv", qkv, "total, 3, H, D")
    tensors = *packed, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    names = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens")
    names |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
    call = functional.attention_varlen
    return _attend(op, call, tensors, rest, deterministic, return_attn_probs, names)


def options_of(
    op: str,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """Returns the options of `functional.attention`."""
    require_flags(op, causal=causal)
    if softmax_scale is not None:
        require_number(op, "softmax_scale", softmax_scale)
    if isinstance(window_size, Tensor):
        window_size = window_size.tolist()
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }


def _attend(
    op: str,
    call: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Any, ...],
    rest: tuple[float, float | None, bool, Sequence[int], float, Tensor | None],
    deterministic: bool,
    return_attn_probs: bool,
    names: dict[str, str] | None = None,
) -> Result:
    dropout_p = rest[0]
    require_flags(op, deterministic=deterministic, return_attn_probs=return_attn_probs)
    require_number(op, "dropout_p", dropout_p)
    if return_attn_probs and dropout_p > 0:
        raise NotImplementedError(
            f"{op}: return_attn_probs is not supported with dropout_p > 0, got {dropout_p=}"
        )
    options = options_of(op, *rest[1:])
    for name, t in zip("qkv", tensors, strict=False):
        require_tensor(op, name, t)
    with errors_of(op, scale="softmax_scale", **names or {}):
        out, lse = call(*tensors, dropout_p=dropout_p, return_lse=True, **options)
    return (out, lse, tensors[0].new_empty(0)) if return_attn_probs else out


def _unpacked(op: str, name: str, x: Tensor, form: str) -> tuple[Tensor, ...]:
    """Returns the tensors packed in x, which has the dimensions `form`."""
    require_tensor(op, name, x)
    sizes = form.split(", ")
    place = len(sizes) - 3
    if x.ndim != len(sizes) or x.shape[place] != int(sizes[place]):
        raise ValueError(
            f"{op}: {name} must have shape ({form}), got {name}.shape={tuple(x.shape)}"
        )
    return x.unbind(place)


def _gathered(op: str, name: str, pages: Tensor, table: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the packed rows of sequences whose pages a block table lists."""
    require_tensor(op, name, pages)
    require_tensor(op, "block_table", table)
    if pages.ndim != 4 or pages.shape[1] < 1 or table.ndim != 2:
        raise ValueError(
            f"{op}: with block_table (N, M), {name} must have shape (pages, page size, H, D), got "
            f"{name}.shape={tuple(pages.shape)}, block_table.shape={tuple(table.shape)}"
        )
    require_index(op, "block_table", table, tuple(table.shape), pages, name)
    size, capacity = pages.shape[1], table.shape[1] * pages.shape[1]
    require_integers(op, "cu_seqlens_k", cu_seqlens)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) != len(table) + 1:
        raise ValueError(
            f"{op}: cu_seqlens_k must have shape ({len(table) + 1},), got "
            f"cu_seqlens_k.shape={tuple(cu_seqlens.shape)}"
        )
    lengths = cu_seqlens.long().diff()
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > capacity:
        raise ValueError(
            f"{op}: cu_seqlens_k must have sequences of at most {capacity} keys, the capacity of "
            f"block_table, got {longest}"
        )
    rows = torch.arange(longest, device=pages.device)
    row, place = (rows < lengths[:, None]).nonzero().unbind(1)
    page = table[row, place // size].long()
    require_rows(op, "block_table", page, len(pages))
    return pages[page, place % size]
