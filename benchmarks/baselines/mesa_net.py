"""Baseline of MesaNet: conjugate gradients whose products are over chunks and their states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baselines._common import compiled, lacks
from baselines.recurrence import CHUNK

__all__ = ["BASELINES"]


def _states(left: Tensor, right: Tensor, end: Tensor) -> Tensor:
    """States (B, H, n, K, V) before chunks, which add left^T right and decay by `end`."""
    added, state, found = left.mT @ right, torch.zeros_like((left.mT @ right)[:, :, 0]), []
    for n in range(left.shape[2]):
        found.append(state)
        state = state * end[:, :, n, None, None] + added[:, :, n]
    return torch.stack(found, 2)


def mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    *,
    l2norm: bool = False,
    max_iterations: int = 30,
    **options: Any,
) -> tuple[Tensor, None]:
    lacks(**options, part=q.shape[1] % CHUNK > 0)
    if l2norm:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k, v, g, beta = (t.transpose(1, 2).unflatten(2, (-1, CHUNK)) for t in (q, k, v, g, beta))
    total = g.cumsum(-1)
    gap = total[..., :, None] - total[..., None, :]
    weights = gap.tril().exp().tril() * beta[..., None, :]
    last = total[..., -1:]
    kept, end = k * (beta * (last - total).exp())[..., None], last[..., 0].exp()
    kk, kv = _states(kept, k, end), _states(kept, v, end)
    decay, lamb = total.exp()[..., None], lamb[None, :, None, None]
    x, r, p = torch.zeros_like(q), q, q
    left = r.square().sum(-1, keepdim=True)
    for _ in range(max_iterations):
        y = (p * decay) @ kk + ((p @ k.mT) * weights) @ k + lamb * p
        length = left / ((p * y).sum(-1, keepdim=True) + 1e-5)
        x, r = x + length * p, r - length * y
        before, left = left, r.square().sum(-1, keepdim=True)
        p = r + left / (before + 1e-5) * p
    o = (x * decay) @ kv + ((x @ k.mT) * weights) @ v
    return o.flatten(2, 3).transpose(1, 2), None


BASELINES = {"mesa_net": {"aten": mesa_net, "compiled": compiled(mesa_net)}}
