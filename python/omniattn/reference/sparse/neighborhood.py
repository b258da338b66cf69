"""Neighborhood attention on grids of tokens, by NATTEN's rule, axis by axis."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from omniattn.reference.attention.attention import attention

Ints = int | Sequence[int]
Bools = bool | Sequence[bool]


def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """query (B,Y,X,H,D), key (B,Y,X,Hkv,D), value (B,Y,X,Hkv,Dv) -> O (B,Y,X,H,Dv) [, lse].

    `na1d` has one axis in place of Y and X, `na3d` three. A token sees the tokens whose coordinates
    are in its window along every axis. A window has the `kernel_size` nearest coordinates at
    multiples of `dilation` from its own, shifted inwards at the ends of the axis; if causal, only
    coordinates up to its own. `stride` coordinates share the window of their middle one, or of
    their last one if causal.
    """
    shape = query.shape[1:-2]
    each = [
        option if isinstance(option, Sequence) else (option,) * len(shape)
        for option in (kernel_size, stride, dilation, is_causal)
    ]
    axes = [_axis(n, *options) for n, *options in zip(shape, *each, strict=True)]
    mask = functools.reduce(torch.kron, axes).bool().to(query.device)
    last = len(shape)
    q, k, v = (t.flatten(1, last) for t in (query, key, value))
    out, lse = attention(q, k, v, mask=mask, scale=scale, return_lse=True)
    out, lse = out.unflatten(1, shape), lse.transpose(1, 2).unflatten(1, shape)
    return (out, lse) if return_lse else out


def _axis(length: int, kernel: int, stride: int, dilation: int, causal: bool) -> Tensor:
    """Returns a matrix (length, length): 1 where coordinate y (row) sees z (column), else 0."""
    seen = torch.zeros(length, length)
    for y in range(length):
        line = list(range(y % dilation, length, dilation))  # coordinates at multiples of dilation
        place = line.index(y)
        group = range(place - place % stride, min(place - place % stride + stride, len(line)))
        if causal:
            window = line[max(group[-1] - kernel + 1, 0) : place + 1]
        else:
            middle = min(group[0] + stride // 2, len(line) - 1)
            first = min(max(middle - kernel // 2, 0), len(line) - kernel)
            window = line[first : first + kernel]
        seen[y, window] = 1
    return seen


#: One definition: the query's shape gives the number of axes.
na1d = na3d = na2d
