"""Tokens of sequences (B, T, ..), also packed ones, of which `ends` holds 0 and the ends."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["first_tokens", "last_tokens", "previous_tokens"]


def first_tokens(x: Tensor, ends: Tensor | None) -> Tensor:
    """Returns the entries (N, ..) of the first token of each sequence, any of an empty one."""
    return x[:, 0] if ends is None else x[0, ends[:-1].clamp(max=x.shape[1] - 1)]


def last_tokens(x: Tensor, ends: Tensor | None) -> Tensor:
    """Returns the entries (N, ..) of the last token of each sequence, zeros of an empty one."""
    if x.shape[1] == 0:
        return x.sum(1) if ends is None else x.new_zeros(len(ends) - 1, *x.shape[2:])
    if ends is None:
        return x[:, -1]
    return _of_others(x[0, (ends[1:] - 1).clamp(min=0)], ends)


def previous_tokens(x: Tensor, ends: Tensor | None, first: Tensor | None = None) -> Tensor:
    """Returns the entries of the token before each; those of a first one are in `first` (N, ..),
    or zeros."""
    if x.shape[1] == 0:
        return x
    zero = torch.zeros_like(x[:, :1])
    if ends is None:
        return torch.cat((zero if first is None else first[:, None], x[:, :-1]), 1)
    inside = 1 - torch.isin(torch.arange(x.shape[1], device=x.device), ends).to(x.dtype)
    moved = torch.cat((zero, x[:, :-1]), 1) * inside.view(-1, *[1] * (x.dim() - 2))
    if first is None:
        return moved
    starts = ends[:-1].clamp(max=x.shape[1] - 1)
    return moved.index_add(1, starts, _of_others(first, ends)[None])


def _of_others(x: Tensor, ends: Tensor) -> Tensor:
    """Puts zeros in place of the entries (N, ..) of empty sequences."""
    return x * (ends.diff() > 0).view(-1, *[1] * (x.dim() - 1))
