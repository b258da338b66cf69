"""Where the tokens of a sequence are: chunks of equal length, some on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Order: TypeAlias = Literal["zigzag", "contiguous"]


@dataclass(frozen=True)
class Layout:
    """The chunks of rank r of N are r ("contiguous"), or r and 2N - 1 - r ("zigzag").

    Causal attention to a chunk costs in proportion to its number, so that in zigzag order all ranks
    have the same work.
    """

    group: dist.ProcessGroup
    order: Order

    @cached_property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def per_rank(self) -> int:
        """Number of chunks of a rank."""
        return 2 if self.order == "zigzag" else 1

    @property
    def count(self) -> int:
        """Number of chunks of a sequence."""
        return self.per_rank * self.ranks

    def of(self, rank: int) -> tuple[int, ...]:
        """Returns the chunks of a rank, in the order of its tokens."""
        return (rank, 2 * self.ranks - 1 - rank) if self.order == "zigzag" else (rank,)

    @cached_property
    def own(self) -> tuple[int, ...]:
        return self.of(self.rank)

    def owner(self, chunk: int) -> int:
        """Returns the rank that has a chunk."""
        return min(chunk, 2 * self.ranks - 1 - chunk) if self.order == "zigzag" else chunk

    def global_rank(self, rank: int) -> int:
        """Returns the number of a rank in the default group."""
        return dist.get_global_rank(self.group, rank % self.ranks)

    def length(self, t: Tensor, dim: int = 1) -> int:
        """Returns the length of a chunk; t has the tokens of this rank."""
        size = t.shape[dim]
        if size % self.per_rank:
            raise ValueError(
                f"context_parallel: in zigzag order ranks have an even number of tokens, got {size}"
            )
        return size // self.per_rank

    @cached_property
    def gathered(self) -> list[int]:
        """The chunks in the order of the ranks."""
        return [chunk for rank in range(self.ranks) for chunk in self.of(rank)]

    def shard(self, t: Tensor, dim: int) -> Tensor:
        """Returns a copy of this rank's part of whole sequences."""
        parts = t.chunk(self.count, dim)
        return torch.cat([parts[c] for c in self.own], dim)

    def natural(self, t: Tensor, dim: int) -> Tensor:
        """Sorts the tokens of all ranks, joined in the order of the ranks, by position."""
        if self.per_rank == 1:
            return t
        parts = t.chunk(self.count, dim)
        return torch.cat([parts[self.gathered.index(c)] for c in range(self.count)], dim)

    def by_rank(self, t: Tensor, dim: int) -> Tensor:
        """Inverts `natural`."""
        if self.per_rank == 1:
            return t
        parts = t.chunk(self.count, dim)
        return torch.cat([parts[c] for c in self.gathered], dim)

    def by_chunk(self, t: Tensor) -> Tensor:
        """Returns t (ranks, chunks of a rank, ...) as (chunks, ...), in the order of the chunks."""
        return t.flatten(0, 1)[[self.gathered.index(c) for c in range(self.count)]]

    def starts(self, length: int) -> list[int]:
        """Returns the first positions of this rank's chunks of `length` tokens."""
        return [c * length for c in self.own]

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Returns the positions (count,) of this rank's tokens."""
        n = count // self.per_rank
        return torch.cat([torch.arange(s, s + n, device=device) for s in self.starts(n)])


@dataclass(frozen=True)
class Packed:
    """The sequences of packed tokens that a chunk has a part of."""

    boundaries: tuple[int, ...]  # of the parts in the chunk
    continues: bool  # the first one began in an earlier chunk
    goes_on: bool  # the last one ends in a later chunk

    @classmethod
    def of(cls, offsets: Sequence[int], start: int, length: int) -> Packed:
        end = start + length
        ends = pairwise(offsets)
        parts = [(a, b) for a, b in ends if max(a, start) < min(b, end)]  # not of empty sequences
        own = (0, *(a - start for a, _ in parts[1:]), length)
        return cls(own, parts[0][0] < start, parts[-1][1] > end)
