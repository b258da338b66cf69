"""Inputs of recurrences, and the decayed sums over pairs of tokens that they compute."""

import torch
from torch.nn import functional as nnf


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(steps: int = 70, heads: int = 2, v_heads: int = 2, size: int = 8, width: int = 5):
    q, k = draw(2, steps, heads, size), draw(2, steps, heads, size, seed=1)
    return q, nnf.normalize(k, dim=-1), draw(2, steps, v_heads, width, seed=2)


def decays(*shape: int) -> torch.Tensor:
    return nnf.logsigmoid(2 + 3 * draw(*shape, seed=3))


def pairwise(q, k, v, g) -> torch.Tensor:
    """o_i = K^-1/2 sum_{j <= i} (sum_d q_id k_jd exp(G_id - G_jd)) v_j, G the sums of g."""
    group = v.shape[2] // q.shape[2]
    q, k = (t.repeat_interleave(group, 2) for t in (q, k))
    total = g.cumsum(1)
    steps = torch.arange(q.shape[1])
    seen = (steps[:, None] >= steps)[:, :, None, None]
    weight = torch.where(seen, total[:, :, None] - total[:, None], -torch.inf).exp()
    score = torch.einsum("bihd,bjhd,bijhd->bhij", q, k, weight) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhv->bihv", score, v)
