"""Recurrences, scans and convolutions whose tokens are split over ranks.

Delta rules, low-rank transitions and scans pass their state from the rank of one chunk to that of
the next, so that the result is that of one process. A rank sends its state and goes on with the
next layer: over a stack of L recurrent layers the ranks work at the same time but for N - 1 of
N + L - 1 steps, and no work is done twice. (The transition of a chunk, K x K, would free the ranks
of each other, at three times the work.)

Where the transition of a recurrence is diagonal, ranks exchange sums of their chunks (sums.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn.distributed.layout import Layout, Packed
from omniattn.distributed.messages import Halo, Join, Outbox, Receive, Send
from omniattn.distributed.sums import run_by_sums, sums_by_chunk
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.reference.recurrences.scan import WKV_EMPTY


class Passed(NamedTuple):
    """How an op with an initial and a final state is split."""

    tokens: tuple[str, ...]  # arguments (B, T, ...); others of fewer than 3 dimensions have no T
    sequences: tuple[str, ...] = ()  # arguments (N, ...) with a row for each sequence
    empty: tuple[float, ...] = ()  # the state of no tokens, along its second dimension; () for 0
    filters: str = ""  # argument (..., K) of a convolution, whose state is the last K - 1 rows of x


PASSED = {
    "recurrence": Passed(
        ("q", "k", "v", "g", "beta", "a", "b", "min_denominator", "gv"), ("bonus", "skip")
    ),
    "linear_scan": Passed(("x", "g")),
    "rwkv4": Passed(("k", "v"), empty=WKV_EMPTY),
    "exponential_gates": Passed(("g", "i")),
    "slstm": Passed(("x",)),
    "selective_scan": Passed(("u", "delta", "B", "C", "z")),
    "causal_conv1d": Passed(("x",), filters="weight"),
    "dynamic_conv1d": Passed(("x", "taps"), filters="taps"),
}


class States:
    """Runs ops on the chunks of this rank, with the states of the chunks before them."""

    def __init__(self, layout: Layout, offsets: Sequence[int] | None) -> None:
        self.layout, self.offsets, self.outbox = layout, offsets, Outbox()
        self.steps = 1  # of a recurrence for each token

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
        first = given[passed.tokens[0]]
        length = self.layout.length(first)
        packs = [self._packed(first, own, length) for own in self.layout.own]
        if sums_by_chunk(op, given):
            o, final = run_by_sums(self.layout, packs, op, given)
            return o, self._of_last(op, passed, given, final)
        chunks = [self._chunk(given, passed, n, length) for n in range(self.layout.per_rank)]
        for chunk, pack in zip(chunks, packs, strict=True):
            _set_sequences(chunk, passed, pack)
        if passed.filters:
            self._add_halos(op.name, chunks, packs, given[passed.filters].shape[-1] - 1)
            outs = [op.alone(*chunk.values()) for chunk in chunks]
        else:
            outs = self._pass_on(op, passed, chunks, packs)
        tokens = [torch.cat(parts, 1) for parts in zip(*(out[:-1] for out in outs), strict=True)]
        final = outs[-1][-1]
        if self.offsets is not None:
            final = self._of_last(op, passed, given, final[-1:])
        return *tokens, final

    def _of_last(
        self, op: DifferentiableOp, passed: Passed, given: dict[str, Any], final: Tensor
    ) -> Tensor:
        """Returns the state after the last sequence; chunks do not have an empty one."""
        ends, layout = self.offsets, self.layout
        if ends is None or ends[-1] > ends[-2] or layout.own[-1] + 1 < layout.count:
            return final
        empty = empty_state(op, passed, given)[:1]
        return torch.where(final.new_zeros((), dtype=torch.bool), final, empty)

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

    def _packed(self, tokens: Tensor, own: int, length: int) -> Packed | None:
        """Returns the sequences of chunk number `own`."""
        if self.offsets is None:
            return None
        total, offsets = length * self.layout.count, [self.steps * n for n in self.offsets]
        if tokens.shape[0] != 1 or offsets[-1] != total:
            raise ValueError(
                "context_parallel: with cu_seqlens the batch must be one row of cu_seqlens[-1] "
                f"tokens, got B={tokens.shape[0]}, T={total // self.steps}, "
                f"cu_seqlens[-1]={self.offsets[-1]}"
            )
        return Packed.of(offsets, own * length, length)

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

    def _add_halos(self, op: str, chunks: list[Any], packs: list[Packed | None], rows: int) -> None:
        """Sets the initial states of convolutions, the last rows of the chunk before."""
        length = chunks[0]["x"].shape[1]
        if rows == 0:
            return
        if length < rows:
            raise ValueError(
                f"{op}: in context_parallel a chunk must have K - 1 tokens, "
                f"got {length} tokens, K={rows + 1}"
            )
        xs = [chunk["x"] for chunk in chunks]
        xs, states = rows_before(self.layout, xs, packs, rows, None)
        for chunk, x, state in zip(chunks, xs, states, strict=True):
            chunk["x"] = x
            if state is not None:
                chunk["initial_state"] = state


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
    halos = Halo.apply(torch.stack(ends), layout, 1)
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


def _set_sequences(chunk: dict[str, Any], passed: Passed, pack: Packed | None) -> None:
    """Sets the boundaries of a chunk's sequences, and the arguments with a row for each of them."""
    if pack is None:
        return
    count = len(pack.boundaries) - 1
    device = chunk[passed.tokens[0]].device
    chunk["cu_seqlens"] = torch.tensor(pack.boundaries, device=device)
    for name in passed.sequences:
        if chunk[name] is not None:  # equal rows
            chunk[name] = chunk[name][:1].expand(count, *chunk[name].shape[1:])


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
