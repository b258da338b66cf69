"""MesaNet and Gated KalmaNet, token by token, with exact solutions of their linear systems."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.encoding.sequences import StateOptions
from omniattn.reference.precision import unit, widen
from omniattn.reference.recurrences.delta_variants import over_tokens, read, written

__all__ = ["gated_kalmanet", "mesa_net", "mesa_solve"]


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
    """(H_t + diag(lamb_t)) x_t = q_t, H_t = exp(g_t) H_{t-1} + beta_t k_t k_t^T."""

    def step(
        h: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, lamb: Tensor
    ) -> tuple[Tensor, Tensor]:
        h = written(h * g.exp()[..., None, None], k, beta[..., None] * k)
        return torch.linalg.solve(h + torch.diag_embed(lamb), q[..., None])[..., 0], h

    options: StateOptions = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    shape = (q.shape[2], q.shape[3], q.shape[3])
    return over_tokens("mesa_net", options, step, (q, k, g, beta, lamb), q, shape)


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
    """o_t = G_t^T (H_t + diag(lamb))^-1 q_t with H as in `mesa_solve` and G with v_t for k_t^T.

    The solutions are exact, whatever `max_iterations` is.
    """
    if l2norm:
        q, k = unit(q), unit(k)
    kk, kv = (None, None) if initial_state is None else initial_state
    rows = (widen(q), widen(k), widen(g), widen(beta), widen(lamb).expand(q.shape))
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


def gated_kalmanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    alpha: Tensor | None = None,
    *,
    scale: float | None = None,
    ridge_ratio: float = 0.02,
    max_iterations: int = 30,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """``o_t = scale U_t^T (q_t + alpha_t (x_t - q_t))``, ``(H_t + ridge_ratio |H_t| I) x_t = q_t``,
    ``H_t = exp(gk_t) H_{t-1} + k_t k_t^T`` and ``U_t = exp(g_t) U_{t-1} + k_t v_t^T``.

    The solutions are exact, whatever `max_iterations` is; x_t is q_t where H_t is 0.
    """
    heads, width = q.shape[2:]
    factor = max(1, width) ** -0.5 if scale is None else scale
    zeros = q.new_zeros(q.shape[:-1])
    decays = (zeros if g is None else g, zeros if gk is None else gk)
    rows = (q, k, v, *decays, zeros + 1 if alpha is None else alpha)

    def step(
        s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, gk: Tensor, alpha: Tensor
    ) -> tuple[Tensor, Tensor]:
        h = written(s[..., :width] * gk.exp()[..., None, None], k, k)
        u = written(s[..., width:] * g.exp()[..., None, None], k, v)
        square = h.square().sum((-2, -1))
        lamb = ridge_ratio * torch.where(square > 0, square, ridge_ratio**-2).sqrt()
        ridge = torch.diag_embed(lamb[..., None].expand(h.shape[:-1]))
        x = torch.linalg.solve(h + ridge, q[..., None])[..., 0]
        return factor * read(u, q + alpha[..., None] * (x - q)), torch.cat((h, u), -1)

    start = None if initial_state is None else torch.cat(tuple(map(widen, initial_state)), -1)
    options: StateOptions = {"initial_state": start, "cu_seqlens": cu_seqlens}
    shape = (heads, width, width + v.shape[3])
    o, s = over_tokens("gated_kalmanet", options, step, rows, v, shape)
    return o, (s[..., :width], s[..., width:])
