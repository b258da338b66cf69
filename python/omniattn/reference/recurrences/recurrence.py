"""Recurrences with a matrix state per head, token by token, and feature maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn.encoding.sequences import StateOptions, sequences_of, spelled_out
from omniattn.reference.empty import nothing_of
from omniattn.reference.limits import clamp
from omniattn.reference.precision import compute_dtype, unit, widen
from omniattn.reference.values import sequence_count


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    skip: Tensor | None = None,
    min_denominator: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    delta: bool = False,
    feature_map: str = "identity",
    normalize: bool = False,
    eps: float = 0.0,
    fp32_output: bool = False,
    gv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o_t = scale (S_t^T q_t + skip * v_t), S_t = diag(exp(g_t)) S_{t-1} + k_t u_t^T; returns o and
    the final states.

    u_t = beta_t v_t, or with `delta` u_t = beta_t (v_t - S'^T k_t), where S' is the decayed state.
    With gv (B, T, Hv, V), S_{t-1} diag(exp(gv_t)) takes the place of S_{t-1}.
    With a and b, b_t (S_{t-1}^T a_t)^T is added to S_t. With a bonus, o_t = scale R^T q_t,
    R = S_{t-1} + diag(bonus) k_t u_t^T.

    q, k, a and b (B, T, Hk, K), v (B, T, Hv, V), g (B, T, Hv) or (B, T, Hv, K), beta (B, T, Hv),
    bonus (N, Hv, K), skip (N, Hv, V), states (N, Hv, K, V). With cu_seqlens B is 1, and the row
    holds N sequences, each with its own state.

    q and k are replaced by their features, by `feature_map`. `normalize` appends a column of ones
    to v, whose output is the sum of the weights, and divides outputs by the `divisor` of this sum;
    states keep the column. With `fp32_output` outputs are not rounded to v's dtype.
    """
    dtype = compute_dtype(q)
    o_dtype = dtype if fp32_output else v.dtype
    group = v.shape[2] // max(q.shape[2], 1)
    q, k = (FEATURE_MAPS[feature_map](t.to(dtype)) for t in (q, k))
    rows = [t.to(dtype).repeat_interleave(group, 2) for t in (q, k, a, b) if t is not None]
    wide_v = v.to(dtype)
    if normalize:
        wide_v = torch.cat((wide_v, wide_v.new_ones(*v.shape[:3], 1)), -1)
    count = sequence_count("recurrence", q, cu_seqlens)
    state = wide_v.new_zeros(count, v.shape[2], q.shape[3], wide_v.shape[3])
    if initial_state is not None:
        state = state + initial_state.to(dtype)
    outputs = []
    for t in range(q.shape[1]):
        qt, kt, *low_rank = (x[:, t, :, :, None] for x in rows)
        new = state
        if g is not None:
            gt = g[:, t].to(dtype)
            new = new * (gt if gt.dim() == 3 else gt[..., None]).exp()[..., None]
        if gv is not None:
            new = new * gv[:, t].to(dtype).exp()[..., None, :]
        u = wide_v[:, t]
        if delta:
            u = u - (new * kt).sum(-2)
        if beta is not None:
            u = beta[:, t, :, None].to(dtype) * u
        added = kt * u[..., None, :]
        read = new = new + added
        if low_rank:
            at, bt = low_rank
            read = new = new + bt * (state * at).sum(-2, keepdim=True)
        if bonus is not None:
            read = state + bonus.to(dtype)[..., None] * added
        o = (read * qt).sum(-2)
        if skip is not None:
            o = o + skip.to(dtype) * wide_v[:, t]
        if cu_seqlens is None:
            state = new
        else:
            inside = ((cu_seqlens[:-1] <= t) & (t < cu_seqlens[1:]))[:, None, None]
            state = torch.where(inside[..., None], new, state)
            o = torch.where(inside, o, 0).sum(0, keepdim=True)
        outputs.append(o)
    if not outputs:  # gradients are zeros and not None
        others = (t for t in (g, gv, beta, min_denominator, bonus, skip) if t is not None)
        nothing = nothing_of(wide_v, *rows, *others)
        return (v + nothing).to(o_dtype), state + nothing
    o = torch.stack(outputs, 1)
    if normalize:
        o, sums = o[..., :-1], o[..., -1:]
        o = o / divisor(
            sums, None if min_denominator is None else min_denominator.to(dtype)[..., None], eps
        )
    return (scale * o).to(o_dtype), state


def divisor(sums: Tensor, min_denominator: Tensor | None, eps: float) -> Tensor:
    """Returns the divisor for outputs from sums of weights.

    It is ``max(|sum|, min_denominator) + eps``, or without `min_denominator` the sum, whose
    magnitude is raised to at least eps.
    """
    if min_denominator is not None:
        return torch.maximum(sums.abs(), min_denominator) + eps
    sign = 1 - 2 * (sums < 0).to(sums.dtype)  # where(sums < 0, -eps, eps) gives float32
    return torch.where(sums.abs() < eps, sign * eps, sums)


def taylor(x: Tensor) -> Tensor:
    """[1, y, y (x) y / sqrt(2)], y = x / K^(1/4): kernel 1 + u + u^2 / 2, u = q . k / sqrt(K)."""
    x = x * max(1, x.shape[-1]) ** -0.25
    square = (x[..., :, None] * x[..., None, :]).flatten(-2) * 2**-0.5
    return torch.cat((torch.ones_like(x[..., :1]), x, square), -1)


def square(x: Tensor) -> Tensor:
    """Products of pairs of elements, each pair once: kernel u^2, u = q . k / sqrt(K)."""
    x = x * max(1, x.shape[-1]) ** -0.25
    pairs = (x[..., i : i + 1] * x[..., i + 1 :] for i in range(x.shape[-1] - 1))
    return torch.cat((x * x, *(2**0.5 * pair for pair in pairs)), -1)


#: Feature maps of linear attention by name, over the last dimension.
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu1": lambda x: nnf.elu(x).add_(1),
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x).square(),
    "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1),
    "taylor": taylor,
    "square": square,
    "identity": lambda x: x,
}

#: Feature maps whose products may be negative, so that division by their sum gives no mean.
SIGNED = frozenset(("identity",))


@spelled_out(StateOptions)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = "elu1",
    causal: bool = True,
    normalize: bool | None = None,
    scale: float | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-6,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """o_t = num_t / den_t, num_t = sum_s (phi(q_t) . phi(k_s)) v_s, den_t = the same without v_s.

    Sums are over s <= t, or over all s if not causal. The magnitude of den_t is at least eps.

    The state is sum phi(k) [v, 1]^T, or without the 1 if not normalized. It decays by exp(g), and
    beta multiplies phi(k).
    """
    phi = feature_map if callable(feature_map) else FEATURE_MAPS[feature_map]
    if normalize is None:
        normalize = isinstance(feature_map, str) and feature_map not in SIGNED
    root = 1.0 if scale is None else scale**0.5
    q, k = (phi(widen(t) * root) for t in (q, k))
    if beta is not None:
        k = k * widen(beta if beta.dim() == 4 else beta[..., None])
    values = widen(v)
    if normalize:
        values = torch.cat((values, values.new_ones(*v.shape[:3], 1)), -1)
    o, state = _run("linear_attention", options, q, k, values, g, scale=1.0)
    if not causal:
        o = _read(q, state, options.get("cu_seqlens"))
    if normalize:
        o = o[..., :-1] / divisor(o[..., -1:], None, eps)
    return o.to(v.dtype), state


def _read(q: Tensor, states: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Computes S^T q of each token with the state S of its batch entry or packed sequence."""
    q = q.repeat_interleave(states.shape[1] // max(1, q.shape[2]), 2, output_size=states.shape[1])
    if cu_seqlens is None:
        return torch.einsum("bthk,bhkv->bthv", q, states)
    token = torch.arange(q.shape[1], device=q.device)
    sequence = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    return torch.einsum("thk,thkv->thv", q[0], states[sequence])[None]


@spelled_out(StateOptions)
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    gv: Tensor | None = None,
    scale: float | None = None,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(g_t)) S_{t-1} diag(exp(gv_t)) + k_t v_t^T, o_t = scale S_t^T q_t."""
    return _run("gated_linear_attention", options, q, k, v, g, scale=scale, gv=gv)


@spelled_out(StateOptions)
def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gamma: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """`recurrence` with the constant decay exp(g) = gamma_h, by default 1 - 2^(-5 - h).

    With `normalize` o is divided by sqrt(p_t), p_t = gamma p_{t-1} + 1, then by the magnitude of
    the sum of its weights, at least 1. The state then is that of v with a column of ones, and an
    additional last row holds p in its last element.
    """
    if gamma is None:
        heads = torch.arange(v.shape[2], dtype=compute_dtype(v), device=v.device)
        gamma = 1 - torch.exp2(-5 - heads)
    g = gamma.to(compute_dtype(v)).log().expand(v.shape[:3])
    op = "retention"
    if not normalize:
        return _run(op, options, q, k, v, g, scale=scale)
    initial_state, cu_seqlens, _ = sequences_of(op, options, StateOptions)
    one = widen(v).new_ones(*v.shape[:3], 1)
    first, powers = initial_state, None
    if initial_state is not None:
        first, powers = initial_state[:, :, :-1], initial_state[:, :, -1:, -1:]
    wide = torch.cat((widen(v), one), -1)
    given: StateOptions = {"initial_state": first, "cu_seqlens": cu_seqlens}
    o, state = _run(op, given, q, k, wide, g, scale=scale)
    p, last = recurrence(one, one, one, g, initial_state=powers, cu_seqlens=cu_seqlens)
    o = o / p.sqrt()
    o = o[..., :-1] / o[..., -1:].detach().abs().clamp(min=1)
    below = nnf.pad(last, (v.shape[-1], 0))
    return o.to(v.dtype), torch.cat((state, below), 2)


@spelled_out(StateOptions)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """S_t = S' + beta_t k_t (v_t - S'^T k_t)^T with S' = diag(exp(g_t)) S_{t-1}."""
    if l2norm:
        q, k = unit(q), unit(k)
    return _run("delta_rule", options, q, k, v, g, beta, scale=scale, delta=True)


@spelled_out(StateOptions)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """delta_rule with a decay per head, g (B, T, Hv), or per channel, (B, T, Hv, K)."""
    return delta_rule(q, k, v, beta, g=g, scale=scale, l2norm=l2norm, **options)


@spelled_out(StateOptions)
def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float | None = 1.0,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t, S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T."""
    g = w.expand(*v.shape[:3], r.shape[-1])
    count = sequence_count("rwkv6", r, options.get("cu_seqlens"))
    bonus = u.expand(count, *u.shape)
    return _run("rwkv6", options, r, k, v, g, scale=scale, bonus=bonus)


@spelled_out(StateOptions)
def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T, o_t = scale S_t^T q_t."""
    return _run("dplr_delta_rule", options, q, k, v, g, scale=scale, a=a, b=b)


@spelled_out(StateOptions)
def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = 1.0,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """dplr_delta_rule with RWKV-7's order of arguments and a default scale of 1."""
    return _run("rwkv7", options, r, k, v, w, scale=scale, a=a, b=b)


@spelled_out(StateOptions)
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = (h_t C_t + D x_t) silu(z_t).

    x, z (B, T, H, P), B, C (B, T, G, N), states (N, H, P, N), D (H) or (H, P).
    """
    initial_state, cu_seqlens, _ = sequences_of("ssd", options, StateOptions)
    wide = widen(x)
    step = dt.to(wide.dtype)
    if dt_bias is not None:
        step = step + dt_bias.to(wide.dtype)
    if dt_softplus:
        step = nnf.softplus(step)
    step = clamp(step, *dt_limit)
    before = None if initial_state is None else initial_state.mT
    y, state = recurrence(
        widen(C),
        widen(B),
        wide * step[..., None],
        step * A.to(wide.dtype),
        initial_state=before,
        cu_seqlens=cu_seqlens,
    )
    if D is not None:
        y = y + wide * (D if D.dim() == 2 else D[:, None]).to(wide.dtype)
    if z is not None:
        y = y * nnf.silu(widen(z))
    return y.to(x.dtype), state.mT


def _run(
    op: str,
    options: StateOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None,
    **terms: Any,
) -> tuple[Tensor, Tensor]:
    """Runs :func:`recurrence` with the options of a call of `op`; the default scale is K^-0.5."""
    initial_state, cu_seqlens, _ = sequences_of(op, options, StateOptions)
    if scale is None:
        scale = max(1, q.shape[-1]) ** -0.5
    terms |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "scale": scale}
    return recurrence(q, k, v, g, beta, **terms)


#: One definition: the shape of g distinguishes the two.
kimi_delta_attention = gated_delta_rule
