"""Mamba-3's state space, token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.reference.empty import nothing_of
from omniattn.reference.precision import compute_dtype
from omniattn.reference.recurrences.scan import over_time
from omniattn.reference.values import sequence_count

State = tuple[Tensor, Tensor, Tensor, Tensor]


def mamba3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    adt: Tensor,
    dt: Tensor,
    trap: Tensor,
    q_bias: Tensor,
    k_bias: Tensor,
    angles: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    *,
    mimo_v: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    interleaved: bool = True,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """``h_t = a_t (h_{t-1} + (1 - l_t) dt_t U_{t-1}) + l_t dt_t U_t``, ``y_r = h_t q'_r + D v_r``.

    U_t = sum_r v_r k'_r^T of inputs v_r (B, T, R, H, P); the state is (theta, h, k', v).
    """
    count, dtype = sequence_count("mamba3", v, cu_seqlens), compute_dtype(v)
    single, (_, _, heads, size) = mimo_v is None, v.shape
    groups, pairs = q.shape[-2], angles.shape[-1]

    def rows(t: Tensor, bias: Tensor) -> Tensor:
        t = t.to(dtype).repeat_interleave(heads // max(1, groups), -2)
        return t + (bias if single else bias.transpose(0, 1)).to(dtype)

    def inputs(v: Tensor, factors: Tensor | None) -> Tensor:
        return v if factors is None else v[:, None] * factors.transpose(0, 1).to(dtype)

    def step(
        state: tuple[Tensor, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        adt: Tensor,
        dt: Tensor,
        trap: Tensor,
        angles: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        theta, h, last_k, last_v = state
        theta = (theta + math.pi * angles.tanh() * dt[..., None]).remainder(2 * math.pi)
        q, k = (_turned(t, theta if single else theta[:, None], interleaved) for t in (q, k))
        share = trap.sigmoid()
        before, now = _products(last_k, inputs(last_v, mimo_v)), _products(k, inputs(v, mimo_v))
        h = adt.exp()[..., None, None] * (h + ((1 - share) * dt)[..., None, None] * before)
        h = h + (share * dt)[..., None, None] * now
        y = torch.einsum("bhpn,bhn->bhp" if single else "bhpn,brhn->brhp", h, q)
        return (y,), (theta, h, k, v)

    if initial_state is None:
        many = () if single else (q.shape[2],)
        shapes = (heads, pairs), (heads, size, q.shape[-1]), (*many, heads, q.shape[-1])
        zeros = (v.new_zeros(count, *s, dtype=dtype) for s in (*shapes, (heads, size)))
        start: tuple[Tensor, ...] = tuple(zeros)
    else:
        start = tuple(t.to(dtype) for t in initial_state)
    wide = [t.to(dtype) for t in (v, adt, dt, trap, angles)]
    others = [t for t in (D, z, mimo_v, mimo_z, mimo_out) if t is not None]
    outputs, state = over_time(
        step, [rows(q, q_bias), rows(k, k_bias), *wide], start, cu_seqlens, others
    )
    x = wide[0] if mimo_v is None else wide[0][:, :, None] * mimo_v.transpose(0, 1).to(dtype)
    y = outputs[0] if outputs else x + nothing_of(x, *others)
    if D is not None:
        y = y + D.to(dtype)[:, None] * x
    if z is not None:
        gate = z.to(dtype)
        y = y * nnf.silu(gate if mimo_z is None else gate[:, :, None] * mimo_z.transpose(0, 1))
    if mimo_out is not None:
        y = (y * mimo_out.transpose(0, 1)).sum(2)
    return y.to(v.dtype), (state[0], state[1], state[2], state[3])


def _products(k: Tensor, v: Tensor) -> Tensor:
    """Computes sum_r v_r k_r^T of k (B, R, H, N) and v (B, R, H, P), or without R."""
    outer = v[..., None] * k[..., None, :]
    return outer if k.dim() == 3 else outer.sum(1)


def _turned(x: Tensor, theta: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first pairs of x (..., N) by theta (..., A)."""
    places = torch.arange(theta.shape[-1], device=x.device)
    first = 2 * places if interleaved else places
    second = first + 1 if interleaved else first + x.shape[-1] // 2
    x = x.expand(*torch.broadcast_shapes(x.shape[:-1], theta.shape[:-1]), x.shape[-1])
    a, b = x[..., first], x[..., second]
    cos, sin = theta.cos(), theta.sin()
    turned = x.index_copy(-1, first, a * cos - b * sin)
    return turned.index_copy(-1, second, a * sin + b * cos)
