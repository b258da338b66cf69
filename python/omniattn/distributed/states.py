"""Recurrences, scans and convolutions whose tokens are split over ranks.

Delta rules, low-rank transitions and scans pass their state from the rank of one chunk to that of
the next, so that the result is that of one process. A rank sends its state and goes on with the
next layer: over a stack of L recurrent layers the ranks work at the same time but for N - 1 of
N + L - 1 steps, and no work is done twice. (The transition of a chunk, K x K, would free the ranks
of each other, at three times the work.)

Where the transition is diagonal, all ranks compute their chunk's own sum of k v^T, one matrix
product, exchange these, and start from the decayed sum of those before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.distributed.layout import Layout
from omniattn.distributed.messages import Gather, Halo, Join, Outbox, Receive, Send
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.recurrence import FEATURE_MAPS as NAMES
from omniattn.reference.precision import compute_dtype
from omniattn.reference.recurrences.recurrence import FEATURE_MAPS
from omniattn.reference.recurrences.scan import WKV_EMPTY


class Passed(NamedTuple):
    """How an op with an initial and a final state is split."""

    tokens: tuple[str, ...]  # arguments (B, T, ...); others of fewer than 3 dimensions have no T
    sequences: tuple[str, ...] = ()  # arguments (N, ...) with a row for each sequence
    empty: tuple[float, ...] = ()  # the state of no tokens, along its second dimension; () for 0


PASSED = {
    "recurrence": Passed(
        ("q", "k", "v", "g", "beta", "a", "b", "min_denominator", "gv"), ("bonus", "skip")
    ),
    "linear_scan": Passed(("x", "g")),
    "rwkv4": Passed(("k", "v"), empty=WKV_EMPTY),
    "exponential_gates": Passed(("g", "i")),
    "slstm": Passed(("x",)),
    "selective_scan": Passed(("u", "delta", "B", "C", "z")),
    "causal_conv1d": Passed(("x",)),
}


@dataclass(frozen=True)
class Packed:
    """The sequences of packed tokens that a chunk has a part of."""

    boundaries: tuple[int, ...]  # of the parts in the chunk
    continues: bool  # the first one began in an earlier chunk
    goes_on: bool  # the last one ends in a later chunk

    @classmethod
    def of(cls, offsets: Sequence[int], start: int, length: int) -> Packed:
        end = start + length
        ends = pairwise(offsets)
        parts = [(a, b) for a, b in ends if max(a, start) < min(b, end)]  # not of empty sequences
        own = (0, *(a - start for a, _ in parts[1:]), length)
        return cls(own, parts[0][0] < start, parts[-1][1] > end)


class States:
    """Runs ops on the chunks of this rank, with the states of the chunks before them."""

    def __init__(self, layout: Layout, offsets: Sequence[int] | None) -> None:
        self.layout, self.offsets, self.outbox = layout, offsets, Outbox()

    def run(self, op: DifferentiableOp, args: Sequence[Any]) -> Any:
        """Returns the op's outputs for this rank's tokens, and the state after its last chunk.

        With packed tokens that is the state of the last sequence, one row as the batch."""
        given = op.schema.by_name(args, {})
        if given["cu_seqlens"] is not None:
            raise NotImplementedError(
                f"{op.name}: in context_parallel cu_seqlens must be given to context_parallel, "
                "with the boundaries in the whole row"
            )
        if self.offsets is not None and given["initial_state"] is not None:
            raise NotImplementedError(
                f"{op.name}: in context_parallel with cu_seqlens initial_state must be None"
            )
        passed = PASSED[op.name]
        length = self.layout.length(given[passed.tokens[0]])
        chunks = [self._chunk(given, passed, n, length) for n in range(self.layout.per_rank)]
        packs = [
            self._pack(given, passed, chunk, own)
            for chunk, own in zip(chunks, self.layout.own, strict=True)
        ]
        if op.name == "causal_conv1d":
            self._add_halos(chunks, packs)
            outs = [op.alone(*chunk.values()) for chunk in chunks]
        elif sums_by_chunk(op, given):
            self._add_sums(chunks, packs)
            outs = [op.alone(*chunk.values()) for chunk in chunks]
        else:
            outs = self._pass_on(op, passed, chunks, packs)
        tokens = [torch.cat(parts, 1) for parts in zip(*(out[:-1] for out in outs), strict=True)]
        final = outs[-1][-1]
        return *tokens, final if self.offsets is None else final[-1:]

    def run_part(self, op: DifferentiableOp, args: Sequence[Any], part: Packed) -> Any:
        """Returns the op's outputs for this rank's only chunk, and the states after the part of
        each sequence in it. The boundaries and states in `args` are those of the part."""
        return self._pass_on(op, PASSED[op.name], [op.schema.by_name(args, {})], [part])[0]

    def _chunk(self, given: dict[str, Any], passed: Passed, n: int, length: int) -> dict[str, Any]:
        """Returns the arguments of the rank's chunk number n."""
        rows = slice(n * length, (n + 1) * length)
        return {
            name: t[:, rows] if name in passed.tokens and t is not None and t.dim() > 2 else t
            for name, t in given.items()
        }

    def _pack(
        self, given: dict[str, Any], passed: Passed, chunk: dict[str, Any], own: int
    ) -> Packed | None:
        """Sets the boundaries of the chunk's sequences."""
        if self.offsets is None:
            return None
        tokens = chunk[passed.tokens[0]]
        length = tokens.shape[1]
        total = length * self.layout.count
        if tokens.shape[0] != 1 or self.offsets[-1] != total:
            raise ValueError(
                "context_parallel: with cu_seqlens the batch must be one row of cu_seqlens[-1] "
                f"tokens, got B={tokens.shape[0]}, T={total}, cu_seqlens[-1]={self.offsets[-1]}"
            )
        pack = Packed.of(self.offsets, own * length, length)
        count = len(pack.boundaries) - 1
        chunk["cu_seqlens"] = torch.tensor(pack.boundaries, device=tokens.device)
        for name in passed.sequences:
            if chunk[name] is not None:  # equal rows
                chunk[name] = chunk[name][:1].expand(count, *chunk[name].shape[1:])
        return pack

    def _pass_on(
        self, op: DifferentiableOp, passed: Passed, chunks: list[Any], packs: list[Packed | None]
    ) -> list[Any]:
        layout, outs = self.layout, []
        state: Any = None
        for own, chunk, pack in zip(layout.own, chunks, packs, strict=True):
            if _follows(own, pack):
                empty = empty_state(op, passed, chunk)
                before = layout.owner(own - 1)
                if before != layout.rank:
                    row = empty if pack is None else empty[:1]
                    anchor = next((t for t in chunk.values() if _needs_gradient(t)), None)
                    state = Receive.apply(anchor, row, layout, self.outbox, before)
                elif pack is not None:
                    state = state[-1:]
                if pack is not None:
                    given = chunk["initial_state"]
                    state = torch.cat((state, (empty if given is None else given)[1:]))
                chunk["initial_state"] = state
            *out, state = op.alone(*chunk.values())
            last = own == layout.count - 1 if pack is None else not pack.goes_on
            after = None if last else layout.owner(own + 1)
            if after is not None and after != layout.rank:
                row = state if pack is None else state[-1:]
                out[0], row = Send.apply(out[0], row, layout, self.outbox, after)
                state = row if pack is None else torch.cat((state[:-1], row))
            outs.append((*out, state))
        return outs

    def _add_halos(self, chunks: list[Any], packs: list[Packed | None]) -> None:
        """Sets the initial states of convolutions, the last rows of the chunk before."""
        rows = chunks[0]["weight"].shape[1] - 1
        length = chunks[0]["x"].shape[1]
        if rows == 0:
            return
        if length < rows:
            raise ValueError(
                "causal_conv1d: in context_parallel a chunk must have K - 1 tokens, "
                f"got {length} tokens, K={rows + 1}"
            )
        xs = [chunk["x"] for chunk in chunks]
        xs, states = rows_before(self.layout, xs, packs, rows, None)
        for chunk, x, state in zip(chunks, xs, states, strict=True):
            chunk["x"] = x
            if state is not None:
                chunk["initial_state"] = state

    def _add_sums(self, chunks: list[Any], packs: list[Packed | None]) -> None:
        """Sets the initial states of recurrences with diagonal transitions."""
        layout = self.layout
        sums, decays = [], []
        for chunk, pack in zip(chunks, packs, strict=True):
            last = 0 if pack is None else pack.boundaries[-2]
            own_sum, decay = _sum(chunk, last)
            if last > 0 or (pack is not None and not pack.continues):  # the sequence begins here
                decay = decay - math.inf
            sums.append(own_sum)
            decays.append(decay)
        first = chunks[0]["initial_state"]
        all_sums = Gather.apply(torch.stack(sums), layout).flatten(0, 1)
        all_decays = Gather.apply(torch.stack(decays), layout).flatten(0, 1)
        at = [layout.gathered.index(c) for c in range(layout.count)]
        for own, chunk, pack in zip(layout.own, chunks, packs, strict=True):
            chunk["v"] = Join.apply(chunk["v"], all_sums, all_decays)
            if not _follows(own, pack):
                continue
            state = torch.zeros_like(sums[0]) if first is None or pack is not None else first
            for c in range(own):
                state = all_decays[at[c]].exp() * state + all_sums[at[c]]
            if pack is not None:
                rest = state.new_zeros(len(pack.boundaries) - 2, *state.shape[1:])
                state = torch.cat((state, rest))
            chunk["initial_state"] = state


def sums_by_chunk(op: DifferentiableOp, given: Mapping[str, Any]) -> bool:
    """Returns True for transitions that are diagonal, of which ranks exchange sums of chunks."""
    return op.name == "recurrence" and not given["delta"] and given["a"] is None


def rows_before(
    layout: Layout,
    chunks: Sequence[Tensor],
    packs: Sequence[Packed | None],
    count: int,
    initial: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Exchanges the last rows of chunks of equal length (B, T, C), T >= count.

    Args:
        packs: sequences of each chunk, or None for a batch.
        initial: (S, C, count), the rows before sequences that begin in a packed chunk, or None for
            zeros.

    Returns:
        the chunks, which from now on wait for the gradients of their rows on other ranks, and for
        each the rows (S, C, count) before its sequences, None if all of them begin in it.
    """
    ends = []
    for x, pack in zip(chunks, packs, strict=True):
        end = x[:, 0 if pack is None else pack.boundaries[-2] :][:, -count:]
        missing = count - end.shape[1]  # of a sequence that began shortly before
        if missing:
            rows = x.new_zeros(1, missing, x.shape[2])
            end = torch.cat((rows if initial is None else initial[-1:].mT[:, -missing:], end), 1)
        ends.append(end)
    joined: list[Tensor] = []
    states: list[Tensor | None] = []
    halos = Halo.apply(torch.stack(ends), layout)
    for own, x, pack, halo in zip(layout.own, chunks, packs, halos, strict=True):
        joined.append(Join.apply(x, halo))
        state = None
        if _follows(own, pack):
            state = halo.mT
            if pack is not None:
                others = len(pack.boundaries) - 2
                rest = state.new_zeros(others, *state.shape[1:])
                state = torch.cat((state, rest if initial is None else initial[1:]))
        states.append(state)
    return joined, states


def _follows(own: int, pack: Packed | None) -> bool:
    """Returns True if a sequence of chunk number `own` began in an earlier one."""
    return own > 0 if pack is None else pack.continues


def _needs_gradient(t: Any) -> bool:
    return isinstance(t, Tensor) and t.requires_grad


def empty_state(op: DifferentiableOp, passed: Passed, chunk: dict[str, Any]) -> Tensor:
    """Returns the states of no tokens, like the op's final states."""
    meta = [t.to("meta") if isinstance(t, Tensor) else t for t in chunk.values()]
    like = op.fake(*meta)[len(op.schema.outputs) - op.private_outputs - 1]
    device = chunk[passed.tokens[0]].device
    state = torch.zeros(like.shape, dtype=like.dtype, device=device)
    if passed.empty:
        state = state + state.new_tensor(passed.empty)[:, None]
    return state


def _sum(chunk: dict[str, Any], last: int) -> tuple[Tensor, Tensor]:
    """Returns the state after a chunk's tokens from `last` on, from zeros, and the logarithm of
    the decay of an earlier state."""
    dtype = compute_dtype(chunk["q"])
    k, v = (chunk[name][:, last:].to(dtype) for name in ("k", "v"))
    k = FEATURE_MAPS[NAMES[chunk["feature_map"]]](k)
    k = k.repeat_interleave(v.shape[2] // max(k.shape[2], 1), 2)
    if chunk["normalize"]:
        v = torch.cat((v, v.new_ones(*v.shape[:3], 1)), -1)
    if chunk["beta"] is not None:
        v = v * chunk["beta"][:, last:, :, None].to(dtype)
    decay = k.new_zeros(())
    for name, axis in (("g", -1), ("gv", -2)):
        g = chunk[name]
        if g is None:
            continue
        g = g[:, last:].to(dtype)
        g = g[..., None] if g.dim() == 3 else g
        rest = _decay_to_end(g)
        k, v = (k * rest, v) if name == "g" else (k, v * rest)
        decay = decay + g.sum(1).unsqueeze(axis)
    state = torch.einsum("bthk,bthv->bhkv", k, v)
    return state, decay.expand(state.shape)


def _decay_to_end(g: Tensor) -> Tensor:
    """Returns the exponentials of the sums of all later rows of log-decays g (B, T, ...).

    Sums within blocks are matrix products, several times as fast as cumsum along T. Decays below
    tiny / eps are 0: products with them would be subnormal numbers, which are slow.
    """
    size = 64
    # Products of 0 and -inf would be NaN; e^-10000 is 0.
    rows = g.clamp(min=-1e4).flatten(2)
    blocks = nnf.pad(rows, (0, 0, 0, -rows.shape[1] % size)).unflatten(1, (-1, size))
    totals = blocks.sum(2, keepdim=True)
    after = nnf.pad(totals.flip(1).cumsum(1).flip(1)[:, 1:], (0, 0, 0, 0, 0, 1))
    later = blocks.new_ones(size, size).triu(1) @ blocks + after
    later = later.flatten(1, 2)[:, : rows.shape[1]]
    limits = torch.finfo(g.dtype)
    least = limits.tiny / limits.eps
    decays = later.clamp(min=math.log(least) - 1).exp()
    return nnf.threshold(decays, least, 0.0).view(g.shape)
