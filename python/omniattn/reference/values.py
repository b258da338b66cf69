"""Checks of values in definitions: kernels check the values that their memory accesses depend on,
and definitions refuse the same ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch


def require_values(error: str, holds: Tensor) -> None:
    """Raises RuntimeError(error) unless all of `holds` (bool) is True.

    Graphs keep the check, torch.func and vmap run it, and a GPU is not synchronised.
    """
    while not torch.compiler.is_compiling() and _functorch.is_functorch_wrapped_tensor(holds):
        holds = _functorch.get_unwrapped(holds)
    torch._assert_async(holds.all(), error)


def require_all_rows(
    op: str,
    cu_seqlens: Tensor,
    rows: int,
    *,
    name: str = "cu_seqlens",
    limit: str = "the number of tokens",
) -> None:
    """Requires that cu_seqlens (N + 1,) grows from 0 to `rows`, which errors name `limit`."""
    ends = cu_seqlens.long()  # unsigned integers would wrap around
    grows = (ends[1:] >= ends[:-1]).all() & (ends[0] == 0) & (ends[-1] == rows)
    require_values(f"{op}: {name} must grow from 0 to {limit}", grows)


def sequence_count(op: str, x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Number of sequences in x (B, T, ..): B, or those of the one packed row."""
    if cu_seqlens is None:
        return x.shape[0]
    require_all_rows(op, cu_seqlens, x.shape[1])
    return cu_seqlens.shape[0] - 1
