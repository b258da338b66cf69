"""ATLAS' linear memory, whose steps descend the losses of the last tokens: two ops.

`omega` has a kernel on the CPU (csrc/kernels/fast_weights), whose momenta have no other use than to
be summed. `orthogonal_omega`, which moves each momentum to an orthogonal matrix, is composed of
torch's products on all devices, as is `omega` elsewhere.

A mini-batch of C tokens has E = C + J - 1 keys, with those of the J - 1 tokens before it. All their
errors u are taken at its first weights, so that each momentum is ``S_t = d_t S + sum_e W_te k_e^T
u_e`` with weights W (C, E), which the gates of all mini-batches give at once. Without steps of
Newton and Schulz the weights of the memory are sums of momenta, and ``y = a q M - b q S - (P * q
k^T) u``. With them all S of a mini-batch are made, orthogonalized together, and then summed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn.compositions._python_ops import define, implement, recomputed
from omniattn.compositions._rows import batches
from omniattn.compositions.recurrences._descent import accumulate, count_sequences, lean, parts
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.ops.dispatch.names import Rules
from omniattn.reference.precision import compute_dtype, widen
from omniattn.reference.recurrences.atlas import newton_schulz
from omniattn.reference.recurrences.atlas import omega as definition

__all__ = ["omega", "orthogonal_omega"]


class _Model(NamedTuple):
    """Weights, momentum, and the weights at the start of the mini-batch, (B, H, K, V) each."""

    weights: Tensor
    momentum: Tensor
    anchor: Tensor


class _Chunk(NamedTuple):
    """Tokens of mini-batches (n, B, H, ...), or of one: E keys and values, and C of the others.

    writes (C, E) and of_momentum (C, 1) are the shares of u and of the first S in the momenta;
    moves (C, C), negative, and of_weights (C, 1) those of the momenta and of the first M in the
    weights.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    writes: Tensor
    of_momentum: Tensor
    moves: Tensor
    of_weights: Tensor


def _read(
    c: _Chunk, pairs: Tensor, products: Tensor, m: Tensor, s: Tensor, anchor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes y, M and S of a mini-batch from the shares `pairs` of u in its weights."""
    u = c.k @ anchor - c.v
    from_momentum = c.moves @ c.of_momentum
    y = c.of_weights * (c.q @ m) + from_momentum * (c.q @ s) + products @ u
    pair, write = (t[..., -1:, :].mT * c.k for t in (pairs, c.writes))
    m = c.of_weights[..., -1:, :] * m + from_momentum[..., -1:, :] * s + pair.mT @ u
    return y, m, c.of_momentum[..., -1:, :] * s + write.mT @ u


def _read_orthogonal(
    c: _Chunk, m: Tensor, s: Tensor, anchor: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes y, M and S of a mini-batch whose weights move by orthogonalized momenta."""
    u = c.k @ anchor - c.v
    slopes = (c.k[..., None] * u[..., None, :]).flatten(-2)  # (B, H, E, K V)
    momenta = c.writes @ slopes + c.of_momentum * s.flatten(-2)[..., None, :]
    moved = newton_schulz(momenta.unflatten(-1, s.shape[-2:]), steps).flatten(-2)
    memories = (c.moves @ moved + c.of_weights * m.flatten(-2)[..., None, :]).unflatten(
        -1, m.shape[-2:]
    )
    y = (c.q[..., None, :] @ memories).squeeze(-2)
    return y, memories[..., -1, :, :], momenta[..., -1, :].unflatten(-1, s.shape[-2:])


def _mini_batches(
    rows: tuple[Tensor, ...], model: _Model, count: int, starts: bool, ends: bool, steps: int
) -> tuple[Tensor, _Model]:
    """Reads tokens (B, T, H, ...) that are `count` mini-batches, or part of one.

    The keys and values begin with those of the J - 1 tokens before. `starts` and `ends` tell
    whether the first tokens start a mini-batch and the last ones end one.
    """
    q, k, v, step, theta, keep, gate = rows
    size, held = q.shape[1] // count, step.shape[3] - 1
    k, v = (t.unfold(1, size + held, size).permute(1, 0, 2, 4, 3) for t in (k, v))
    q, step, theta, keep, gate = (
        t.unflatten(1, (count, size)).movedim(3, 2).movedim(1, 0)
        for t in (q, step, theta, keep, gate)
    )
    # The step of token t for the one j before it is in column t + J - 1 - j.
    writes, of_momentum = accumulate(step.flip(-1), keep)
    moves, of_weights = accumulate(-theta[..., None], gate)
    chunk = _Chunk(q, k, v, writes, of_momentum, moves, of_weights)
    pairs = products = moves
    if steps == 0:
        pairs = moves @ writes
        products = pairs * (q @ k.mT)
    outputs = []
    for n in range(count):
        m, s, anchor = model
        anchor = m if starts or n > 0 else anchor
        own = _Chunk(*(t[n] for t in chunk))
        if steps == 0:
            y, m, s = _read(own, pairs[n], products[n], m, s, anchor)
        else:  # autograd would keep several matrices of each token
            y, m, s = lean(_read_orthogonal, own, m, s, anchor, steps)
        outputs.append(y)
        model = _Model(m, s, m if ends else anchor)
    return torch.stack(outputs).movedim(0, 1).movedim(2, 3).flatten(1, 2), model


def _forward(
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
    op, held = "atlas_linear", step.shape[3] - 1
    states = {"weights": weights, "momentum": momentum, "anchor": anchor, "keys": keys}
    states |= {"values": values, "position": position}
    sequences = count_sequences(op, v, cu_seqlens, states)
    if mini_batch_size < 1 or newton_schulz_steps < 0 or held < 0:
        raise ValueError(
            f"{op}: mini_batch_size and step.shape[3] must be at least 1 and newton_schulz_steps "
            f"at least 0, got {mini_batch_size}, {held + 1} and {newton_schulz_steps}"
        )
    for name, t in (("keys", keys), ("values", values)):
        if t is not None and t.shape[1] != held:
            raise ValueError(f"{op}: {name} must have {held} tokens, got {tuple(t.shape)}")
    dtype = v.dtype
    q, k, v = widen(q) * scale, widen(k), widen(v)
    one = step.new_ones(()).expand(step.shape[:3])
    scalars = step, *(one if t is None else t for t in (theta, keep, gate))
    heads, width = v.shape[2:]
    zeros = q.new_zeros(sequences, heads, q.shape[3], width)
    weights = zeros if weights is None else weights
    momentum = zeros if momentum is None else momentum
    keys = k.new_zeros(sequences, held, *k.shape[2:]) if keys is None else keys
    values = v.new_zeros(sequences, held, *v.shape[2:]) if values is None else values
    outputs, finals = [], []
    for rows, tokens, own, place in batches(q, position, cu_seqlens):
        start = place % mini_batch_size
        first = weights[own]
        model = _Model(first, momentum[own], first if anchor is None or start == 0 else anchor[own])
        inputs = tuple(t[rows, tokens] for t in (q, *scalars))
        past = tuple(
            torch.cat((before[own], t[rows, tokens]), 1) for before, t in ((keys, k), (values, v))
        )
        length = inputs[0].shape[1]
        found = [past[1][:, :0]]
        for begin, end, count, starts, ends in parts(start, length, mini_batch_size):
            around = (t[:, begin : end + held] for t in past)
            lead, *gates = (t[:, begin:end] for t in inputs)
            y, model = _mini_batches(
                (lead, *around, *gates), model, count, starts, ends, newton_schulz_steps
            )
            found.append(y)
        outputs.append(torch.cat(found, 1))
        finals.append((*model, *(t[:, length:] for t in past)))
    if not outputs:
        return v.to(dtype), weights + 0, momentum + 0, weights + 0, keys + 0, values + 0
    y = torch.cat(outputs, 0 if cu_seqlens is None else 1)
    return y.to(dtype), *(torch.cat(each) + 0 for each in zip(*finals, strict=True))


#: N sequences; J numbers of step, and J - 1 past tokens.
_TENSORS = {"q": "B T H K", "k": "B T H K", "v": "B T H V", "step": "B T H J"}
_MATRICES = dict.fromkeys(("weights", "momentum", "anchor"), "N H K V")
_PAST = {"keys": "N P H K", "values": "N P H V"}
_OPTIONAL = {
    **dict.fromkeys(("theta", "keep", "gate"), "B T H"),
    **_MATRICES,
    **_PAST,
    **{"position": "N", "cu_seqlens": "N+1"},
}
_SHAPES = _TENSORS | _OPTIONAL
_ARGUMENTS = ", ".join(
    [
        *(f"Tensor {name}" for name in _TENSORS),
        *(f"Tensor? {name}" for name in _OPTIONAL),
        "int newton_schulz_steps, int mini_batch_size, float scale",
    ]
)
_FINALS = {f"{name}_final": shape for name, shape in (_MATRICES | _PAST).items()}
_GRADIENTS = {"grad_y": "B T H V"} | {f"grad_{name}": shape for name, shape in _FINALS.items()}
_DIFFERENTIABLE = [*_TENSORS, *_OPTIONAL][:12]
_differentiate = recomputed(_forward, len(_GRADIENTS), len(_DIFFERENTIABLE))
define(
    "atlas_orthogonal",
    _ARGUMENTS,
    ", ".join(f"Tensor {name}" for name in ("y", *_FINALS)),
    _forward,
    _SHAPES,
    differentiable=True,
)
define(
    "atlas_orthogonal_backward",
    ", ".join([*(f"Tensor? {name}" for name in _GRADIENTS), _ARGUMENTS]),
    ", ".join(f"Tensor d{name}" for name in _DIFFERENTIABLE),
    _differentiate,
    _GRADIENTS | _SHAPES,
)


def _plain(function: Callable[..., Any], *values: Any) -> Any:
    """Calls a function of `newton_schulz_steps` without such steps."""
    *tensors, mini_batch_size, scale = values
    return function(*tensors, 0, mini_batch_size, scale)


implement("atlas_linear", partial(_plain, _forward), _SHAPES, differentiable=True)
implement("atlas_linear_backward", partial(_plain, _differentiate), _GRADIENTS | _SHAPES)


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _matrix(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns an empty final state."""
    shape = (_sequences(q, cu_seqlens), q.shape[2], q.shape[3], v.shape[3])
    return v.new_empty(shape, dtype=compute_dtype(v))


def _rows(x: Tensor, step: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns empty last rows."""
    shape = (_sequences(x, cu_seqlens), step.shape[3] - 1, *x.shape[2:])
    return x.new_empty(shape, dtype=compute_dtype(x))


_FAKES: Rules = {
    "y": lambda v: v.new_empty(v.shape),
    **dict.fromkeys((f"{name}_final" for name in _MATRICES), _matrix),
    "keys_final": lambda k, step, cu_seqlens: _rows(k, step, cu_seqlens),
    "values_final": lambda v, step, cu_seqlens: _rows(v, step, cu_seqlens),
}
#: (q, k, v, step, theta, keep, gate, weights, momentum, anchor, keys, values, position, cu_seqlens,
#: mini_batch_size, scale) -> (y, weights, momentum, anchor, keys, values)
omega = DifferentiableOp(
    "atlas_linear",
    fakes=_FAKES,
    backward_op=BackwardOp("atlas_linear_backward"),
    formula=lambda *args: _plain(definition, *args),
)
#: As `omega`, with newton_schulz_steps before mini_batch_size.
orthogonal_omega = DifferentiableOp(
    "atlas_orthogonal",
    fakes=_FAKES,
    backward_op=BackwardOp("atlas_orthogonal_backward"),
    formula=lambda *args: definition(*args),
)
