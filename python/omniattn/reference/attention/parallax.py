"""Parallax: attention minus the covariance of values and keys, applied to a second query."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.reference.attention.attention import default_scale
from omniattn.reference.precision import widen


def parallax_attention(
    q: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """q, r (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq,Hq,Dv).

    ``O_i = sum_j p_ij (1 - s_ij + sum_l p_il s_il) v_j``, p = softmax(scale q k^T), s = r k^T.
    """
    group = q.shape[2] // max(k.shape[2], 1)
    scale = default_scale(q.shape[3]) if scale is None else scale
    qs, rs, ks, vs = (widen(t).transpose(1, 2) for t in (q, r, k, v))
    keys = ks.repeat_interleave(group, 1).transpose(-1, -2)
    logits, s = scale * qs @ keys, rs @ keys
    own, key = (torch.arange(n, device=q.device) for n in s.shape[-2:])
    ahead = key - own[:, None] - s.shape[-1] + s.shape[-2]
    left, right = window_size
    hidden = (ahead > 0) & causal
    if left >= 0:
        hidden = hidden | (ahead < -left)
    if right >= 0:
        hidden = hidden | (ahead > right)
    if cu_seqlens is not None:
        ids = torch.searchsorted(cu_seqlens.long(), key, right=True)
        hidden = hidden | (ids != ids[:, None])
    empty = hidden.all(-1, keepdim=True)
    p = logits.masked_fill(hidden, -torch.inf).masked_fill(empty, 0).softmax(-1)
    p, s = p.masked_fill(hidden, 0), s.masked_fill(hidden, 0)
    w = p * (1 - s + (p * s).sum(-1, keepdim=True))
    return (w @ vs.repeat_interleave(group, 1)).transpose(1, 2).to(q.dtype)
