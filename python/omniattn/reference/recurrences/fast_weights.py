"""Linear models trained on past tokens, token by token: TTT-Linear and Titans."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.reference.empty import nothing_of
from omniattn.reference.recurrences.delta_variants import over_tokens, read, written
from omniattn.reference.recurrences.log_linear import positions

__all__ = ["fast_weights", "prepared", "slope"]


def slope(z: Tensor, target: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Tensor:
    """The gradient by z of ``|f(z) - target|^2 / 2``, f a norm with weight and bias or none."""
    if w is None or b is None:
        return z - target
    normal = nnf.layer_norm(z, z.shape[-1:], eps=eps)
    gap = w * (normal * w + b - target)
    gap = gap - gap.mean(-1, True) - normal * (gap * normal).mean(-1, True)
    centred = z - z.mean(-1, True)
    return gap / (centred.square().mean(-1, True) + eps).sqrt()


def prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor | None, ...],
    scale: float,
    bias: bool,
    residual: bool,
) -> tuple[Tensor, ...]:
    """Returns the q, k, targets and gates of the recursion from those of a call."""
    q = q * scale
    if residual:
        v = v - k
    if bias:
        q, k = (nnf.pad(t, (0, 1), value=1.0) for t in (q, k))
    one = q.new_ones(q.shape[:3])
    return q, k, v, *(one if t is None else t for t in gates)


def fast_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor | None,
    keep: Tensor | None,
    gate: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    weights: Tensor | None,
    momentum: Tensor | None,
    anchor: Tensor | None,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    mini_batch_size: int,
    eps: float,
    scale: float,
    descent: bool,
    bias: bool,
    residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights M (N, H, R, V) and momentum S, and N, the M at the start of the mini-batch.

    ``S_t = keep_t S_{t-1} + step_t k_t^T u_t`` with the gradients u of `slope` at ``z = k_t N``,
    ``M_t = gate_t M_{t-1} - S_t`` and ``y_t = scale q_t M_t``. With `descent` ``M_t = M_0 - gate_t
    S_t`` of the M_0 at the start of the mini-batch, after which S is 0 again. With `bias` q, once
    scaled, and k end with a 1, so that R = K + 1; with `residual` the targets are v - k. Absent
    gates are 1, absent states 0, and an absent anchor is the weights.
    """
    q, k, v, *gates = prepared(q, k, v, (step, keep, gate), scale, bias, residual)
    rows, width, heads = q.shape[3], v.shape[3], q.shape[2]
    at = positions(q, position, cu_seqlens)
    first, last = at % mini_batch_size == 0, (at + 1) % mini_batch_size == 0

    def advance(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        keep, gate, first, last = (t.reshape(*t.shape, *(1,) * (4 - t.dim())) for t in rest)
        m, s, n = state.split((rows,) * 3, 2)
        n = torch.where(first > 0, m, n)
        u = slope(read(n, k), v, w, b, eps)
        s = written(keep * s, k, step[..., None] * u)
        new = m - gate * s if descent else gate * m - s
        y = read(new, q)
        if descent:
            new, s = torch.where(last > 0, new, m), torch.where(last > 0, 0 * s, s)
        return y, torch.cat((new, s, torch.where(last > 0, new, n)), 2)

    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    zeros = q.new_zeros(count, heads, rows, width)
    weights = zeros if weights is None else weights
    momentum = zeros if momentum is None else momentum
    start = torch.zeros_like(position) if position is not None else at.new_zeros(count)
    closed = ((start if position is None else position) % mini_batch_size == 0).view(-1, 1, 1, 1)
    anchor = weights if anchor is None else torch.where(closed, weights, anchor)
    y, state = over_tokens(
        "fast_weights",
        {"initial_state": torch.cat((weights, momentum, anchor), 2), "cu_seqlens": cu_seqlens},
        advance,
        (q, k, v, *gates, first, last),
        v,
        (heads, 3 * rows, width),
    )
    if y.shape[1] == 0:
        y = y + nothing_of(*(t for t in (w, b) if t is not None), y)
    m, s, n = state.split((rows,) * 3, 2)
    return y, m, s, n
