"""Titans' memories, token by token: a matrix, and an MLP."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.reference.precision import widen
from omniattn.reference.recurrences.delta_variants import over_tokens
from omniattn.reference.recurrences.fast_weights import fast_weights
from omniattn.reference.recurrences.log_linear import positions

__all__ = ["titans_linear", "titans_mlp"]

State = tuple[Tensor, Tensor, Tensor]


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
    position: Tensor | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """o = q M, or q M + LN(q M), of weights M that move by S = eta S - theta k^T u."""
    weights, momentum, anchor = initial_state or (None, None, None)
    theta = widen(theta)
    keep = torch.zeros_like(theta) if eta is None else widen(eta)
    gate = None if alpha is None else 1 - widen(alpha)
    momentum = None if momentum is None else -momentum
    given: list[Any] = [widen(q), widen(k), widen(v), 2 * theta, keep, gate, w, b]
    given += [weights, momentum, anchor, position, cu_seqlens, mini_batch_size, eps, scale]
    y, m, s, n = fast_weights(*(*given, False, False, w is not None))
    if w is not None and b is not None:
        y = y + nnf.layer_norm(y, (y.shape[-1],), eps=eps) * w + b
    return y.to(q.dtype), (m, -s, n)


def titans_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None = None,
    eta: Tensor | None = None,
    *,
    initial_state: State,
    hidden: Sequence[int] = (),
    scale: float = 1.0,
    mini_batch_size: int = 16,
    position: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """``o = M(scale q)``, whose weights move by ``S = eta S - theta grad |N(k) - v|^2``."""
    theta = widen(theta)
    keep = torch.zeros_like(theta) if eta is None else widen(eta)
    gate = None if alpha is None else 1 - widen(alpha)
    weights, momentum, anchor = initial_state
    given = widen(q), widen(k), widen(v), -2 * theta, weights, keep, gate, momentum, anchor
    y, *state = memory_mlp(*given, position, cu_seqlens, list(hidden), mini_batch_size, scale)
    return y.to(q.dtype), (state[0], state[1], state[2])


def memory_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    weights: Tensor,
    keep: Tensor | None,
    gate: Tensor | None,
    momentum: Tensor | None,
    anchor: Tensor | None,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    hidden: list[int],
    mini_batch_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights M (N, H, P) and momentum S, and N, the M at the start of the mini-batch.

    ``S_t = keep_t S_{t-1} + step_t g_t`` with the gradients g of ``|N(k_t) - v_t|^2 / 2``,
    ``M_t = gate_t M_{t-1} + S_t`` and ``y_t = M_t(scale q_t)``. Absent gates are 1, an absent
    momentum is 0, and an absent anchor is the weights.
    """
    widths, size, heads = [q.shape[3], *hidden, v.shape[3]], weights.shape[2], q.shape[2]
    at = positions(q, position, cu_seqlens)
    first, last = at % mini_batch_size == 0, (at + 1) % mini_batch_size == 0

    def advance(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        step, keep, gate, first, last = (t.reshape(*t.shape, *(1,) * (3 - t.dim())) for t in rest)
        m, s, n = state.split((size,) * 3, 2)
        n = torch.where(first > 0, m, n)
        inputs, gradients = signals(matrices(n, widths), k[..., None, :], v[..., None, :])
        slopes = (a.mT @ u for a, u in zip(inputs, gradients, strict=True))
        s = keep * s + step * torch.cat([t.flatten(-2) for t in slopes], -1)
        m = gate * m + s
        x = q[..., None, :]
        for layer, matrix in enumerate(matrices(m, widths)):
            x = (nnf.gelu(x) if layer > 0 else x) @ matrix
        return x.squeeze(-2), torch.cat((m, s, torch.where(last > 0, m, n)), 2)

    one = torch.ones_like(step)
    gates = (one if t is None else t for t in (keep, gate))
    momentum = torch.zeros_like(weights) if momentum is None else momentum
    start = at.new_zeros(weights.shape[0]) if position is None else position
    closed = (start % mini_batch_size == 0).view(-1, 1, 1)
    anchor = weights if anchor is None else torch.where(closed, weights, anchor)
    y, state = over_tokens(
        "titans_mlp",
        {"initial_state": torch.cat((weights, momentum, anchor), 2), "cu_seqlens": cu_seqlens},
        advance,
        (q * scale, k, v, step, *gates, first, last),
        v,
        (heads, 3 * size),
    )
    m, s, n = state.split((size,) * 3, 2)
    return y, m, s, n


def matrices(flat: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Returns the matrices (.., a, b) of layers of these widths, from the rows of all (.., P)."""
    shapes = list(itertools.pairwise(widths))
    each = flat.split([a * b for a, b in shapes], -1)
    return [t.unflatten(-1, shape) for t, shape in zip(each, shapes, strict=True)]


def signals(layers: list[Tensor], k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the inputs of the layers of an MLP with GELU for k, and the gradients by its outputs.

    They are those of ``|MLP(k) - v|^2 / 2``.
    """
    inputs, outputs = [k], list[Tensor]()
    for n, matrix in enumerate(layers):
        if n > 0:
            inputs.append(nnf.gelu(outputs[-1]))
        outputs.append(inputs[-1] @ matrix)
    gradients = [outputs[-1] - v]
    for matrix, z in zip(layers[:0:-1], outputs[-2::-1], strict=True):
        slope = (1 + torch.erf(z / 2**0.5)) / 2
        slope = slope + z * torch.exp(-z * z / 2) / (2 * math.pi) ** 0.5
        gradients.append((gradients[-1] @ matrix.mT) * slope)
    return inputs, gradients[::-1]
