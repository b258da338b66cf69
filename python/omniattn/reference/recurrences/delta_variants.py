"""Delta rules with several keys for each token, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.sequences import StateOptions, sequences_of, spelled_out
from omniattn.reference.empty import nothing_of
from omniattn.reference.precision import compute_dtype, unit, widen
from omniattn.reference.values import sequence_count


def over_tokens(
    op: str,
    options: StateOptions,
    step: Callable[..., tuple[Tensor, Tensor]],
    tokens: Sequence[Tensor],
    like: Tensor,
    shape: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Computes o_t, S_t = step(S_{t-1}, *tokens_t) of each token; returns o and the last states.

    Tokens (B, T, ...) are computed in the widest dtype of `like` (B, T, ...), to whose dtype o is
    rounded and whose shape it has. States (N, *shape) start at `initial_state` or 0. With
    cu_seqlens B is 1, and the row holds N sequences, each with its own state.
    """
    initial_state, cu_seqlens, _ = sequences_of(op, options, StateOptions)
    dtype = compute_dtype(like)
    tokens = [t.to(dtype) for t in tokens]
    state = tokens[0].new_zeros(sequence_count(op, like, cu_seqlens), *shape)
    if initial_state is not None:
        state = state + initial_state.to(dtype)
    outputs = []
    for t in range(like.shape[1]):
        o, new = step(state, *(x[:, t] for x in tokens))
        if cu_seqlens is not None:
            inside = (cu_seqlens[:-1] <= t) & (t < cu_seqlens[1:])
            new = torch.where(inside.view(-1, *(1,) * len(shape)), new, state)
            o = torch.where(inside.view(-1, *(1,) * (o.dim() - 1)), o, 0).sum(0, keepdim=True)
        state = new
        outputs.append(o)
    if not outputs:  # gradients are zeros and not None
        nothing = nothing_of(*tokens, state)
        return (like.to(dtype) + nothing).to(like.dtype), state + nothing
    return torch.stack(outputs, 1).to(like.dtype), state


def written(state: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """Adds k u^T to states (..., K, V)."""
    return state + k[..., None] * u[..., None, :]


def read(state: Tensor, q: Tensor) -> Tensor:
    """Computes S^T q of states (..., K, V)."""
    return (state * q[..., None]).sum(-2)


def _scale(scale: float | None, q: Tensor) -> float:
    return max(1, q.shape[-1]) ** -0.5 if scale is None else scale


@spelled_out(StateOptions)
def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """S_t = U_n(.. U_1(exp(g_t) S_{t-1})), U_j(S) = S + beta_tj k_tj (v_tj - S^T k_tj)^T."""
    if l2norm:
        q, k = unit(q), unit(k)
    group, factor = v.shape[3] // max(1, q.shape[2]), _scale(scale, q)
    if g is None:
        g = beta.new_zeros((*v.shape[:2], v.shape[3]))
    g = g if g.dim() == 4 else g[..., None]

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        s = s * g.exp()[..., None]
        for j in range(k.shape[1]):
            s = written(s, k[:, j], beta[:, j, :, None] * (v[:, j] - read(s, k[:, j])))
        return factor * read(s, q), s

    rows = (q.repeat_interleave(group, 2), k.repeat_interleave(group, 3), v, g, beta)
    shape = (v.shape[3], q.shape[3], v.shape[4])
    return over_tokens("gated_delta_product", options, step, rows, v[:, :, -1], shape)


@spelled_out(StateOptions)
def gated_oja_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gv: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """S_t = S' + beta_t (k_t - S' v_t) v_t^T, S' = S_{t-1} diag(exp(gv_t)), o_t = S_t^T q_t."""
    group, factor = v.shape[2] // max(1, q.shape[2]), _scale(scale, q)
    gv = torch.zeros_like(v) if gv is None else gv

    def step(
        s: Tensor, q: Tensor, k: Tensor, v: Tensor, gv: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        s = s * gv.exp()[..., None, :]
        s = written(s, beta[..., None] * (k - (s * v[..., None, :]).sum(-1)), v)
        return factor * read(s, q), s

    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    shape = (v.shape[2], q.shape[3], v.shape[3])
    return over_tokens("gated_oja_rule", options, step, (q, k, v, gv, beta), v, shape)


@spelled_out(StateOptions)
def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    erase_decayed: bool = False,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """S_t = S' + beta_t k_t (v_t - E^T p_t)^T, S' = diag(exp(g_t)) S_{t-1}; E = S_{t-1} or S'."""
    if l2norm:
        q, k, p = unit(q), unit(k), unit(p)
    group, factor = v.shape[2] // max(1, q.shape[2]), _scale(scale, q)

    def step(
        s: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        decayed = s * g.exp()[..., None]
        u = beta[..., None] * (v - read(decayed if erase_decayed else s, p))
        s = written(decayed, k, u)
        return factor * read(s, q), s

    q, k, p = (t.repeat_interleave(group, 2) for t in (q, k, p))
    rows = (q, k, v, p, g if g.dim() == 4 else g[..., None], beta)
    return over_tokens("comba", options, step, rows, v, (v.shape[2], q.shape[3], v.shape[3]))


@spelled_out(StateOptions)
def gated_delta_rule_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """S_t = S' + k_t (w_t * v_t - S'^T (b_t * k_t))^T, S' = diag(exp(g_t)) S_{t-1}."""
    if l2norm:
        q, k = unit(q), unit(k)
    group, factor = v.shape[2] // max(1, q.shape[2]), _scale(scale, q)

    def step(
        s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor
    ) -> tuple[Tensor, Tensor]:
        s = s * g.exp()[..., None]
        s = written(s, k, w * v - read(s, b * k))
        return factor * read(s, q), s

    if b.shape[2] != v.shape[2]:
        b = b.repeat_interleave(group, 2)
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    rows = (q, k, v, g if g.dim() == 4 else g[..., None], b, w)
    shape = (v.shape[2], q.shape[3], v.shape[3])
    return over_tokens("gated_delta_rule_2", options, step, rows, v, shape)


def preconditioned_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    log_atk_scale: Tensor | float = -0.2,
    *,
    x: float = 1.5,
    eps: float = 1e-6,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """S_t = S' + beta_t m_t k_t (v_t - S'^T k_t)^T, S' = diag(exp(g_t)) S_{t-1}.

    ``m_t = x^(-r / (1 + |r|))``, r = ln(A_t + eps) - log_atk_scale, and
    A_t = exp(g_atk_t) A_{t-1} + beta_atk_t k_t^2."""
    op = "preconditioned_delta_rule"
    if l2norm:
        q, k = unit(q), unit(k)
    group, factor = v.shape[2] // max(1, q.shape[2]), _scale(scale, q)
    s, a = (None, None) if initial_state is None else initial_state

    def add(a: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        a = g.exp()[..., None] * a + beta[..., None] * k.square()
        return a, a

    options: StateOptions = {"initial_state": a, "cu_seqlens": cu_seqlens}
    squares, a = over_tokens(op, options, add, (k, g_atk, beta_atk), widen(k), tuple(k.shape[2:]))
    center = torch.as_tensor(log_atk_scale, dtype=squares.dtype, device=k.device)
    r = (squares + eps).log() - center[..., None]
    m = x ** (-r / (1 + r.abs()))

    def step(
        s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, m: Tensor
    ) -> tuple[Tensor, Tensor]:
        s = s * g.exp()[..., None]
        s = written(s, m * k, beta[..., None] * (v - read(s, k)))
        return factor * read(s, q), s

    q, k, m = (t.repeat_interleave(group, 2) for t in (q, k, m))
    rows = (q, k, v, g if g.dim() == 4 else g[..., None], beta, m)
    options = {"initial_state": s, "cu_seqlens": cu_seqlens}
    o, s = over_tokens(op, options, step, rows, v, (v.shape[2], q.shape[3], v.shape[3]))
    return o, (s, a)
