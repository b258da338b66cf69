"""Recurrences of a matrix state for each head, one token after another, and feature maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.reference.precision import compute_dtype, widen
from omniattn.reference.vmap import require_not_mapped


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o (B, T, Hv, V) in the dtype of v, final state (N, Hv, K, V) in fp32 (fp64 for fp64).

    S_t = diag(exp(g_t)) S_{t-1} + k_t u_t^T,  o_t = scale S_t^T q_t,
    u_t = v_t, or beta_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t).

    q, k (B, T, H, K) with H dividing Hv; g (B, T, Hv) or (B, T, Hv, K), beta (B, T, Hv), or None;
    initial_state (N, Hv, K, V) or None. N is B; with cu_seqlens (N + 1,), where B = 1, the number
    of sequences, whose tokens are cu_seqlens[n] .. cu_seqlens[n + 1] - 1.
    """
    wide, heads = compute_dtype(v), v.shape[2]
    if initial_state is None:
        count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = v.new_zeros(count, heads, q.shape[-1], v.shape[-1], dtype=wide)
    group = heads // max(1, q.shape[2])
    q, k = (t.to(wide).repeat_interleave(group, 2, output_size=heads) for t in (q, k))
    decay = None if g is None else (g[..., None] if g.ndim == 3 else g).to(wide).exp()[..., None]

    def run(s: Tensor, row: slice, steps: range) -> tuple[list[Tensor], Tensor]:
        outputs = []
        for t in steps:
            if decay is not None:
                s = s * decay[row, t]
            u = v[row, t].to(wide)
            if beta is not None:
                u = beta[row, t, :, None].to(wide) * (u - (s * k[row, t, :, :, None]).sum(-2))
            s = s + k[row, t, :, :, None] * u[:, :, None]
            outputs.append(scale * (s * q[row, t, :, :, None]).sum(-2))
        return outputs, s

    if cu_seqlens is None:
        outputs, final = run(initial_state.to(wide), slice(None), range(v.shape[1]))
    else:
        require_not_mapped("recurrence", "cu_seqlens", cu_seqlens)
        bounds: list[int] = cu_seqlens.tolist()
        outputs, ends = [], list[Tensor]()
        for n in range(len(bounds) - 1):
            steps = range(bounds[n], bounds[n + 1])
            part, end = run(initial_state[n : n + 1].to(wide), slice(0, 1), steps)
            outputs, ends = outputs + part, [*ends, end]
        final = torch.cat(ends) if ends else initial_state.to(wide)
    if outputs:
        o = torch.stack(outputs, 1)
    else:  # empty, but with (empty) gradients of all inputs
        o = v + sum(t.sum() for t in (q, k, g, beta) if t is not None)
    return o.to(v.dtype), final


def taylor(x: Tensor) -> Tensor:
    """[1, y, y (x) y / sqrt(2)], y = x / K^(1/4): kernel 1 + u + u^2 / 2 of u = q . k / sqrt(K)."""
    x = x * x.shape[-1] ** -0.25
    square = (x[..., :, None] * x[..., None, :]).flatten(-2) * 2**-0.5
    return torch.cat((torch.ones_like(x[..., :1]), x, square), -1)


#: Feature maps of linear attention by name, over the last dimension.
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu1": lambda x: nnf.elu(x) + 1,
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x).square(),
    "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1),
    "taylor": taylor,
    "identity": lambda x: x,
}


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = "elu1",
    causal: bool = True,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o = num / den of num_t = sum_s (phi(q_t) . phi(k_s)) v_s and den_t, the same without v, over
    s <= t or over all s; den is at least eps in size.

    The state is sum phi(k) [v, 1]^T, or without the 1 where nothing is divided.
    """
    phi = feature_map if callable(feature_map) else FEATURE_MAPS[feature_map]
    if normalize is None:
        normalize = isinstance(feature_map, str) and feature_map != "identity"
    root = 1.0 if scale is None else scale**0.5
    q, k = (phi(widen(t) * root) for t in (q, k))
    values = widen(v)
    if normalize:
        values = torch.cat((values, values.new_ones(*v.shape[:3], 1)), -1)
    o, state = recurrence(q, k, values, None, None, initial_state, cu_seqlens, 1.0)
    if not causal:
        o = _read(q, state, cu_seqlens)
    if normalize:
        o, den = o[..., :-1], o[..., -1:]
        least = torch.where(den < 0, -eps, eps).to(den.dtype)
        o = o / torch.where(den.abs() < eps, least, den)
    return o.to(v.dtype), state


def _read(q: Tensor, states: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """S^T q of each token with the state of its entry of the batch, or of its sequence."""
    q = q.repeat_interleave(states.shape[1] // max(1, q.shape[2]), 2, output_size=states.shape[1])
    if cu_seqlens is None:
        return torch.einsum("bthk,bhkv->bthv", q, states)
    token = torch.arange(q.shape[1], device=q.device)
    sequence = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    return torch.einsum("thk,thkv->thv", q[0], states[sequence])[None]


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t."""
    return recurrence(q, k, v, g, None, initial_state, cu_seqlens, _scale(q, scale))


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with exp(g) = gamma_h, by default 1 - 2^(-5 - h)."""
    if gamma is None:
        heads = torch.arange(v.shape[2], dtype=compute_dtype(v), device=v.device)
        gamma = 1 - torch.exp2(-5 - heads)
    g = gamma.to(compute_dtype(v)).log().expand(v.shape[:3])
    return recurrence(q, k, v, g, None, initial_state, cu_seqlens, _scale(q, scale))


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S' + beta_t k_t (v_t - S'^T k_t)^T with S' = diag(exp(g_t)) S_{t-1}."""
    if l2norm:
        q, k = (
            (widen(t) * torch.rsqrt(widen(t).square().sum(-1, keepdim=True) + 1e-6)).to(t.dtype)
            for t in (q, k)
        )
    return recurrence(q, k, v, g, beta, initial_state, cu_seqlens, _scale(q, scale))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """delta_rule with a decay for each head (g (B, T, Hv)) or channel (B, T, Hv, K)."""
    return delta_rule(q, k, v, beta, g=g, **options)


def _scale(q: Tensor, scale: float | None) -> float:
    return scale if scale is not None else max(1, q.shape[-1]) ** -0.5


#: One definition: the shape of g says which it is.
kimi_delta_attention = gated_delta_rule
