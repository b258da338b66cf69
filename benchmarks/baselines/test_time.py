"""Baselines of mixers that solve a problem at test time, differentiated by torch.

TTT-Linear is a loop over mini-batches. The products of MesaNet's conjugate gradients and of Gated
KalmaNet's Chebyshev iteration are over chunks and their states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from baselines._common import compiled, lacks
from baselines.recurrence import CHUNK

__all__ = ["BASELINES"]


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor,
    *,
    eps: float = 1e-6,
    mini_batch_size: int = 16,
    **options: Any,
) -> tuple[Tensor, ...]:
    size = q.shape[-1]
    lacks(**options, part=q.shape[1] % mini_batch_size > 0)
    q, k, v, eta = (
        t.transpose(1, 2).unflatten(2, (-1, mini_batch_size)).movedim(2, 0)
        for t in (q * size**-0.5, k, v, eta[..., None])
    )
    weights, bias = k.new_zeros(*k.shape[1:3], size, size), k.new_zeros(*k.shape[1:3], 1, size)
    w, b, out = w[:, None], b[:, None], []
    for q_n, k_n, v_n, eta_n in zip(q, k, v, eta, strict=True):
        z = k_n @ weights + bias
        normal = F.layer_norm(z, (size,), eps=eps)
        gap = w * (w * normal + b - (v_n - k_n))
        gap = gap - gap.mean(-1, True) - normal * (gap * normal).mean(-1, True)
        u = gap * torch.rsqrt(z.var(-1, unbiased=False, keepdim=True) + eps)
        read = torch.tril(q_n @ k_n.mT + 1) @ u
        out.append(q_n @ weights + bias - eta_n * read)
        step = eta_n[..., -1:, :]
        weights, bias = weights - (step * k_n).mT @ u, bias - step * u.sum(-2, True)
    y = torch.stack(out)
    o = y + F.layer_norm(y, (size,), eps=eps) * w + b
    o = o.movedim(0, 2).flatten(2, 3).transpose(1, 2)
    return o, weights, bias[:, :, 0], 0 * weights, 0 * bias[:, :, 0]


def titans_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None = None,
    eta: Tensor | None = None,
    w: Tensor | None = None,
    b: Tensor | None = None,
    *,
    scale: float = 1.0,
    eps: float = 1e-6,
    mini_batch_size: int = 16,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Products of mini-batches; weights of pairs for all of them at once, row by row."""
    count, size = mini_batch_size, q.shape[-1]
    lacks(**options, part=q.shape[1] % count > 0, plain=w is None)
    assert w is not None and b is not None and alpha is not None and eta is not None
    q, k, v, theta, gate, eta = (
        t.transpose(1, 2).unflatten(2, (-1, count)).movedim(2, 0)
        for t in (q * scale, k, v, 2 * theta, 1 - alpha, eta)
    )
    write = pair = torch.zeros_like(theta)
    kept = weighed = torch.ones_like(theta[..., :1])
    read, rows = torch.zeros_like(kept), []
    for t in range(count):
        write = eta[..., t : t + 1] * write + F.pad(theta[..., t : t + 1], (t, count - 1 - t))
        kept, weighed = eta[..., t : t + 1] * kept, gate[..., t : t + 1] * weighed
        pair, read = gate[..., t : t + 1] * pair + write, gate[..., t : t + 1] * read + kept
        rows.append((pair, read, weighed))
    pairs, reads, shares = (torch.stack(each, -2) for each in zip(*rows, strict=True))
    inside = pairs * (q @ k.mT)
    weights = momentum = k.new_zeros(*k.shape[1:3], size, size)
    w, b, out = w[:, None], b[:, None], []
    for n in range(len(q)):
        z = k[n] @ weights
        normal = F.layer_norm(z, (size,), eps=eps)
        gap = w * (w * normal + b - (v[n] - k[n]))
        gap = gap - gap.mean(-1, True) - normal * (gap * normal).mean(-1, True)
        u = gap * torch.rsqrt(z.var(-1, unbiased=False, keepdim=True) + eps)
        out.append(shares[n] * (q[n] @ weights) + reads[n] * (q[n] @ momentum) - inside[n] @ u)
        moved = kept[n, ..., None] * momentum - (write[n, ..., None] * k[n]).mT @ u
        weights = shares[n, ..., -1:, :] * weights + reads[n, ..., -1:, :] * momentum
        weights = weights - (pairs[n, ..., -1, :, None] * k[n]).mT @ u
        momentum = moved
    y = torch.stack(out)
    o = y + F.layer_norm(y, (size,), eps=eps) * w + b
    return o.movedim(0, 2).flatten(2, 3).transpose(1, 2), weights, momentum, weights


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
    **options: Any,
) -> tuple[Tensor, ...]:
    """Gradients of the tokens of a mini-batch as matrices, their sums, and steps one by one."""
    size, window = mini_batch_size, gamma.shape[-1]
    missing = theta is None or alpha is None or eta is None
    lacks(**options, part=q.shape[1] % size > 0, default=missing)
    assert theta is not None and alpha is not None and eta is not None
    k, v = (F.pad(t, (0, 0, 0, 0, window - 1, 0)).transpose(1, 2) for t in (k, v))
    q, gamma = (t.transpose(1, 2) for t in (q * scale, -2 * gamma.flip(-1)))
    theta, gate, eta = (t.transpose(1, 2)[..., None, None] for t in (theta, 1 - alpha, eta))
    weights = momentum = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    out = []
    for first in range(0, q.shape[2], size):
        around = slice(first, first + size + window - 1)
        u = k[:, :, around] @ weights - v[:, :, around]
        slopes = (k[:, :, around, :, None] * u[..., None, :]).unfold(2, window, 1)
        steps = (slopes @ gamma[:, :, first : first + size, None, :, None]).squeeze(-1)
        for t in range(first, first + size):
            momentum = eta[:, :, t] * momentum + steps[:, :, t - first]
            moved = _orthogonal(momentum, newton_schulz_steps)
            weights = gate[:, :, t] * weights + theta[:, :, t] * moved
            out.append((q[:, :, t, None] @ weights).squeeze(2))
    past = (t[:, :, q.shape[2] :].transpose(1, 2) for t in (k, v))
    return torch.stack(out, 1), weights, momentum, weights, *past


def titans_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None = None,
    eta: Tensor | None = None,
    *,
    M: Tensor,
    S: Tensor,
    N0: Tensor,
    hidden: Sequence[int],
    scale: float = 1.0,
    mini_batch_size: int = 16,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Gradients of all tokens of a mini-batch by torch.func, then the weights of each token."""
    lacks(**options, part=q.shape[1] % mini_batch_size > 0, gates=alpha is None or eta is None)
    assert alpha is not None and eta is not None
    widths = [q.shape[-1], *hidden, v.shape[-1]]
    shapes = list(itertools.pairwise(widths))

    def apply(flat: Tensor, x: Tensor) -> Tensor:
        for n, matrix in enumerate(flat.split([a * b for a, b in shapes])):
            x = (F.gelu(x) if n > 0 else x) @ matrix.view(shapes[n])
        return x

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (apply(flat, x) - y).square().sum()

    of_heads = torch.func.vmap(torch.func.vmap(torch.func.grad(loss)))
    slopes_of = torch.func.vmap(of_heads, (None, 1, 1), 1)
    outputs_of = torch.func.vmap(torch.func.vmap(apply))
    weights, momentum, out = M, S, []
    for n in range(0, q.shape[1], mini_batch_size):
        part = slice(n, n + mini_batch_size)
        slopes = slopes_of(weights, k[:, part], v[:, part])
        for t in range(mini_batch_size):
            e, th, al = (x[:, n + t, :, None] for x in (eta, theta, alpha))
            momentum = e * momentum - th * slopes[:, t]
            weights = (1 - al) * weights + momentum
            out.append(outputs_of(weights, scale * q[:, n + t]))
    return torch.stack(out, 1), weights, momentum, weights


def _orthogonal(x: Tensor, steps: int) -> Tensor:
    """Newton-Schulz steps of Muon."""
    if steps == 0:
        return x
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x


def _states(left: Tensor, right: Tensor, end: Tensor) -> Tensor:
    """States (B, H, n, K, V) before chunks, which add left^T right and decay by `end`."""
    added, state, found = left.mT @ right, torch.zeros_like((left.mT @ right)[:, :, 0]), []
    for n in range(left.shape[2]):
        found.append(state)
        state = state * end[:, :, n, None, None] + added[:, :, n]
    return torch.stack(found, 2)


def mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    *,
    l2norm: bool = False,
    max_iterations: int = 30,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    lacks(**options, part=q.shape[1] % CHUNK > 0)
    if l2norm:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k, v, g, beta = (t.transpose(1, 2).unflatten(2, (-1, CHUNK)) for t in (q, k, v, g, beta))
    total = g.cumsum(-1)
    gap = total[..., :, None] - total[..., None, :]
    weights = gap.tril().exp().tril() * beta[..., None, :]
    last = total[..., -1:]
    kept, end = k * (beta * (last - total).exp())[..., None], last[..., 0].exp()
    kk, kv = _states(kept, k, end), _states(kept, v, end)
    decay, lamb = total.exp()[..., None], lamb[None, :, None, None]
    x, r, p = torch.zeros_like(q), q, q
    left = r.square().sum(-1, keepdim=True)
    for _ in range(max_iterations):
        y = (p * decay) @ kk + ((p @ k.mT) * weights) @ k + lamb * p
        length = left / ((p * y).sum(-1, keepdim=True) + 1e-20)
        x, r = x + length * p, r - length * y
        before, left = left, r.square().sum(-1, keepdim=True)
        p = r + left / (before + 1e-20) * p
    o = (x * decay) @ kv + ((x @ k.mT) * weights) @ v
    states = (
        end[:, :, -1, None, None] * state[:, :, -1] + kept[:, :, -1].mT @ rows[:, :, -1]
        for state, rows in ((kk, k), (kv, v))
    )
    return (o.flatten(2, 3).transpose(1, 2), *states)


def gated_kalmanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    alpha: Tensor | None = None,
    *,
    ridge_ratio: float = 0.02,
    max_iterations: int = 30,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    lacks(**options, part=q.shape[1] % CHUNK > 0 or g is None)
    assert g is not None and gk is not None and alpha is not None
    q, k, v, g, gk, alpha = (
        t.transpose(1, 2).unflatten(2, (-1, CHUNK)) for t in (q, k, v, g, gk, alpha)
    )
    total, weights, decay, kept, end = _decayed(gk, k)
    kk = _states(kept, k, end)
    squares = weights * (weights @ (k @ k.mT).square())
    norm = squares.sum(-1) + (2 * total).exp() * kk.square().sum((-2, -1))[..., None]
    norm = norm + 2 * (weights @ ((k @ kk) * k).sum(-1, keepdim=True) * decay)[..., 0]
    norm = norm.sqrt()[..., None]
    step, slope = 1 / (ridge_ratio + 0.5) / norm, (0.25 / (ridge_ratio + 0.5)) ** 2
    x, before, omega = step * q, torch.zeros_like(q), 2.0
    for _ in range(max_iterations):
        omega = 1 / (1 - slope * omega)
        y = (x * decay) @ kk + ((x @ k.mT) * weights) @ k + ridge_ratio * norm * x - q
        x, before = omega * (x - step * y) + (1 - omega) * before, x
    x = (q + alpha[..., None] * (x - q)) * q.shape[-1] ** -0.5
    _, weights, decay, values, last = _decayed(g, k)
    kv = _states(values, v, last)
    o = (x * decay) @ kv + ((x @ k.mT) * weights) @ v
    states = (
        final[:, :, -1, None, None] * state[:, :, -1] + left[:, :, -1].mT @ rows[:, :, -1]
        for final, state, left, rows in ((end, kk, kept, k), (last, kv, values, v))
    )
    return (o.flatten(2, 3).transpose(1, 2), *states)


def _decayed(g: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sums of log-decays, weights of pairs, decays of states, keys as kept, decays of chunks."""
    total = g.cumsum(-1)
    weights = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    kept = k * (total[..., -1:] - total).exp()[..., None]
    return total, weights, total.exp()[..., None], kept, total[..., -1].exp()


BASELINES = {
    "titans_mlp": {"aten": titans_mlp},
    "titans_linear": {"aten": titans_linear, "compiled": compiled(titans_linear)},
    "atlas_linear": {"aten": atlas_linear, "compiled": compiled(atlas_linear)},
    "ttt_linear": {"aten": ttt_linear, "compiled": compiled(ttt_linear)},
    "mesa_net": {"aten": mesa_net, "compiled": compiled(mesa_net)},
    "gated_kalmanet": {"aten": gated_kalmanet, "compiled": compiled(gated_kalmanet)},
}
