"""Attention to int8 keys and values with a factor for each row, and their quantisation."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.options import WeightOptions, spelled_out
from omniattn.reference.attention.attention import attention_cached
from omniattn.reference.precision import widen


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) -> codes (..., D) int8, scale (...): codes * scale is x up to scale / 2.

    ``scale = max |x| / 127``; rows of zeros have scale 0 and codes 0.
    """
    wide = widen(x)
    if x.shape[-1] == 0:
        return wide.to(torch.int8), wide.new_zeros(x.shape[:-1])
    top = wide.abs().amax(-1, keepdim=True)
    # Shares of the maximum, not multiples of the scale, which may round to 0.
    codes = (wide / top.masked_fill(top == 0, 1) * 127).round()
    return codes.to(torch.int8), (top / 127).squeeze(-1)


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
    **options: Unpack[WeightOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention_cached` with keys k * k_scale and values v * v_scale.

    k (B,S,Hkv,D) and v (B,S,Hkv,Dv) are int8, k_scale and v_scale (B,S,Hkv) their rows' factors.
    """
    return attention_cached(
        q,
        k.to(k_scale.dtype) * k_scale[..., None],
        v.to(v_scale.dtype) * v_scale[..., None],
        cache_seqlens,
        block_table=block_table,
        return_lse=return_lse,
        **options,
    )
