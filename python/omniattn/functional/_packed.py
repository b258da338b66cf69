"""Rows of packed sequences: what a function over time asks of them."""

from __future__ import annotations

import torch
from torch import Tensor


def document_ids(position_ids: Tensor) -> Tensor:
    """Number of the document of each token, counted from 0 in each row, by its position.

    A document starts where the count breaks: where a position is not the one before it plus 1. So
    it may start at any position, like those of RoBERTa, which start at 2.

    Args:
        position_ids: (..., T), any integer dtype.

    Returns:
        (..., T), int64, in order.
    """
    position = position_ids.long()  # unsigned integers would wrap around
    starts = position[..., 1:] != position[..., :-1] + 1
    return torch.nn.functional.pad(starts.cumsum(-1), (position.shape[-1] - starts.shape[-1], 0))


class Packed:
    """Which sequence each token of a packed row is in, where they are packed."""

    def __init__(self, q: Tensor, count: int, cu_seqlens: Tensor | None) -> None:
        self.count, self.bounds = count, cu_seqlens
        if cu_seqlens is None:
            return
        token = torch.arange(q.shape[1], device=q.device)
        # -1 and `count` before the first and after the last sequence
        self.found = (
            torch.searchsorted(cu_seqlens.contiguous(), token, right=True, out_int32=False) - 1
        )
        self.inside = (self.found >= 0) & (self.found < count)
        self.index = self.found.clamp(0, max(0, count - 1))

    def cleared(self, x: Tensor) -> Tensor:
        """(B, T, ...), 0 for tokens of no sequence."""
        if self.bounds is None:
            return x
        return torch.where(self.inside.view(1, -1, *[1] * (x.dim() - 2)), x, 0)

    def running_max(self, x: Tensor) -> Tensor:
        """Over time, (B, T, ...), within each sequence: in log2(T) sweeps where there are some."""
        if self.bounds is None:
            return x.cummax(1).values
        back = 1
        while back < x.shape[1]:
            same = (self.found[back:] == self.found[:-back]).view(1, -1, *[1] * (x.dim() - 2))
            later = torch.maximum(x[:, back:], x[:, :-back])
            x = torch.cat((x[:, :back], torch.where(same, later, x[:, back:])), 1)
            back *= 2
        return x

    def of_tokens(self, x: Tensor) -> Tensor:
        """(N, ...) for each token: (B, 1, ...) or (1, T, ...)."""
        if self.bounds is None:
            return x[:, None]
        if self.count == 0:  # no token is of a sequence
            return x.new_zeros(1, *self.index.shape, *x.shape[1:])
        return x[self.index][None]

    def last(self, x: Tensor, before: Tensor) -> Tensor:
        """(N, ...): of (B, T, ...) the last token of each sequence, and `before` of empty ones."""
        if x.shape[1] == 0:
            return before
        if self.bounds is None:
            return x[:, -1]
        first, end = self.bounds[:-1].long(), self.bounds[1:].long()
        found = x[0][(end - 1).clamp(0, x.shape[1] - 1)]
        return torch.where((end > first).view(-1, *[1] * (x.dim() - 2)), found, before)
