"""Random-feature attention, token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn.reference.precision import widen
from omniattn.reference.recurrences.scan import State, over_time
from omniattn.reference.values import sequence_count


def random_feature_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    kind: str = "positive",
    causal: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_eps: float = 0.0,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """o_t = phi(q_t)^T S_t, divided by its last column;
    S_t = e^(M_{t-1} - M_t) S_{t-1} + phi(k_t) [v_t, 1]^T, M_t = max(M_{t-1}, exponents of k_t).

    Features phi(k_t) are divided by e^M_t. If not causal, all tokens of a sequence read its last S
    and M. M has no gradient. With feature_eps, exponents are reduced by the largest W y, without
    ``-|y|^2 / 2``, as in performer-pytorch.
    """
    (a_q, f_q), (a_k, f_k) = (_exponents(x, weight, kind, scale) for x in (q, k))
    wide = torch.cat((widen(v), widen(v).new_ones(*v.shape[:3], 1)), -1)
    count = sequence_count("random_feature_attention", q, cu_seqlens)
    top, half_q, half_k = None, torch.zeros_like(a_q[..., :1]), torch.zeros_like(a_k[..., :1])
    if feature_eps > 0:
        if kind in ("positive", "hyperbolic"):
            half_q, half_k = (_half_norms(x, scale) for x in (q, k))
        top = _largest((a_k + half_k).detach().amax(-1), cu_seqlens)
    if initial_state is None:
        s = a_k.new_zeros(count, q.shape[2], f_k.shape[-1], wide.shape[-1])
        initial_state = s, a_k.new_full((count, q.shape[2], a_k.shape[-1]), -math.inf)

    def read(a: Tensor, f: Tensor, half: Tensor, s: Tensor, m: Tensor) -> Tensor:
        """Computes S^T phi(q), divided by the largest exponential."""
        shifted = a + m
        largest = (shifted + half).detach().amax(-1, keepdim=True)
        phi = (shifted - largest).exp() * f + feature_eps
        return (phi[..., None] * s).sum(-2)

    def step(
        state: State,
        a_q: Tensor,
        f_q: Tensor,
        half: Tensor,
        a_k: Tensor,
        f_k: Tensor,
        v: Tensor,
    ) -> tuple[State, State]:
        s, m = state
        new = torch.maximum(m, a_k.detach()) if top is None else top[..., None].expand(m.shape)
        kept = (m - new).exp() if top is None else torch.ones_like(m)
        s = (
            kept[..., None] * s
            + ((a_k - new).exp() * f_k + feature_eps)[..., None] * v[..., None, :]
        )
        return (read(a_q, f_q, half, s, new),), (s, new)

    start = tuple(t.to(a_k.dtype) for t in initial_state)
    outputs, (s, m) = over_time(
        step, (a_q, f_q, half_q, a_k, f_k, wide), start, cu_seqlens, (weight,)
    )
    o = outputs[0] if outputs else wide + (a_q.sum() + a_k.sum()) * 0
    if not causal and outputs:
        sequence = torch.zeros(q.shape[1], dtype=torch.int64, device=q.device)
        if cu_seqlens is not None:
            at = torch.arange(q.shape[1], device=q.device)
            sequence = torch.searchsorted(cu_seqlens.long(), at, right=True) - 1
            o = read(a_q, f_q, half_q, s[sequence][None], m[sequence][None])
        else:
            o = read(a_q, f_q, half_q, s[:, None], m[:, None])
    o, den = o[..., :-1], o[..., -1:]
    if kind in ("trigonometric", "gaussian"):
        den = torch.where(den.abs() < eps, torch.where(den < 0, -eps, eps).to(den), den)
    return (o / den).to(v.dtype), (s, m if top is None else m[..., :1])


def _largest(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the maximum (N, H) of x (B, T, H) over each sequence; 0 for empty sequences."""
    if cu_seqlens is not None:
        token = torch.arange(x.shape[1], device=x.device)
        inside = (cu_seqlens[:-1, None] <= token) & (token < cu_seqlens[1:, None])
        x = torch.where(inside[..., None], x, -math.inf)
    found = torch.nn.functional.pad(x, (0, 0, 1, 0), value=-math.inf).amax(1)
    return torch.where(found == -math.inf, 0, found)


def _half_norms(x: Tensor, scale: float | None) -> Tensor:
    """Computes ``|y|^2 / 2``, where y is the scaled x that features are computed from."""
    y = widen(x) * (x.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    return y.square().sum(-1, keepdim=True) / 2


def _exponents(x: Tensor, weight: Tensor, kind: str, scale: float | None) -> tuple[Tensor, Tensor]:
    """Returns (a, f) of the features e^a f."""
    if scale is None:
        scale = 1.0 if kind == "exp_random" else x.shape[-1] ** -0.5
    y = widen(x) * scale**0.5
    w, half = y @ weight.to(y.dtype).T, y.square().sum(-1, keepdim=True) / 2
    if kind == "trigonometric":
        return half, torch.cat((w.sin(), w.cos()), -1)
    if kind == "gaussian":
        return 0 * half, torch.cat((w.sin(), w.cos()), -1)
    if kind == "hyperbolic":
        w = torch.cat((w, -w), -1)
    a = w if kind == "exp_random" else w - half
    return a, torch.ones_like(a)
