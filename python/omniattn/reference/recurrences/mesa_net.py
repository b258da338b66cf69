"""MesaNet, token by token, with exact solutions of its linear systems."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.encoding.sequences import StateOptions
from omniattn.reference.empty import nothing_of
from omniattn.reference.precision import unit, widen
from omniattn.reference.recurrences.delta_variants import over_tokens, read, written

__all__ = ["mesa_net", "mesa_solve"]


def mesa_solve(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(H_t + diag(lamb)) x_t = q_t, H_t = exp(g_t) H_{t-1} + beta_t k_t k_t^T."""

    def step(h: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        h = written(h * g.exp()[..., None, None], k, beta[..., None] * k)
        return torch.linalg.solve(h + torch.diag_embed(lamb), q[..., None])[..., 0], h

    options: StateOptions = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    shape = (q.shape[2], q.shape[3], q.shape[3])
    x, h = over_tokens("mesa_net", options, step, (q, k, g, beta), q, shape)
    return x + nothing_of(lamb), h


def mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    *,
    max_iterations: int = 30,
    l2norm: bool = False,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """o_t = G_t^T (H_t + diag(lamb))^-1 q_t, of H as in `mesa_solve` and G with v_t for k_t^T.

    The solutions are exact, whatever `max_iterations` is.
    """
    if l2norm:
        q, k = unit(q), unit(k)
    kk, kv = (None, None) if initial_state is None else initial_state
    rows = (widen(q), widen(k), widen(g), widen(beta), widen(lamb))
    x, kk = mesa_solve(*rows, initial_state=kk, cu_seqlens=cu_seqlens)

    def step(
        s: Tensor, x: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        s = written(s * g.exp()[..., None, None], k, beta[..., None] * v)
        return read(s, x), s

    options: StateOptions = {"initial_state": kv, "cu_seqlens": cu_seqlens}
    shape = (v.shape[2], q.shape[3], v.shape[3])
    o, kv = over_tokens("mesa_net", options, step, (x, k, v, g, beta), v, shape)
    return o, (kk, kv)
