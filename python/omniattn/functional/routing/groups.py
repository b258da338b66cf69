"""Losses of routers over the tokens of several ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class _AllReduce(torch.autograd.Function):
    """Sums tensors over ranks; the gradient of each is the sum of those of all ranks' results."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = t.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AllReduce.apply(grads[0], ctx.group), None


class TokenGroups(NamedTuple):
    """Ranks among which the tokens of a loss are divided.

    tokens: group of all these ranks, None for the tokens of one rank.
    sequences: the ranks among them that have other tokens of the same sequences, None if each
        sequence is on one rank.
    """

    tokens: dist.ProcessGroup | None = None
    sequences: dist.ProcessGroup | None = None

    def totals(self, *sums: Tensor) -> list[Tensor]:
        """Returns sums (..., n) over the tokens of all ranks; the first one has gradients."""
        return _totals(sums, self.tokens)

    def totals_of_sequences(self, *sums: Tensor) -> list[Tensor]:
        """Returns sums (..., n) over the tokens of each sequence, as `totals`."""
        return _totals(sums, self.sequences)


def _totals(sums: tuple[Tensor, ...], group: dist.ProcessGroup | None) -> list[Tensor]:
    if group is None:
        return list(sums)
    first, *others = sums
    joined = torch.cat([first, *(t.detach().to(first.dtype) for t in others)], -1)
    total = _AllReduce.apply(joined, group)
    found = list(total.split([t.shape[-1] for t in sums], -1))
    return [found[0], *(t.detach() for t in found[1:])]
