"""Path attention: products of Householder-like matrices between keys and queries."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.reference.attention.attention import default_scale
from omniattn.reference.attention.forgetting import LEAST_LOG_GATE
from omniattn.reference.limits import clamp
from omniattn.reference.precision import widen


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_keys: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B,T,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv), w like k's last T -> O (B,T,Hq,Dv).

    ``O = softmax(scale q_i M_i ... M_(j+1) k_j + c_i - c_j) v``, M = I - beta w w^T and c the
    running sum of g.
    """
    steps, total, group = q.shape[1], k.shape[1], q.shape[2] // max(1, k.shape[2])
    past = total - steps
    scale = default_scale(q.shape[3]) if scale is None else scale
    wide = [widen(t).transpose(1, 2) for t in (q, k, v, w, beta)]
    wide[1:] = [t.repeat_interleave(group, 1) for t in wide[1:]]
    qs, ks, vs, ws, betas = wide
    # Products of matrices: M_i ... M_(j+1) k_j = k_j - sum over t of w_t x_tj for j < t <= i.
    scaled = betas[..., None] * ws
    eye = torch.eye(steps, dtype=qs.dtype, device=q.device)
    inner = eye + (scaled @ ws.mT).tril(-1)
    x = torch.linalg.solve_triangular(
        inner, (scaled @ ks.mT).tril(past - 1), upper=False, unitriangular=True
    )
    logits = scale * (qs @ ks.mT - (qs @ ws.mT).tril() @ x)
    if g is not None:
        c = clamp(widen(g), LEAST_LOG_GATE).cumsum(1).transpose(1, 2)
        logits = logits + c[:, :, past:, None] - c[:, :, None]
    key, own = (torch.arange(n, device=q.device) for n in (total, steps))
    seen = key <= own[:, None] + past
    if cu_seqlens is not None:
        ids = torch.searchsorted(cu_seqlens.long(), own, right=True)
        seen = seen & (ids == ids[:, None])
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    out = (weights @ vs).transpose(1, 2).to(q.dtype)
    if not return_keys:
        return out
    return out, (ks - x.mT @ ws)[:, ::group].transpose(1, 2).to(k.dtype)
