"""ATLAS' linear memory, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.reference.empty import nothing_of
from omniattn.reference.precision import widen
from omniattn.reference.recurrences.delta_variants import over_tokens, read
from omniattn.reference.recurrences.log_linear import positions

__all__ = ["atlas_linear", "newton_schulz", "omega"]

State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
#: Coefficients of Newton-Schulz steps, and eps^2 of the first length, of Jordan et al. 2024 (Muon).
_LINEAR, _CUBIC, _QUINTIC, _EPS = 3.4445, -4.7750, 2.0315, 1e-14


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Moves the singular values of x (..., K, V) to about 1; returns x for 0 steps.

    Of ``x / |x|`` each step makes ``a x + b (x x^T) x + c (x x^T)^2 x``.
    """
    if steps == 0:
        return x
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x * torch.rsqrt(x.square().sum((-2, -1), keepdim=True) + _EPS)
    for _ in range(steps):
        square = x @ x.mT
        x = _LINEAR * x + (_CUBIC * square + _QUINTIC * square @ square) @ x
    return x.mT if wide else x


def _past(x: Tensor, before: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the C rows up to each token (B, T, C, H, D), latest first, and each sequence's last.

    x (B, T, H, D) follows the C - 1 rows `before` (N, C - 1, H, D) of each sequence.
    """
    sequences, held = before.shape[:2]
    batch, steps = x.shape[:2]
    first = torch.arange(batch + 1, device=x.device) * steps if cu_seqlens is None else cu_seqlens
    tokens, back = (torch.arange(n, device=x.device) for n in (batch * steps, held + 1))
    owner = (first[1:, None] <= tokens).sum(0)
    rows = torch.cat((before.flatten(0, 1), x.flatten(0, 1)))

    def at(owner: Tensor, token: Tensor) -> Tensor:
        own = token - first[owner]
        return rows[torch.where(own < 0, (owner + 1) * held + own, sequences * held + token)]

    windows = at(owner[:, None], tokens[:, None] - back).unflatten(0, (batch, steps))
    every = torch.arange(sequences, device=x.device)
    return windows, at(every[:, None], first[1:, None] - back[1:].flip(0))


def omega(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    theta: Tensor | None,
    keep: Tensor | None,
    gate: Tensor | None,
    weights: Tensor | None,
    momentum: Tensor | None,
    anchor: Tensor | None,
    keys: Tensor | None,
    values: Tensor | None,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    newton_schulz_steps: int,
    mini_batch_size: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """Weights M (N, H, K, V), momentum S, N, the M at the start of the mini-batch, keys, values.

    ``S_t = keep_t S_{t-1} + sum_j step_tj k_{t-j}^T (k_{t-j} N - v_{t-j})`` over the C numbers of
    step (B, T, H, C), ``M_t = gate_t M_{t-1} - theta_t f(S_t)`` of the steps f of Newton and
    Schulz, and ``y_t = scale q_t M_t``. keys and values (N, C - 1, H, ...) are those of the last
    tokens. Absent theta and gates are 1, absent states 0, and an absent anchor is the weights.
    """
    op = "atlas_linear"
    q, k, v = widen(q) * scale, widen(k), widen(v)
    heads, rows, width = *q.shape[2:], v.shape[3]
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    held = step.shape[3] - 1
    keys = q.new_zeros(count, held, heads, rows) if keys is None else keys
    values = q.new_zeros(count, held, heads, width) if values is None else values
    (k, keys), (v, values) = _past(k, keys, cu_seqlens), _past(v, values, cu_seqlens)
    one = torch.ones_like(step[..., 0])
    gates = [one if t is None else t for t in (theta, keep, gate)]
    at = positions(q, position, cu_seqlens)
    first, last = at % mini_batch_size == 0, (at + 1) % mini_batch_size == 0

    def advance(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        theta, keep, gate, first, last = (t.reshape(*t.shape, *(1,) * (4 - t.dim())) for t in rest)
        m, s, n = state.split((rows,) * 3, 2)
        n = torch.where(first > 0, m, n)
        s = keep * s
        for j in range(held + 1):
            u = step[..., j, None] * (read(n, k[:, j]) - v[:, j])
            s = s + k[:, j, ..., None] * u[..., None, :]
        m = gate * m - theta * newton_schulz(s, newton_schulz_steps)
        return read(m, q), torch.cat((m, s, torch.where(last > 0, m, n)), 2)

    zeros = q.new_zeros(count, heads, rows, width)
    weights = zeros if weights is None else weights
    momentum = zeros if momentum is None else momentum
    start = at.new_zeros(count) if position is None else position
    closed = (start % mini_batch_size == 0).view(-1, 1, 1, 1)
    anchor = weights if anchor is None else torch.where(closed, weights, anchor)
    like = v[:, :, 0]
    y, state = over_tokens(
        op,
        {"initial_state": torch.cat((weights, momentum, anchor), 2), "cu_seqlens": cu_seqlens},
        advance,
        (q, k, v, step, *gates, first, last),
        like,
        (heads, 3 * rows, width),
    )
    if y.shape[1] == 0:
        y = y + nothing_of(step, y)
    return y, *state.split((rows,) * 3, 2), keys, values


def atlas_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    theta: Tensor | None = None,
    alpha: Tensor | None = None,
    eta: Tensor | None = None,
    *,
    scale: float = 1.0,
    newton_schulz_steps: int = 0,
    mini_batch_size: int = 16,
    position: Tensor | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """o = q M of weights M that move by S = eta S - sum_j gamma_j k^T u over the last tokens."""
    theta, alpha, eta = (None if t is None else widen(t) for t in (theta, alpha, eta))
    keep = torch.zeros_like(gamma[..., 0]) if eta is None else eta
    gate = None if alpha is None else 1 - alpha
    m, s, n, *past = initial_state or (None,) * 5
    given: list[Any] = [q, k, v, 2 * widen(gamma), theta, keep, gate]
    given += [m, None if s is None else -s, n, *past, position, cu_seqlens]
    given += [newton_schulz_steps, mini_batch_size, scale]
    y, m, s, n, keys, values = omega(*given)
    return y.to(q.dtype), (m, -s, n, keys, values)
