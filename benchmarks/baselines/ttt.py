"""Baseline of TTT-Linear: a loop over mini-batches, differentiated by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from baselines._common import compiled, lacks

__all__ = ["BASELINES"]


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor,
    *,
    eps: float = 1e-6,
    mini_batch_size: int = 16,
    **options: Any,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    size = q.shape[-1]
    lacks(**options, part=q.shape[1] % mini_batch_size > 0)
    q, k, v, eta = (
        t.transpose(1, 2).unflatten(2, (-1, mini_batch_size)).movedim(2, 0)
        for t in (q * size**-0.5, k, v, eta[..., None])
    )
    weights, bias = k.new_zeros(*k.shape[1:3], size, size), k.new_zeros(*k.shape[1:3], 1, size)
    w, b, out = w[:, None], b[:, None], []
    for q_n, k_n, v_n, eta_n in zip(q, k, v, eta, strict=True):
        z = k_n @ weights + bias
        normal = F.layer_norm(z, (size,), eps=eps)
        gap = w * (w * normal + b - (v_n - k_n))
        gap = gap - gap.mean(-1, True) - normal * (gap * normal).mean(-1, True)
        u = gap * torch.rsqrt(z.var(-1, unbiased=False, keepdim=True) + eps)
        read = torch.tril(q_n @ k_n.mT + 1) @ u
        out.append(q_n @ weights + bias - eta_n * read)
        step = eta_n[..., -1:, :]
        weights, bias = weights - (step * k_n).mT @ u, bias - step * u.sum(-2, True)
    y = torch.stack(out)
    o = y + F.layer_norm(y, (size,), eps=eps) * w + b
    return o.movedim(0, 2).flatten(2, 3).transpose(1, 2), (weights, bias)


BASELINES = {"ttt_linear": {"aten": ttt_linear, "compiled": compiled(ttt_linear)}}
