"""Dual chunk attention by pairwise positions, and gated local and strided attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.options import FormOptions, pack, spelled_out
from omniattn.reference.attention.attention import (
    attend,
    default_scale,
    dropped,
    softmax,
    transformed,
)
from omniattn.reference.empty import nothing_of
from omniattn.reference.positions.rope import apply_rotary
from omniattn.reference.precision import widen


def dual_chunk_mscale(length: int, train_length: int, kind: str) -> float:
    """Factor of the logits for texts of T = `length` tokens, longer than in training (L).

    "chunkllama": ``(0.05 ln(T / L) + 1)^2``, the square of the factor of cos and sin;
    "qwen": ``max(1, 0.1 ln(T / L) + 1)^2``, as in vLLM for Qwen2.5-1M. 1 if T <= L.

    Example:
        >>> round(dual_chunk_mscale(4096, 1024, "qwen"), 4)
        1.2965
    """
    if length <= train_length:
        return 1.0
    slope = 0.05 if kind == "chunkllama" else 0.1
    return (slope * math.log(length / train_length) + 1) ** 2


@spelled_out(FormOptions)
def dual_chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    chunk_size: int,
    local_window: int,
    train_length: int | None = None,
    mscale: str | None = None,
    interleaved: bool = False,
    k_rotated: bool = False,
    **options: Unpack[FormOptions],
) -> Tensor:
    """q (B,Tq,Hq,D), k, v (B,Tk,Hkv,.), cos, sin (P,Dr/2) -> O (B,Tq,Hq,Dv).

    The logit of a pair (i, j), j <= i, is the product of q_i rotated to position p_q(i, j) and k_j
    rotated to position j mod c.
    """
    record = pack("dual_chunk_attention", options, FormOptions)
    (tq, heads), (tk, kv_heads) = q.shape[1:3], k.shape[1:3]
    c = chunk_size - local_window
    i, j = torch.arange(tk - tq, tk, device=q.device)[:, None], torch.arange(tk, device=q.device)
    back = i // c - j // c
    p_q = torch.where(back == 0, i % c, (i % c + c).clamp(max=chunk_size))
    p_q = torch.where(back > 1, min(2 * c - 1, chunk_size), p_q).clamp(min=0)
    q, k, v, out_dtype = widen(q), widen(k), widen(v), q.dtype
    if not k_rotated:
        k, _ = apply_rotary(k, None, cos, sin, positions=j % c, interleaved=interleaved)
    k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    s = q.new_zeros(q.shape[0], heads, tq, tk) + nothing_of(q, k)
    for position in p_q.unique().tolist():
        rows = torch.full_like(i[:, 0], position)
        turned, _ = apply_rotary(q, None, cos, sin, positions=rows, interleaved=interleaved)
        s = torch.where(p_q == position, torch.einsum("bihd,bjhd->bhij", turned, k), s)
    s = s * (default_scale(q.shape[3]) if record.scale is None else record.scale)
    if mscale is not None and train_length is not None:
        s = s * dual_chunk_mscale(tk, train_length, mscale)
    p, _ = softmax(transformed(s, record).masked_fill(j > i, -torch.inf), None)
    return torch.einsum("bhij,bjhd->bihd", dropped(p, record), v).to(out_dtype)


@spelled_out(FormOptions)
def local_strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    window: int,
    stride: int,
    **options: Unpack[FormOptions],
) -> Tensor:
    """g local + (1 - g) strided: attention to the last `window` keys and to every `stride`-th key.

    g = sigmoid(gate). q (B,Tq,Hq,D), k, v (B,Tk,Hkv,.), gate (B,Tq,Hq,Dv | 1) -> O (B,Tq,Hq,Dv).
    """
    record = pack("local_strided_attention", options, FormOptions)
    tq, tk = q.shape[1], k.shape[1]
    i, j = torch.arange(tk - tq, tk, device=q.device)[:, None], torch.arange(tk, device=q.device)
    wide = widen(q), widen(k), widen(v)
    local, _ = attend(*wide, record._replace(mask=(j <= i) & (j > i - window)))
    strided, _ = attend(*wide, record._replace(mask=(j <= i) & (j % stride == 0)))
    g = widen(gate).sigmoid()
    return (g * local + (1 - g) * strided).to(q.dtype)
