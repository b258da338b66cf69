"""Batch invariance: rows of a result have the same bits whatever else is in the call."""

from __future__ import annotations

from dataclasses import replace

import torch

from omniattn import config
from omniattn.testing.spec import Call, Case, OpSpec

__all__ = ["batch_invariant"]

#: Sizes of the first dimension of batched tensors: sequences, or rows.
_LETTERS = ("B", "M")

#: Options whose results depend on the index of a row.
_INDEXED = {"dropout_p", "score_mod"}


def batch_invariant(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Rows of a call have the bits of calls with fewer rows, with `config.batch_invariant`."""
    letter = next((name for name in _LETTERS if case.sizes.get(name)), None)
    if not spec.batch_invariant or letter is None or "cu_seqlens" in case.tensors:
        return
    # No other size may equal the number of rows, by which batched tensors are told apart.
    count = next(n for n in (7, 11, 13, 17, 19, 23) if n not in case.sizes.values())
    call = spec.call(case.resized({**case.sizes, letter: count}), dtype)
    parts = [slice(0, 1), slice(0, 2), slice(0, count - 1)]
    if not _INDEXED & set(case.options):
        parts.append(slice(count - 1, count))
    with config.batch_invariant():
        whole = call.run(spec.function)
        for rows in parts:
            found = _rows_of(call, count, rows).run(spec.function)
            for output, part in zip(whole, found, strict=True):
                if output.ndim and output.shape[0] == count:
                    torch.testing.assert_close(
                        part, output[rows], rtol=0, atol=0, equal_nan=True, msg=str(rows)
                    )


def _rows_of(call: Call, count: int, rows: slice) -> Call:
    """Returns the call with these rows of its batched tensors."""
    tensors = {
        name: t[rows] if t.ndim and t.shape[0] == count else t for name, t in call.tensors.items()
    }
    return replace(call, tensors=tensors)
