"""Titans' linear memory, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.reference.precision import widen
from omniattn.reference.recurrences.fast_weights import fast_weights

__all__ = ["titans_linear"]

State = tuple[Tensor, Tensor, Tensor]


def titans_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None = None,
    eta: Tensor | None = None,
    w: Tensor | None = None,
    b: Tensor | None = None,
    *,
    scale: float = 1.0,
    eps: float = 1e-6,
    mini_batch_size: int = 16,
    position: Tensor | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """o = q M, or q M + LN(q M), of weights M that move by S = eta S - theta k^T u."""
    weights, momentum, anchor = initial_state or (None, None, None)
    theta = widen(theta)
    keep = torch.zeros_like(theta) if eta is None else widen(eta)
    gate = None if alpha is None else 1 - widen(alpha)
    momentum = None if momentum is None else -momentum
    given: list[Any] = [widen(q), widen(k), widen(v), 2 * theta, keep, gate, w, b]
    given += [weights, momentum, anchor, position, cu_seqlens, mini_batch_size, eps, scale]
    y, m, s, n = fast_weights(*(*given, False, False, w is not None))
    if w is not None and b is not None:
        y = y + nnf.layer_norm(y, (y.shape[-1],), eps=eps) * w + b
    return y.to(q.dtype), (m, -s, n)
