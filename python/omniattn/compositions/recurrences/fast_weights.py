"""Fast weights, the engine of TTT-Linear and Titans, and its products in torch for other devices.

The products take mini-batches of C tokens one after the other. All u of a mini-batch are taken at
its first weights, so that with weights P (C, C) of pairs, found from the gates of all mini-batches
at once, ``y = A q M - F q S - (P * q k^T) u``, and M and S move by products of k and u. Autograd
goes through them; it keeps the weights of each mini-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from omniattn.compositions._python_ops import implement, recomputed
from omniattn.compositions._rows import batches
from omniattn.compositions.recurrences._descent import accumulate, count_sequences, parts
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.reference.precision import compute_dtype, widen
from omniattn.reference.recurrences.fast_weights import fast_weights as definition
from omniattn.reference.recurrences.fast_weights import prepared, slope

__all__ = ["fast_weights"]


class _Model(NamedTuple):
    """Weights, momentum, and the weights at the start of the mini-batch, (B, H, R, V) each."""

    weights: Tensor
    momentum: Tensor
    anchor: Tensor


class _Rules(NamedTuple):
    w: Tensor | None
    b: Tensor | None
    mini_batch_size: int
    eps: float
    descent: bool


class _Gates(NamedTuple):
    """Shares of tokens (n, B, H, C, C) and of the start (n, B, H, C, 1), for n mini-batches."""

    pairs: Tensor
    writes: Tensor
    of_weights: Tensor
    of_momentum: Tensor
    from_momentum: Tensor


def _combine(step: Tensor, keep: Tensor, gate: Tensor, descent: bool) -> _Gates:
    writes, of_momentum = accumulate(step[..., None], keep)
    if descent:
        gate = gate[..., None]
        none = torch.ones_like(of_momentum)
        return _Gates(gate * writes, writes, none, of_momentum, gate * of_momentum)
    moves, of_weights = accumulate(torch.ones_like(gate)[..., None], gate)
    return _Gates(moves @ writes, writes, of_weights, of_momentum, moves @ of_momentum)


def _mini_batches(
    rows: tuple[Tensor, ...], model: _Model, rules: _Rules, count: int, ends: bool, starts: bool
) -> tuple[Tensor, _Model]:
    """Reads tokens (B, T, H, ...) that are `count` mini-batches, or part of one.

    `starts` and `ends` tell whether the first tokens start one and the last ones end one.
    """
    q, k, v, *gates = (
        t.unflatten(1, (count, -1)).movedim(3, 2).movedim(1, 0) for t in rows
    )  # (n, B, H, C, ...)
    step, keep, gate = gates
    shares = _combine(step, keep, gate, rules.descent)
    of_pairs = -shares.pairs * (q @ k.mT)
    w, b = (None if t is None else t[:, None] for t in (rules.w, rules.b))
    outputs = []
    for n in range(count):
        m, s = model.weights, model.momentum
        anchor = m if starts or n > 0 else model.anchor
        u = slope(k[n] @ anchor, v[n], w, b, rules.eps)
        y = shares.of_weights[n] * (q[n] @ m) - shares.from_momentum[n] * (q[n] @ s)
        outputs.append(y + of_pairs[n] @ u)
        pair, write, of_weights, of_momentum, from_momentum = (
            each[n][..., -1:, :] for each in shares
        )
        new = of_weights * m - from_momentum * s - (pair.mT * k[n]).mT @ u
        s = of_momentum * s + (write.mT * k[n]).mT @ u
        if rules.descent:
            new, s = (new, torch.zeros_like(s)) if ends else (m, s)
        model = _Model(new, s, new if ends else anchor)
    return torch.stack(outputs).movedim(0, 1).movedim(2, 3).flatten(1, 2), model


def _forward(
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
    op = "fast_weights"
    states = {"weights": weights, "momentum": momentum, "anchor": anchor, "position": position}
    sequences = count_sequences(op, v, cu_seqlens, states)
    if mini_batch_size < 1:
        raise ValueError(f"{op}: mini_batch_size must be at least 1, got {mini_batch_size}")
    if residual and k.shape != v.shape:
        raise ValueError(f"{op}: k must have v's shape, got {tuple(k.shape)}, {tuple(v.shape)}")
    dtype = v.dtype
    tensors = prepared(
        *(widen(q), widen(k), widen(v), (step, keep, gate), scale), bias=bias, residual=residual
    )
    q, k, v = tensors[:3]
    zeros = q.new_zeros(sequences, q.shape[2], q.shape[3], v.shape[3])
    weights = zeros if weights is None else weights
    momentum = zeros if momentum is None else momentum
    rules = _Rules(w, b, mini_batch_size, eps, descent)
    outputs, models = [], []
    for rows, steps, own, place in batches(q, position, cu_seqlens):
        start = place % mini_batch_size
        first = weights[own]
        model = _Model(first, momentum[own], first if anchor is None or start == 0 else anchor[own])
        inputs = tuple(t[rows, steps] for t in tensors)
        found = [inputs[2][:, :0]]
        for begin, end, count, starts, ends in parts(start, inputs[0].shape[1], mini_batch_size):
            part = tuple(t[:, begin:end] for t in inputs)
            y, model = _mini_batches(part, model, rules, count, ends, starts)
            found.append(y)
        outputs.append(torch.cat(found, 1))
        models.append(model)
    if not outputs:
        return v.to(dtype), weights + 0, momentum + 0, weights + 0
    y = torch.cat(outputs, 0 if cu_seqlens is None else 1)
    model = _Model(*(torch.cat(each) + 0 for each in zip(*models, strict=True)))
    return y.to(dtype), *model


#: N sequences; R = K, or K + 1 with a bias.
_SHAPES = {
    **{"q": "B T H K", "k": "B T H K", "v": "B T H V"},
    **dict.fromkeys(("step", "keep", "gate"), "B T H"),
    **{"w": "H V", "b": "H V"},
    **dict.fromkeys(("weights", "momentum", "anchor"), "N H R V"),
    **{"position": "N", "cu_seqlens": "N+1"},
}
_GRADIENTS = {"grad_y": "B T H V"} | dict.fromkeys(
    ("grad_weights_final", "grad_momentum_final", "grad_anchor_final"), "N H R V"
)


def _final(v: Tensor, q: Tensor, cu_seqlens: Tensor | None, bias: bool) -> Tensor:
    """Returns an empty final state."""
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (count, q.shape[2], q.shape[3] + bias, v.shape[3])
    return v.new_empty(shape, dtype=compute_dtype(v))


implement("fast_weights", _forward, _SHAPES, differentiable=True)
implement("fast_weights_backward", recomputed(_forward, 4, 11), _GRADIENTS | _SHAPES)
#: (q, k, v, step, keep, gate, w, b, weights, momentum, anchor, position, cu_seqlens,
#: mini_batch_size, eps, scale, descent, bias, residual) -> (y, weights, momentum, anchor)
fast_weights = DifferentiableOp(
    "fast_weights",
    fakes={
        "y": lambda v: v.new_empty(v.shape),
        **dict.fromkeys(("weights_final", "momentum_final", "anchor_final"), _final),
    },
    backward_op=BackwardOp("fast_weights_backward"),
    formula=lambda *args: definition(*args),
)
