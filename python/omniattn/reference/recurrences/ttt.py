"""TTT-Linear, token by token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.reference.precision import widen
from omniattn.reference.recurrences.fast_weights import fast_weights

__all__ = ["ttt_linear"]

State = tuple[Tensor, Tensor, Tensor, Tensor]


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor,
    lr: Tensor | None = None,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    mini_batch_size: int = 16,
    residual: str = "output",
    position: Tensor | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """o = r + LN(y) w + b, r = y or q, of y read by weights with a bias that descend."""
    q_wide = widen(q) * (max(1, q.shape[-1]) ** -0.5 if scale is None else scale)
    weights, momentum = None, None
    if initial_state is not None:
        matrix, row, dw, db = initial_state
        weights = torch.cat((matrix, row[:, :, None]), 2)
        momentum = torch.cat((dw, db[:, :, None]), 2)
    lr = None if lr is None else widen(lr)
    y, m, s, _ = fast_weights(
        *(q_wide, widen(k), widen(v), lr, None, widen(eta), widen(w), widen(b), weights, momentum),
        *(None, position, cu_seqlens, mini_batch_size, eps, 1.0, True, True, True),
    )
    normal = nnf.layer_norm(y, (y.shape[-1],), eps=eps) * w + b
    o = normal + (y if residual == "output" else q_wide)
    return o.to(q.dtype), (m[:, :, :-1], m[:, :, -1], s[:, :, :-1], s[:, :, -1])
