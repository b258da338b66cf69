"""Attention to caches of int8 keys and values, and the quantisation of their rows."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import (
    require_device,
    require_float,
    require_shape,
    require_strided,
    require_tensor,
)
from omniattn.encoding.options import WeightOptions, pack, spelled_out
from omniattn.functional.attention._common import check_shapes
from omniattn.functional.attention._options import run
from omniattn.functional.attention.varlen import cache_layout
from omniattn.reference.precision import compute_dtype

__all__ = ["attention_int8", "quantize_int8"]


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows to int8 with one factor a row, for :func:`attention_int8`.

    ``scale = max |x| / 127`` over the last dimension, and ``codes = round(x / scale)``, so that
    ``codes * scale`` differs from x by at most ``scale / 2``. A row of zeros has the scale 0; a row
    with an infinity or a NaN has a scale that is not finite.

    Args:
        x: (..., D), float64, float32, bfloat16 or float16; for keys (B, T, Hkv, D).

    Returns:
        codes (..., D) int8 and scale (...) float32, or float64 for float64.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: x has no dimension.

    Example:
        >>> quantize_int8(torch.tensor([[0.5, -1.27], [0.0, 0.0]]))
        (tensor([[  50, -127],
                [   0,    0]], dtype=torch.int8), tensor([0.0100, 0.0000]))
    """
    op = "quantize_int8"
    require_float(op, "x", x)
    require_strided(op, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least 1 dimension, got x.shape=()")
    return reference.quantize_int8(x)


@overload
def attention_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[WeightOptions],
) -> Tensor: ...
@overload
def attention_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
    **options: Unpack[WeightOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    return_lse: bool,
    backend: str | None = None,
    **options: Unpack[WeightOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@spelled_out(WeightOptions)
def attention_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Unpack[WeightOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention_cached` to keys and values in int8, with a factor for each token and head.

    Computes the attention to ``k * k_scale`` and ``v * v_scale``. Inference only.

    Args:
        q: (B, Tq, Hq, D), as in :func:`attention`.
        k: (B, capacity, Hkv, D) int8, or with a block table (pages, page size, Hkv, D).
        v: (B, capacity, Hkv, Dv) int8, or (pages, page size, Hkv, Dv).
        k_scale: (B, capacity, Hkv) or (pages, page size, Hkv), the factors of the rows of k, as
            :func:`quantize_int8` returns them: float32, or float64 if q is.
        v_scale: as k_scale, of the rows of v.
        cache_seqlens, block_table: see :func:`attention_cached`.
        causal, window_size, mask, bias, scale, softcap, alibi_slopes, relative: see
            :func:`attention`, with Tk the capacity in the shapes of mask and bias.
        relative_keys, relative_queries: see :func:`attention`.
        sinks, head_scale, normalizer, score_mod, return_lse, backend: see :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv), and with return_lse lse (B, Hq, Tq).

    Raises:
        TypeError, ValueError: see :func:`attention_cached`.
        RuntimeError: as :func:`attention_cached`; or q, a factor or a tensor of the options
            requires a gradient.

    Note:
        With few queries (decoding) the int8 rows are read in place and never copied; with many,
        rows of q's dtype are made first, which a call holds for its sequences.

    Example:
        >>> q = torch.zeros(1, 1, 1, 4)
        >>> k, k_scale = quantize_int8(torch.zeros(1, 3, 1, 4))
        >>> v, v_scale = quantize_int8(torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1))
        >>> attention_int8(q, k, v, k_scale, v_scale, torch.tensor([2])).flatten()
        tensor([2.])
    """
    op = "attention_int8"
    packed = pack(op, options, WeightOptions)
    require_float(op, "q", q)
    for name, t in (("k", k), ("v", v)):
        _require_dtype(op, name, t, torch.int8, "int8, as quantize_int8 returns it", q)
    full = check_shapes(op, q, k, v, paged=block_table is not None)
    wide = compute_dtype(q)
    for name, t in (("k_scale", k_scale), ("v_scale", v_scale)):
        _require_dtype(op, name, t, wide, f"{wide} for q of {q.dtype}", q)
        require_shape(op, name, t, tuple(k.shape[:3]))
    layout, full = cache_layout(op, q, k, full, cache_seqlens, block_table)
    out, lse = run(op, q, k, v, full, packed, return_lse, backend, layout, (k_scale, v_scale))
    return (out, lse) if return_lse else out


def _require_dtype(
    op: str, name: str, t: Tensor, dtype: torch.dtype, wanted: str, q: Tensor
) -> None:
    require_tensor(op, name, t)
    if t.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {wanted}, got {name}.dtype={t.dtype}")
    require_strided(op, name, t)
    require_device(op, name, t, q, "q")
