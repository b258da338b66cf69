"""Titans' memory that is an MLP, which descends a loss of the tokens it reads, for all devices.

The gradient of a token by the matrix of a layer is ``a^T u`` of the layer's input a and of the
gradient u by its output, both at the first weights of a mini-batch. So each layer is a linear
memory: with numbers b, c, d, W and P, which the gates give for all layers at once, the momentum is
``S_t = d_t S + sum_e W_te a_e^T u_e`` and ``x_t M_t = b_t x_t M + c_t x_t S + sum_e P_te (x_t
a_e^T) u_e``.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.compositions._python_ops import define, recomputed
from omniattn.compositions._rows import batches
from omniattn.compositions.recurrences._descent import accumulate, count_sequences, lean, parts
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.reference.precision import compute_dtype, widen
from omniattn.reference.recurrences.titans import matrices, signals
from omniattn.reference.recurrences.titans import memory_mlp as definition

__all__ = ["memory_mlp"]


class _Model(NamedTuple):
    """Weights, momentum, and the weights at the start of the mini-batch, (B, H, P) each."""

    weights: Tensor
    momentum: Tensor
    anchor: Tensor


class _Chunk(NamedTuple):
    """Tokens of mini-batches (n, B, H, C, ...), or of one.

    writes (C, C) and of_momentum (C, 1) are the shares of the gradients and of the first S in the
    momenta; pairs (C, C), from_momentum (C, 1) and of_weights (C, 1) those of the gradients, of S
    and of the first M in the weights.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    writes: Tensor
    of_momentum: Tensor
    pairs: Tensor
    from_momentum: Tensor
    of_weights: Tensor


def _read(
    c: _Chunk, weights: Tensor, momentum: Tensor, anchor: Tensor, widths: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes y, M and S of a mini-batch."""
    inputs, gradients = signals(matrices(anchor, widths), c.k, c.v)
    pair, write = (t[..., -1:, :].mT for t in (c.pairs, c.writes))
    x, moved, gathered = c.q, [], []
    layers = zip(
        *(matrices(t, widths) for t in (weights, momentum)), inputs, gradients, strict=True
    )
    for n, (m, s, a, u) in enumerate(layers):
        x = nnf.gelu(x) if n > 0 else x
        x = c.of_weights * (x @ m) + c.from_momentum * (x @ s) + (c.pairs * (x @ a.mT)) @ u
        moved.append((pair * a).mT @ u)
        gathered.append((write * a).mT @ u)
    m, s = (torch.cat([t.flatten(-2) for t in each], -1) for each in (moved, gathered))
    m = m + c.of_weights[..., -1, :] * weights + c.from_momentum[..., -1, :] * momentum
    return x, m, s + c.of_momentum[..., -1, :] * momentum


def _mini_batches(
    rows: tuple[Tensor, ...],
    model: _Model,
    count: int,
    starts: bool,
    ends: bool,
    widths: list[int],
) -> tuple[Tensor, _Model]:
    """Reads tokens (B, T, H, ...) that are `count` mini-batches, or part of one.

    `starts` and `ends` tell whether the first tokens start a mini-batch and the last ones end one.
    """
    size = rows[0].shape[1] // count
    q, k, v, step, keep, gate = (
        t.unflatten(1, (count, size)).movedim(3, 2).movedim(1, 0) for t in rows
    )
    writes, of_momentum = accumulate(step[..., None], keep)
    moves, of_weights = accumulate(torch.ones_like(step[..., None]), gate)
    shares = writes, of_momentum, moves @ writes, moves @ of_momentum, of_weights
    chunk, outputs = _Chunk(q, k, v, *shares), []
    for n in range(count):
        m, s, anchor = model
        anchor = m if starts or n > 0 else anchor
        y, m, s = lean(_read, _Chunk(*(t[n] for t in chunk)), m, s, anchor, widths)
        outputs.append(y)
        model = _Model(m, s, m if ends else anchor)
    return torch.stack(outputs).movedim(0, 1).movedim(2, 3).flatten(1, 2), model


def _forward(
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
) -> tuple[Tensor, ...]:
    op, widths = "titans_mlp", [q.shape[3], *hidden, v.shape[3]]
    states = {"weights": weights, "momentum": momentum, "anchor": anchor, "position": position}
    count_sequences(op, v, cu_seqlens, states)
    wanted = sum(a * b for a, b in itertools.pairwise(widths))
    if mini_batch_size < 1 or weights.shape[2] != wanted:
        raise ValueError(
            f"{op}: mini_batch_size must be at least 1 and weights have {wanted} numbers, "
            f"got {mini_batch_size} and weights.shape={tuple(weights.shape)}"
        )
    dtype = v.dtype
    one = step.new_ones(()).expand(step.shape)
    gates = (one if t is None else t for t in (keep, gate))
    rows = (widen(q) * scale, widen(k), widen(v), step, *gates)
    momentum = torch.zeros_like(weights) if momentum is None else momentum
    outputs, finals = [], []
    for batch, tokens, own, place in batches(q, position, cu_seqlens):
        start = place % mini_batch_size
        first = weights[own]
        model = _Model(first, momentum[own], first if anchor is None or start == 0 else anchor[own])
        inputs = tuple(t[batch, tokens] for t in rows)
        found = [inputs[2][:, :0]]
        for begin, end, count, starts, ends in parts(start, inputs[0].shape[1], mini_batch_size):
            each = tuple(t[:, begin:end] for t in inputs)
            y, model = _mini_batches(each, model, count, starts, ends, widths)
            found.append(y)
        outputs.append(torch.cat(found, 1))
        finals.append(model)
    if not outputs:
        return v.to(dtype) + 0, weights + 0, momentum + 0, weights + 0
    y = torch.cat(outputs, 0 if cu_seqlens is None else 1)
    return y.to(dtype), *(torch.cat(each) + 0 for each in zip(*finals, strict=True))


#: N sequences; P numbers in all matrices of a head.
_TENSORS = {"q": "B T H K", "k": "B T H K", "v": "B T H V", "step": "B T H", "weights": "N H P"}
_OPTIONAL = {
    **{"keep": "B T H", "gate": "B T H", "momentum": "N H P", "anchor": "N H P"},
    **{"position": "N", "cu_seqlens": "N+1"},
}
_ARGUMENTS = ", ".join(
    [
        *(f"Tensor {name}" for name in _TENSORS),
        *(f"Tensor? {name}" for name in _OPTIONAL),
        "int[] hidden, int mini_batch_size, float scale",
    ]
)
_FINALS = dict.fromkeys(("weights_final", "momentum_final", "anchor_final"), "N H P")
_GRADIENTS = {"grad_y": "B T H V"} | {f"grad_{name}": shape for name, shape in _FINALS.items()}
_DIFFERENTIABLE = [*_TENSORS, *_OPTIONAL][:9]
define(
    "titans_mlp",
    _ARGUMENTS,
    ", ".join(f"Tensor {name}" for name in ("y", *_FINALS)),
    _forward,
    _TENSORS | _OPTIONAL,
    differentiable=True,
)
define(
    "titans_mlp_backward",
    ", ".join([*(f"Tensor? {name}" for name in _GRADIENTS), _ARGUMENTS]),
    ", ".join(f"Tensor d{name}" for name in _DIFFERENTIABLE),
    recomputed(_forward, len(_GRADIENTS), len(_DIFFERENTIABLE)),
    _GRADIENTS | _TENSORS | _OPTIONAL,
)


def _final(v: Tensor, weights: Tensor) -> Tensor:
    """Returns an empty final state."""
    return v.new_empty(weights.shape, dtype=compute_dtype(v))


#: (q, k, v, step, weights, keep, gate, momentum, anchor, position, cu_seqlens, hidden,
#: mini_batch_size, scale) -> (y, weights, momentum, anchor)
memory_mlp = DifferentiableOp(
    "titans_mlp",
    fakes={"y": lambda v: v.new_empty(v.shape), **dict.fromkeys(_FINALS, _final)},
    backward_op=BackwardOp("titans_mlp_backward"),
    formula=lambda *args: definition(*args),
)
