"""Parts shared by memories that descend a loss, one mini-batch of tokens after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf
from torch.utils.checkpoint import checkpoint

__all__ = ["accumulate", "count_sequences", "lean", "parts"]


def parts(place: int, steps: int, size: int) -> Iterator[tuple[int, int, int, bool, bool]]:
    """Yields (first token, last, mini-batches, starts, ends) of runs of equal mini-batches."""
    t = 0
    if place > 0 and steps > 0:
        t = min(size - place, steps)
        yield 0, t, 1, False, place + t == size
    if whole := (steps - t) // size:
        yield t, t + whole * size, whole, True, True
        t += whole * size
    if t < steps:
        yield t, steps, 1, True, False


def accumulate(step: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Solves ``x_t = keep_t x_{t-1} + sum_j step_tj y_{t+j}`` for C tokens.

    Returns W (..., C, C + J - 1) and d (..., C, 1) of ``x = W y + d x_0``, from step (..., C, J)
    and keep (..., C).
    """
    size = keep.shape[-1]
    row = step.new_zeros(*keep.shape[:-1], size + step.shape[-1] - 1)
    share = torch.ones_like(keep[..., :1])
    rows, shares = [], []
    for t in range(size):
        gate = keep[..., t : t + 1]
        row = gate * row + nnf.pad(step[..., t, :], (t, size - 1 - t))
        share = gate * share
        rows.append(row)
        shares.append(share)
    return torch.stack(rows, -2), torch.stack(shares, -2)


def count_sequences(
    op: str, x: Tensor, cu_seqlens: Tensor | None, states: Mapping[str, Tensor | None]
) -> int:
    """Returns the number of sequences, of which each of the states must have one row."""
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if cu_seqlens is not None and (x.shape[0] != 1 or count < 0):
        raise ValueError(f"{op}: packed v must have a batch of 1, got v.shape={tuple(x.shape)}")
    for name, t in states.items():
        if t is not None and t.shape[0] != count:
            raise ValueError(
                f"{op}: {name} must have {count} rows, got {name}.shape={tuple(t.shape)}"
            )
    return count


def lean(function: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """Calls `function`, of which autograd keeps the arguments alone; it runs again in the backward.

    Under torch.func, which forbids hooks of saved tensors, autograd keeps what is inside as well.
    """
    forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if forbidden is not None or not torch.is_grad_enabled():
        return function(*args)
    found: tuple[Tensor, ...] = checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False
    )
    return found
