"""Checks and helpers for rows of packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import is_traced, shown


def document_ids(position_ids: Tensor) -> Tensor:
    """Returns each token's document index, counted from 0 in each row, from the positions.

    A document starts where a position is not the previous one plus 1. So it may start at any
    position, such as 2 in RoBERTa.

    Args:
        position_ids: (..., T), any integer dtype.

    Returns:
        (..., T), int64, nondecreasing.
    """
    position = position_ids.long()  # unsigned integers would wrap around
    starts = position[..., 1:] != position[..., :-1] + 1
    return torch.nn.functional.pad(starts.cumsum(-1), (position.shape[-1] - starts.shape[-1], 0))


def require_all_tokens(
    op: str, cu_seqlens: Tensor, total: int | None, *, name: str = "cu_seqlens", of: str = "tokens"
) -> bool:
    """Requires that cu_seqlens (N + 1,) grows from 0 to `total`; None accepts any last value.

    Returns False if its values cannot be read here: kernels and definitions then check them.
    """
    if not cu_seqlens.is_cpu or type(cu_seqlens) is not Tensor or is_traced():
        return False
    ends = cu_seqlens.tolist()
    total = ends[-1] if total is None else total
    if ends[0] == 0 and ends[-1] == total and ends == sorted(ends):
        return True
    missed = [
        str(first) if first == last else f"{first} to {last}"
        for first, last in ((0, ends[0] - 1), (ends[-1], total - 1))
        if first <= last
    ]
    without = f", without {of} {' and '.join(missed)}" if ends == sorted(ends) and missed else ""
    raise ValueError(
        f"{op}: {name} must grow from 0 to the number of {of}, {total}, "
        f"got {name}={shown(ends)}{without}"
    )


class Packed:
    """Maps each token of a packed row to its sequence, if sequences are packed."""

    def __init__(self, q: Tensor, count: int, cu_seqlens: Tensor | None) -> None:
        self.count, self.bounds = count, cu_seqlens
        if cu_seqlens is None:
            return
        token = torch.arange(q.shape[1], device=q.device)
        found = torch.searchsorted(cu_seqlens.contiguous(), token, right=True, out_int32=False)
        # Kernels reject tokens outside all sequences if no check could read the boundaries.
        self.index = (found - 1).clamp(0, max(0, count - 1))

    def running_max(self, x: Tensor) -> Tensor:
        """Computes the running maximum over time of (B, T, ...), per sequence if packed.

        Packed sequences take log2(T) passes.
        """
        if self.bounds is None:
            return x.cummax(1).values
        back = 1
        while back < x.shape[1]:
            same = (self.index[back:] == self.index[:-back]).view(1, -1, *[1] * (x.dim() - 2))
            later = torch.maximum(x[:, back:], x[:, :-back])
            x = torch.cat((x[:, :back], torch.where(same, later, x[:, back:])), 1)
            back *= 2
        return x

    def of_tokens(self, x: Tensor) -> Tensor:
        """Expands (N, ...) to the tokens: (B, 1, ...), or (1, T, ...) if packed."""
        if self.bounds is None:
            return x[:, None]
        return x[self.index][None]

    def last(self, x: Tensor, before: Tensor) -> Tensor:
        """Returns each sequence's last token of (B, T, ...), as (N, ...); `before` if empty."""
        if x.shape[1] == 0:
            return before
        if self.bounds is None:
            return x[:, -1]
        first, end = self.bounds[:-1].long(), self.bounds[1:].long()
        found = x[0][(end - 1).clamp(0, x.shape[1] - 1)]
        return torch.where((end > first).view(-1, *[1] * (x.dim() - 2)), found, before)
