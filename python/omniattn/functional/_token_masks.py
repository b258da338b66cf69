"""Masks of single tokens that many see: they become blocks for the size of each call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omniattn.functional._checks import require_bool, require_choice, require_int, shown
from omniattn.functional._computed_mask import Computed


class OfPositions(Computed):
    """A mask that follows from the positions of a query and a key."""

    def sees(self, i: Tensor, k: Tensor) -> Tensor:
        """Bool (rows, Tk) of positions i (rows, 1) and k (Tk,)."""
        raise NotImplementedError

    def pairs(
        self,
        tq: int,
        tk: int,
        device: torch.device,
        heads: int,
        queries: tuple[int, int] | None = None,
    ) -> Tensor:
        rows = slice(0, tq) if queries is None else slice(*queries)
        i = torch.arange(tq, device=device)[rows, None] + tk - tq
        return self.sees(i, torch.arange(tk, device=device))

    def _device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True)
class GlobalTokens(OfPositions):
    """All pairs whose key is a global token or, with `queries`, whose query is one.

    The global tokens are the positions `index` and the multiples of `every`; i = q + Tk - Tq is the
    position of query q. Beltagy et al., Longformer, 2020, arXiv:2004.05150.
    """

    index: tuple[int, ...] = ()
    every: int | None = None
    queries: bool = True

    def __post_init__(self) -> None:
        op = "GlobalTokens"
        if not isinstance(self.index, tuple):
            raise TypeError(f"{op}: index must be a tuple of ints, got index={shown(self.index)}")
        for position in self.index:
            require_int(op, "index", position, 0)
        if len(set(self.index)) < len(self.index):
            raise ValueError(f"{op}: index must name no token twice, got index={shown(self.index)}")
        if self.every is not None:
            require_int(op, "every", self.every, 1)
        if not self.index and self.every is None:
            raise ValueError(f"{op}: index or every must be given, got index=(), every=None")
        require_bool(op, "queries", self.queries)

    def among(self, positions: Tensor) -> Tensor:
        """Whether these are global tokens."""
        found = torch.isin(positions, torch.tensor(self.index, device=positions.device).long())
        if self.every is None:
            return found
        return found | ((positions % self.every == 0) & (positions >= 0))

    def sees(self, i: Tensor, k: Tensor) -> Tensor:
        key = self.among(k).expand(i.shape[0], -1)
        return key | self.among(i) if self.queries else key


@dataclass(frozen=True)
class Representatives(OfPositions):
    """Single keys that stand for those before the window of `window` keys before the query.

    They are anchored to the query, i - window - stride m for m = 1, 2, ..., or "absolute", the last
    keys of the blocks of `stride`. `levels` = ((n1, s1), (n2, s2), ...), for the relative anchor,
    is a pyramid in place of one stride: n1 at distances of s1, before them n2 at distances of s2.
    """

    window: int
    stride: int
    anchor: str = "relative"
    levels: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        op = "Representatives"
        require_int(op, "window", self.window, 0)
        require_int(op, "stride", self.stride, 1)
        require_choice(op, "anchor", self.anchor, ("relative", "absolute"))
        if self.levels is None:
            return
        if self.anchor != "relative":
            raise ValueError(f"{op}: levels need the relative anchor, got anchor={self.anchor!r}")
        pairs = isinstance(self.levels, tuple) and all(
            isinstance(level, tuple) and len(level) == 2 for level in self.levels
        )
        if not pairs:
            raise TypeError(f"{op}: levels must be a tuple of pairs, got levels={self.levels!r}")
        for count, stride in self.levels:
            require_int(op, "the count of levels", count, 1)
            require_int(op, "the stride of levels", stride, 1)

    def distances(self) -> list[int]:
        """From the window to the representatives of `levels`."""
        found, at = [], 0
        for count, stride in self.levels or ():
            found += [at + stride * m for m in range(1, count + 1)]
            at = found[-1]
        return found

    def sees(self, i: Tensor, k: Tensor) -> Tensor:
        before = i - self.window - k
        if self.levels is not None:
            return torch.isin(before, torch.tensor(self.distances(), device=k.device).long())
        last = (k + 1 if self.anchor == "absolute" else before) % self.stride == 0
        return (before > 0) & last
