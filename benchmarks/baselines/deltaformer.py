"""Baseline of DeltaFormer: the whole matrix of weights and one triangular system."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from baselines._common import lacks

__all__ = ["BASELINES"]


def deltaformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    lacks(**options, no_beta=beta is None)
    assert beta is not None
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(-1)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    lowest = torch.finfo(q.dtype).min
    weights = (factor * (q @ k.mT)).masked_fill(~seen, lowest).softmax(-1) * seen
    system = beta.mT[..., None] * weights
    u = torch.linalg.solve_triangular(system, v, upper=False, unitriangular=True)
    o = F.scaled_dot_product_attention(q, k, u, is_causal=True, scale=scale)
    return o.transpose(1, 2), None


BASELINES = {"deltaformer_attention": {"aten": deltaformer_attention}}
