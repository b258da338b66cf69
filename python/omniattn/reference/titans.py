"""Titans' linear memory, token by token."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as nnf

from omniattn.reference.fast_weights import fast_weights
from omniattn.reference.precision import widen

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
    y, m, s, n = fast_weights(
        *(widen(q), widen(k), widen(v), 2 * theta),
        *(0 * theta if eta is None else widen(eta), None if alpha is None else 1 - widen(alpha)),
        *(w, b, weights, None if momentum is None else -momentum, anchor, position, cu_seqlens),
        *(mini_batch_size, eps, scale, False, False, w is not None),
    )
    if w is not None and b is not None:
        y = y + nnf.layer_norm(y, (y.shape[-1],), eps=eps) * w + b
    return y.to(q.dtype), (m, -s, n)
