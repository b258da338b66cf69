"""Attention functions of flash-attn 4, `flash_attn.cute`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import (
    FLOATS,
    require_float,
    require_number,
    require_shape,
    shown,
)
from omniattn.compat._errors import (
    errors_of,
    require_flags,
    require_form,
    require_index,
    require_real,
)
from omniattn.compat.flash_attn.lengths import Lengths, attend

#: (left, right), None for no limit.
Windows = Sequence[int | None]


def cute_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Windows = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_scalars: Sequence[Any] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes :func:`functional.attention` with the arguments of `flash_attn.cute`.

    Args:
        q: (B, Tq, Hq, D).
        k: (B, Tk, Hkv, D).
        v: (B, Tk, Hkv, Dv).
        qv: (B, Tq, Hq, Dv), whose products with v are added to those of q and k (absorbed MLA).
        gather_kv_indices: (B, Tq, n) int, the keys that each query sees, with other numbers for
            none; computed by :func:`functional.selected_attention`.
        softmax_scale: factor of the logits; None is 1 / sqrt(D), or 1 / sqrt(D + Dv) with qv.
        causal: True for a causal mask, aligned bottom-right.
        window_size: (left, right); None and -1 are unlimited.
        learnable_sink: (Hq,), a logit without a value.
        softcap: limit of the logits; 0 is off.
        num_splits, pack_gqa, deterministic: have no effect.
        score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars: must be None, since they are
            code of CuTe; :func:`functional.attention` takes functions of tensors.
        block_sparse_tensors, block_sparse_tensors_bwd: must be None; see `masks.Blocks`.
        return_lse: if True, returns lse, and otherwise None in its place.

    Returns:
        O (B, Tq, Hq, Dv), and lse (B, Hq, Tq), or (B, Tq, Hq) with qv.
    """
    op = "flash_attn_func"
    mods: dict[str, object] = {
        "score_mod": score_mod,
        "score_mod_bwd": score_mod_bwd,
        "mask_mod": mask_mod,
    }
    mods |= {"aux_tensors": aux_tensors, "aux_scalars": aux_scalars}
    mods |= {"block_sparse_tensors": block_sparse_tensors}
    _require_no_code(op, **mods, block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    options = _options(op, softmax_scale, causal, window_size, learnable_sink, softcap)
    tensors = q, k, v, qv, gather_kv_indices
    return _attend(op, tensors, Lengths(), options, return_lse, deterministic)


def cute_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Windows = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_scalars: Sequence[Any] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes :func:`functional.attention_varlen` with the arguments of `flash_attn.cute`.

    Args:
        q: (total_q, Hq, D) with cu_seqlens_q, and otherwise (B, Tq, Hq, D).
        k: (total_k, Hkv, D) with cu_seqlens_k, (pages, page size, Hkv, D) with a page table, and
            otherwise (B, Tk, Hkv, D).
        v: tensor in the form of k, with heads of Dv.
        qv, softmax_scale, causal, window_size, learnable_sink: see :func:`cute_flash_attn_func`.
        cu_seqlens_q: (N + 1,) int: rows cu_seqlens_q[n] .. cu_seqlens_q[n + 1] are sequence n.
        cu_seqlens_k: (N + 1,), for keys and values.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        min_seqlen_k: has no effect.
        seqused_q, seqused_k: (N,) int, the number of rows in use of each sequence.
        gather_kv_indices: keys that each query sees, for batches without lengths.
        page_table: (N, M) int: key t of sequence n is row ``t % page size`` of page
            ``page_table[n, t // page size]``; with seqused_k.
        softcap, num_splits, pack_gqa, deterministic: see :func:`cute_flash_attn_func`.
        score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars: must be None.
        block_sparse_tensors: must be None.
        return_lse: if True, returns lse, and otherwise None in its place.
        scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata: have no effect.

    Returns:
        O in the form of q, and lse (Hq, total_q) or (B, Hq, Tq), with qv (total_q, Hq) or
        (B, Tq, Hq). Rows that are not in use have O = 0 and lse = -inf.
    """
    op = "flash_attn_varlen_func"
    mods: dict[str, object] = {
        "score_mod": score_mod,
        "score_mod_bwd": score_mod_bwd,
        "mask_mod": mask_mod,
    }
    mods |= {"aux_tensors": aux_tensors, "aux_scalars": aux_scalars}
    _require_no_code(op, **mods, block_sparse_tensors=block_sparse_tensors)
    options = _options(op, softmax_scale, causal, window_size, learnable_sink, softcap)
    bounds = max_seqlen_q, max_seqlen_k
    used = seqused_q, seqused_k, page_table
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, *bounds, *used)
    tensors = q, k, v, qv, gather_kv_indices
    return _attend(op, tensors, lengths, options, return_lse, deterministic)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Merges attention to disjoint sets of keys, see :func:`functional.merge_attention`.

    Args:
        out_partial: O of each set, (splits, B, T, H, D) or (splits, total, H, D).
        lse_partial: lse of each set, (splits, B, T, H) or (splits, total, H).
        out: tensor that takes the result, or None; without gradients.
        out_dtype: dtype of the result; None is that of out_partial.
        cu_seqlens, seqused, virtual_batch_idx: have no effect: all rows are merged.
        return_lse: False to return None for lse.

    Returns:
        O (B, T, H, D) or (total, H, D), and lse (B, T, H) or (total, H).
    """
    op = "flash_attn_combine"
    require_real(op, out_partial=out_partial, lse_partial=lse_partial)
    require_flags(op, return_lse=return_lse)
    packed = out_partial.ndim == 4
    if not packed:
        require_form(op, "out_partial", out_partial, "splits, B, T, H, D")
    require_shape(op, "lse_partial", lse_partial, tuple(out_partial.shape[:-1]))
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"{op}: out_dtype must be a floating dtype, got {shown(out_dtype)}")
    outs = [t[None] if packed else t for t in out_partial]
    lses = [(t[None] if packed else t).transpose(1, 2) for t in lse_partial]
    with errors_of(op, outs="out_partial", lses="lse_partial"):
        found, lse = functional.merge_attention(outs, lses)
    lse = lse.transpose(1, 2)
    found, lse = (found[0], lse[0]) if packed else (found, lse)
    found = found.to(out_dtype or found.dtype)
    if out is not None:
        require_float(op, "out", out)
        require_shape(op, "out", out, tuple(found.shape))
        found = out.copy_(found)
    return found, lse if return_lse else None


def with_qv(
    op: str, q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns q and k with qv and v as further dimensions, and sets the factor of the logits."""
    if qv is None:
        return q, k
    require_real(op, q=q, k=k, v=v, qv=qv)
    require_shape(op, "qv", qv, (*q.shape[:-1], v.shape[-1]))
    if options["scale"] is None:
        options["scale"] = (q.shape[-1] + v.shape[-1]) ** -0.5
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)


def _attend(
    op: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    lengths: Lengths,
    options: dict[str, Any],
    return_lse: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor | None]:
    q, k, v, qv, indices = tensors
    require_flags(op, return_lse=return_lse, deterministic=deterministic)
    q, k = with_qv(op, q, k, v, qv, options)
    if indices is None:
        out, lse = attend(op, q, k, v, lengths, options)
    else:
        out, lse = _selected(op, q, k, v, indices, lengths, options)
    if not return_lse:
        return out, None
    return out, lse if qv is None else lse.transpose(-1, -2)


def _selected(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    lengths: Lengths,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Returns attention of each query to the keys that `indices` lists."""
    if lengths.cu_seqlens_q is not None or lengths.cu_seqlens_k is not None or not lengths.is_full:
        raise NotImplementedError(
            f"{op}: gather_kv_indices must be None with cu_seqlens, seqused and page_table"
        )
    require_real(op, q=q, k=k, v=v)
    require_form(op, "q", q, "B, T, H, D")
    require_form(op, "k", k, "B, T, H, D")
    require_form(op, "gather_kv_indices", indices, "B, T, n")
    shape = (*q.shape[:2], indices.shape[2])
    require_index(op, "gather_kv_indices", indices, shape, q, "q")
    rest = dict(options)
    if tuple(rest.pop("window_size")) != (-1, -1):
        raise NotImplementedError(f"{op}: window_size must be (None, None) with gather_kv_indices")
    lists = torch.where((indices >= 0) & (indices < k.shape[1]), indices, -1)[:, None]
    with errors_of(op, scale="softmax_scale", sinks="learnable_sink", indices="gather_kv_indices"):
        found: tuple[Tensor, Tensor] = functional.selected_attention(
            q, k, v, lists, block_size=1, return_lse=True, **rest
        )
    return found


def _options(
    op: str,
    softmax_scale: float | None,
    causal: bool,
    window_size: Windows,
    sink: Tensor | None,
    softcap: float,
) -> dict[str, Any]:
    """Returns the options of `functional.attention`."""
    require_flags(op, causal=causal)
    if softmax_scale is not None:
        require_number(op, "softmax_scale", softmax_scale)
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"{op}: window_size must be (left, right), got {shown(window_size)}")
    window = tuple(-1 if n is None else n for n in window_size)
    options = {"scale": softmax_scale, "causal": causal, "window_size": window}
    return {**options, "softcap": softcap, "sinks": sink}


def _require_no_code(op: str, **arguments: object) -> None:
    """Requires None for code of CuTe, which only runs on GPUs."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{op}: {name} must be None: it is for kernels of CuTe; functional.attention has "
                f"mask and score_mod for functions of tensors, got {name}={shown(value)}"
            )
