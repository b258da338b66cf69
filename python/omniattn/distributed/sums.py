"""Recurrences with diagonal transitions whose tokens are split over ranks.

The state after a chunk is that before it, decayed, plus a sum over the chunk's tokens. All ranks
compute the sums of their chunks, which is a small part of the recurrence, exchange them, and run
their chunks from the states before them. In the backward they exchange sums of the chunks'
gradients likewise. No rank waits for the recurrence of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from omniattn.distributed.layout import Layout, Packed
from omniattn.distributed.messages import gather
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.recurrence import decayed_sum
from omniattn.reference.precision import compute_dtype
from omniattn.reference.recurrences.recurrence import divisor

#: Arguments with a row for each token, and for each sequence.
TOKENS = ("q", "k", "v", "g", "beta", "gv")
SEQUENCES = ("bonus", "skip")


def sums_by_chunk(op: DifferentiableOp, given: Mapping[str, Any]) -> bool:
    """Returns True for transitions that are diagonal."""
    return op.name == "recurrence" and not given["delta"] and given["a"] is None


def run_by_sums(
    layout: Layout, packs: Sequence[Packed | None], op: DifferentiableOp, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns the outputs for this rank's tokens, and the state after its last chunk.

    Args:
        packs: sequences of each of the rank's chunks, or None for a batch.
        given: arguments of the op with all tokens of the rank.
    """
    if given["normalize"]:
        return _normalized(layout, packs, op, given)
    chunks = _Chunks.of(layout, packs, given)
    with torch.no_grad():
        sums, decays = _exchanged_sums(chunks, given)
    first = given["initial_state"]
    joined = given | {name: chunks.joined(given[name]) for name in TOKENS}
    joined |= {name: chunks.by_sequence(given[name]) for name in SEQUENCES}
    joined["cu_seqlens"] = chunks.boundaries
    joined["initial_state"] = states = sums.new_zeros(chunks.rows, *sums.shape[2:])
    for own, chunk in zip(layout.own, chunks.parts, strict=True):
        if chunk.follows or first is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and own == 0):
                state = torch.zeros_like(sums[0]) if first is None else first
                for c in range(own):
                    state = decays[c] * state + sums[c]
            states[chunk.first] = state
    o, final = op.alone(*joined.values())
    o = o.view(given["v"].shape)
    inputs = (given[name] for name in ("q", "g", "gv"))
    how = {name: given[name] for name in ("scale", "feature_map")}
    how["before_own"] = given["bonus"] is not None
    o, final = _Later.apply(o, final, first, chunks, how, decays, *inputs)
    return o, final[chunks.parts[-1].last]


def _normalized(
    layout: Layout, packs: Sequence[Packed | None], op: DifferentiableOp, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Runs a recurrence whose outputs are divided by the sums of their weights.

    The sums are outputs of values 1, so that their gradients pass through the states, too.
    """
    v, least = given["v"], given["min_denominator"]
    wide = {"v": torch.cat((v, v.new_ones(*v.shape[:3], 1)), -1), "fp32_output": True}
    wide |= {"normalize": False, "min_denominator": None, "scale": 1.0}
    o, final = run_by_sums(layout, packs, op, given | wide)
    o, weights = o[..., :-1], o[..., -1:]
    divisors = divisor(weights, None if least is None else least[..., None], given["eps"])
    o = given["scale"] * (o / divisors)
    return o if given["fp32_output"] else o.to(v.dtype), final


class _Chunk(NamedTuple):
    """Places of a chunk among the rank's tokens, and among the rows of states of its call."""

    tail: slice  # tokens of the last sequence in the chunk
    head: slice  # tokens of the first one
    follows: bool  # the first one began in an earlier chunk
    goes_on: bool  # the last one ends in a later chunk
    passes: bool  # one sequence came in, and is the last one
    first: slice  # rows of the first sequence; of a batch those of the chunk
    last: slice  # rows of the last one


class _Chunks(NamedTuple):
    """This rank's chunks as the sequences of one call."""

    layout: Layout
    parts: list[_Chunk]
    rows: int  # number of sequences
    boundaries: Tensor | None  # of packed sequences

    @classmethod
    def of(
        cls, layout: Layout, packs: Sequence[Packed | None], given: Mapping[str, Any]
    ) -> _Chunks:
        q = given["q"]
        count, length, batch = layout.per_rank, layout.length(q), q.shape[0]
        parts, boundaries = [], [0]
        for n, (own, pack) in enumerate(zip(layout.own, packs, strict=True)):
            start, end = n * length, (n + 1) * length
            if pack is None:
                every, rows = slice(start, end), slice(n, None, count)
                last = own + 1 == layout.count
                parts.append(_Chunk(every, every, own > 0, not last, True, rows, rows))
                continue
            row, one = len(boundaries) - 1, len(pack.boundaries) == 2
            boundaries += [start + b for b in pack.boundaries[1:]]
            parts.append(
                _Chunk(
                    slice(start + pack.boundaries[-2], end),
                    slice(start, start + pack.boundaries[1]),
                    pack.continues,
                    pack.goes_on,
                    pack.continues and one,
                    slice(row, row + 1),
                    slice(len(boundaries) - 2, len(boundaries) - 1),
                )
            )
        if packs[0] is None:
            return cls(layout, parts, batch * count, None)
        found = torch.tensor(boundaries, device=q.device)
        return cls(layout, parts, len(boundaries) - 1, found)

    def joined(self, t: Tensor | None) -> Tensor | None:
        """Returns tokens (B, T, ...) as those of the sequences of the call."""
        if t is None or self.boundaries is not None:
            return t
        return t.unflatten(1, (len(self.parts), -1)).flatten(0, 1)

    def by_sequence(self, t: Tensor | None) -> Tensor | None:
        """Returns rows (N, ...) of whole sequences for those of the call, of which packed ones have
        equal rows."""
        if t is None or self.boundaries is None:
            return t if t is None else t.repeat_interleave(len(self.parts), 0)
        return t[:1].expand(self.rows, *t.shape[1:])


def _decayed_sum(
    given: Mapping[str, Any], tokens: slice, k: Tensor, v: Tensor, beta: Tensor | None, *how: bool
) -> tuple[Tensor, Tensor]:
    """Returns the sum over some tokens, and the decay of a state over them, which both
    broadcast to (B, H, K, V)."""
    g, beta, gv = (t if t is None else t[:, tokens] for t in (given["g"], beta, given["gv"]))
    if g is not None and g.dim() == 3:
        g = g[..., None]
    k, v = k[:, tokens], v[:, tokens]
    run: Any = decayed_sum if k.is_cpu else decayed_sum.formula
    total, decay, of_values = run(k, v, g, beta, gv, given["feature_map"], *how)
    decay = decay[..., None]
    return total, decay if gv is None else decay * of_values[..., None, :]


def _exchanged_sums(chunks: _Chunks, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the sums of all chunks, and the decays of the state before them.

    Those of a chunk whose last sequence ends in it are zeros, since no one reads them.
    """
    k, v = given["k"], given["v"]
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=compute_dtype(v))
    nothing = state, state if given["gv"] is not None else state[..., :1]
    own = []
    for part in chunks.parts:
        total, decay = nothing
        if part.goes_on:
            total, decay = _decayed_sum(given, part.tail, k, v, given["beta"], False, False)
        decay = decay if part.passes else torch.zeros_like(decay)
        own.append(torch.cat((total.flatten(2), decay.flatten(2)), 2))
    found = chunks.layout.by_chunk(gather(torch.stack(own), chunks.layout))
    parts = found.split([t[0, 0].numel() for t in nothing], -1)
    sums, decays = (p.unflatten(-1, t.shape[2:]) for p, t in zip(parts, nothing, strict=True))
    return sums, decays


class _Later(torch.autograd.Function):
    """Returns outputs and final states; to the gradients of states come those of later chunks.

    The recurrence of a chunk then finds the gradients of its own arguments.
    """

    @staticmethod
    def forward(
        ctx: Any,
        o: Tensor,
        final: Tensor,
        first: Tensor | None,
        chunks: _Chunks,
        how: dict[str, Any],
        *saved: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*saved)
        ctx.chunks, ctx.how = chunks, how
        ctx.first = None if first is None else first.detach()
        return o.view_as(o), final.view_as(final)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_o, grad_final = grads[0].contiguous(), grads[1].clone()
        decays, q, g, gv = ctx.saved_tensors
        chunks, how = ctx.chunks, ctx.how
        layout, given = chunks.layout, how | {"g": g, "gv": gv}
        own = []
        for part in chunks.parts:
            grad = torch.zeros_like(grad_final[part.last])
            if part.follows:
                grad, decay = _decayed_sum(
                    given, part.head, q, grad_o, None, True, how["before_own"]
                )
                grad *= how["scale"]
                if part.passes:
                    grad += decay * grad_final[part.last]
            own.append(grad)
        every = layout.by_chunk(gather(torch.stack(own), layout))
        for c, part in zip(layout.own, chunks.parts, strict=True):
            later = torch.zeros_like(every[0])
            for n in reversed(range(c + 1, layout.count)):
                later = every[n] + decays[n] * later
            grad_final[part.last] += later
        # The first state has its gradient from the rank of the first chunk.
        grad_first = None if ctx.first is None else torch.zeros_like(ctx.first)
        return grad_o, grad_final, grad_first, *[None] * 6
