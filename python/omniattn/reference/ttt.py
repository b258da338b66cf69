"""TTT-Linear, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.encoding.sequences import StateOptions
from omniattn.reference.delta_variants import over_tokens, read, written
from omniattn.reference.empty import nothing_of
from omniattn.reference.log_linear import positions
from omniattn.reference.precision import widen

__all__ = ["ttt_linear", "ttt_steps"]

State = tuple[Tensor, Tensor, Tensor, Tensor]


def ttt_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    lr: Tensor | None,
    w: Tensor,
    b: Tensor,
    w_state: Tensor | None,
    b_state: Tensor | None,
    dw_state: Tensor | None,
    db_state: Tensor | None,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    mini_batch_size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reads each token with weights that descend along the gradients of its mini-batch so far.

    The gradients u of ``|LN(z) w + b - (v - k)|^2 / 2``, ``z = k W + B``, are taken at the weights
    at the start of the mini-batch, to which the descent is added after its last token.
    """
    heads, size = q.shape[2:]
    at = positions(q, position, cu_seqlens)
    ends = (at + 1) % mini_batch_size == 0

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        eta, lr, end = rest
        weights, bias, dw, db = s.split((size, 1, size, 1), 2)
        z = read(weights, k) + bias[:, :, 0]
        normal = nnf.layer_norm(z, (size,), eps=eps)
        gap = w * (normal * w + b - (v - k))
        gap = gap - gap.mean(-1, True) - normal * (gap * normal).mean(-1, True)
        deviation = ((z - z.mean(-1, True)).square().mean(-1, True) + eps).sqrt()
        u = lr[..., None] * gap / deviation
        dw, db = written(dw, k, u), db + u[:, :, None]
        eta = eta[..., None, None]
        down_w, down_b = weights - eta * dw, bias - eta * db
        y = read(down_w, q) + down_b[:, :, 0]
        end = end[:, None, None, None]
        weights, bias = torch.where(end > 0, down_w, weights), torch.where(end > 0, down_b, bias)
        return y, torch.cat((weights, bias, (1 - end) * dw, (1 - end) * db), 2)

    initial = None
    if w_state is not None:
        parts = (w_state, b_state, dw_state, db_state)
        initial = torch.cat(
            [t if t.dim() == 4 else t[:, :, None] for t in parts if t is not None], 2
        )
    options: StateOptions = {"initial_state": initial, "cu_seqlens": cu_seqlens}
    rows = (q, k, v, eta, torch.ones_like(eta) if lr is None else lr, ends)
    y, s = over_tokens("ttt_linear", options, step, rows, q, (heads, 2 * size + 2, size))
    if y.shape[1] == 0:
        y = y + nothing_of(w, b)
    last_w, last_b, dw, db = s.split((size, 1, size, 1), 2)
    return y, last_w, last_b[:, :, 0], dw, db[:, :, 0]


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
    """o = r + LN(y) w + b of y as in `ttt_steps`, r = y or q."""
    q_wide = widen(q) * (max(1, q.shape[-1]) ** -0.5 if scale is None else scale)
    rows = (q_wide, widen(k), widen(v), widen(eta), None if lr is None else widen(lr))
    before = initial_state or (None,) * 4
    given: list[Any] = [*rows, widen(w), widen(b), *before, position, cu_seqlens]
    y, *state = ttt_steps(*(*given, mini_batch_size, eps))
    normal = nnf.layer_norm(y, (y.shape[-1],), eps=eps) * w + b
    o = normal + (y if residual == "output" else q_wide)
    return o.to(q.dtype), (state[0], state[1], state[2], state[3])
