"""Baseline of log-linear attention: products within chunks, and a sum of states for each level."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baselines._common import compiled, lacks
from baselines.recurrence import CHUNK

__all__ = ["BASELINES"]


def _levels(count: int) -> Tensor:
    """Number of bits of i xor j."""
    each = torch.arange(count)
    return torch.frexp((each[:, None] ^ each).double())[1].long()


def log_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, level_scales: Tensor, **options: Any
) -> tuple[Tensor, None]:
    lacks(**options, grouped=q.shape[2] != v.shape[2], part=q.shape[1] % CHUNK > 0)
    tensors = (q, k, v, g, level_scales)
    chunks = [t.transpose(1, 2).unflatten(2, (-1, CHUNK)) for t in tensors]
    q, k, v, g, scales = chunks
    count, inside = q.shape[2], _levels(CHUNK)
    first = inside.max().item() + 1
    total = g.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    weights = scales[..., :first].gather(-1, inside.expand(*g.shape, CHUNK))
    o = ((q @ k.mT) * decay * weights) @ v
    states = (k * (total[..., -1:] - total).exp()[..., None]).mT @ v
    end = total[..., -1].cumsum(-1)
    between = (end - total[..., -1])[..., :, None] - end[..., None, :]
    between, levels = between.tril(-1).exp().tril(-1), _levels(count)
    for level in range(1, count.bit_length()):
        read = torch.einsum("bhij,bhjkv->bhikv", between * (levels == level), states)
        o = o + (q @ read) * (scales[..., first + level - 1] * total.exp())[..., None]
    return o.flatten(2, 3).transpose(1, 2), None


BASELINES = {
    "log_linear_attention": {
        "aten": log_linear_attention,
        "compiled": compiled(log_linear_attention),
    }
}
