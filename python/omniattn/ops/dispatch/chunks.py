"""The definition of a recurrence in chunks of tokens, each of which starts from a state.

Second and forward-mode derivatives evaluate one chunk after another (pieces.py). They hold the
states before all chunks and the graph of one chunk, in place of all states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from omniattn.ops.dispatch.names import Schema
from omniattn.ops.dispatch.pieces import Index, Piece, Pieces
from omniattn.reference.vmap import require_not_mapped

__all__ = ["TOKENS", "in_chunks"]

#: Number of tokens of a chunk.
TOKENS = 32


def in_chunks(
    name: str,
    formula: Callable[..., tuple[Tensor, Tensor]],
    over_time: Sequence[str],
    of_sequences: Sequence[str] = (),
    tokens: Callable[[dict[str, Any]], int] = lambda _: TOKENS,
) -> Callable[..., Pieces | None]:
    """Returns the pieces of an op with arguments `initial_state` and `cu_seqlens`, whose outputs
    are y and the final state.

    Args:
        name: name of the op.
        formula: the op in plain torch, a function of its arguments.
        over_time: arguments (B, T, ..); y is such a tensor, too.
        of_sequences: arguments (N, ..), besides the initial state.
        tokens: number of tokens of a chunk, a function of the arguments by name.
    """
    schema = Schema(name)
    inputs = schema.tensors
    state_at = inputs.index("initial_state")

    def pieces_of(*args: Any) -> Pieces | None:
        values = schema.by_name(args, {})
        batch, length = values[over_time[0]].shape[:2]
        size = tokens(values)
        if length <= size or batch == 0:
            return None
        cu_seqlens = values["cu_seqlens"]
        if cu_seqlens is not None:
            require_not_mapped(name, "cu_seqlens", cu_seqlens)
        others = {n: values[n] for n in schema.arguments if n not in inputs}
        sliced = {
            n for n in over_time if values[n] is not None and values[n].dim() > 2
        }  # B and C of a selective scan may be the same for all tokens

        def run(first: bool, last: bool, *parts: Any) -> tuple[Tensor, Tensor, Tensor]:
            *given, state = parts
            if not first:
                given[state_at] = state
            named = dict(zip(inputs, given, strict=True)) | others | {"cu_seqlens": None}
            y, state = formula(*(named[n] for n in schema.arguments))
            return y, state if last else state[:0], state

        def reads(rows: slice, sequence: slice, before: Index) -> tuple[Index, ...]:
            places: dict[str, Index] = {n: (_ALL, rows) for n in sliced}
            places |= {n: (sequence,) for n in (*of_sequences, "initial_state")}
            return (*(places.get(n, ()) for n in inputs), before)

        pieces = []
        for slot, (rows, sequence, first, last) in enumerate(_chunks(cu_seqlens, length, size)):
            before, after = ((slice(i, i + 1),) for i in (slot, slot + 1))
            adds_to = ((_ALL, rows), (sequence if last else slice(0, 0),), after)
            function = partial(_with_slot, partial(run, first, last))
            pieces.append(Piece(function, reads(rows, sequence, before), adds_to))
        with torch.no_grad():  # one token, for the shapes and dtypes
            one = reads(slice(0, 1), slice(0, 1) if cu_seqlens is not None else _ALL, ())
            tensors = [values[n] for n in inputs]
            parts = (None if t is None else t[at] for t, at in zip(tensors, one, strict=False))
            y, state, _ = run(True, True, *parts, None)
        rows_of_states = state.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shapes = (
            (values[over_time[0]].shape[:2] + y.shape[2:], y.dtype),
            (torch.Size((rows_of_states, *state.shape[1:])), state.dtype),
            (torch.Size((len(pieces) + 1, *state.shape)), state.dtype),
        )
        return Pieces(tuple(pieces), shapes, carried=(2,))

    return pieces_of


_ALL = slice(None)


def _with_slot(run: Callable[..., tuple[Tensor, Tensor, Tensor]], *parts: Any) -> Any:
    """Calls `run` with the state of the slot that is the last of `parts`."""
    *given, slot = parts
    y, final, state = run(*given, slot[0])
    return y, final, state[None]


def _chunks(
    cu_seqlens: Tensor | None, length: int, size: int
) -> Iterator[tuple[slice, slice, bool, bool]]:
    """Yields the tokens of each chunk, its sequence, and whether it is its first and its last."""
    ends = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    for n in range(len(ends) - 1):
        sequence = _ALL if cu_seqlens is None else slice(n, n + 1)
        starts = range(ends[n], max(ends[n + 1], ends[n] + 1), size)
        for at in starts:
            rows = slice(at, min(at + size, ends[n + 1]))
            yield rows, sequence, at == starts[0], at == starts[-1]
