"""Attention with the weights of sparsemax and entmax, most of which are 0."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.reference.attention.attention import default_scale
from omniattn.reference.limits import clamp
from omniattn.reference.precision import widen


def entmax(s: Tensor, alpha: float) -> Tensor:
    """Returns ``relu((alpha - 1) s - tau)^(1 / (alpha - 1))`` (..., n) whose sum over n is 1.

    tau is found by Newton's method without gradients. Two more steps with gradients then give the
    first and second derivatives of the implicit function. Rows whose logits are all -inf give 0.
    """
    power = 1 / (alpha - 1)
    if s.shape[-1] == 0:
        return s
    top = s.detach().amax(-1, keepdim=True)
    z = (alpha - 1) * (s - top.masked_fill(top == -torch.inf, 0))
    hidden = s == -torch.inf
    z = z.masked_fill(hidden, -2)

    def step(tau: Tensor, z: Tensor) -> Tensor:
        left = clamp(z - tau, 0)
        slope = power * torch.where(left > 0, left, 1).pow(power - 1) * (left > 0)
        sums = left.pow(power).sum(-1, keepdim=True) - 1
        return tau + sums / clamp(slope.sum(-1, keepdim=True), 1e-30)

    tau = torch.full_like(top, -1.0)
    for _ in range(60):
        tau = torch.maximum(tau, step(tau, z.detach()))
    tau = tau.masked_fill(hidden.all(-1, keepdim=True), 0)
    tau = step(step(tau, z), z)
    left = clamp((z - tau).masked_fill(hidden, 0), 0)
    empty = left == 0  # pow has no derivative there
    return torch.where(empty, 0, torch.where(empty, 1, left).pow(power))


def sparsemax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    alpha: float = 2.0,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq,Hq,Dv).

    ``O_i = sum_j p_ij v_j``, ``p_i = argmax_p p.z_i + H(p)`` over the simplex, z = scale q k^T, H
    the Tsallis entropy of order alpha; 2 is sparsemax.
    """
    group = q.shape[2] // max(k.shape[2], 1)
    scale = default_scale(q.shape[3]) if scale is None else scale
    qs, ks, vs = (widen(t).transpose(1, 2) for t in (q, k, v))
    s = scale * qs @ ks.repeat_interleave(group, 1).transpose(-1, -2)
    own, key = (torch.arange(n, device=q.device) for n in s.shape[-2:])
    own = own[:, None] + s.shape[-1] - s.shape[-2]
    if causal:
        s = s.masked_fill(key > own, -torch.inf)
    if cu_seqlens is not None:
        ids = torch.searchsorted(cu_seqlens.long(), key, right=True)
        s = s.masked_fill(ids != ids[:, None], -torch.inf)
    p = entmax(s, alpha)
    return (p @ vs.repeat_interleave(group, 1)).transpose(1, 2).to(q.dtype)
