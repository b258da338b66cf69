"""Masks with global tokens and representatives, converted to blocks for the size of each call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import require_bool, require_choice, require_int, shown
from omniattn.encoding.masks import Sizes
from omniattn.functional.masks.base import Mask
from omniattn.functional.masks.computed import Computed


class OfPositions(Computed):
    """A mask that depends only on the positions of query and key."""

    def sees(self, i: Tensor, k: Tensor) -> Tensor:
        """Returns bool (..., rows, Tk) for positions i (..., rows, 1) and k (Tk,)."""
        raise NotImplementedError

    def pairs(self, sizes: Sizes, queries: tuple[int, int] | None = None) -> Tensor:
        return self.sees(sizes.positions(queries), torch.arange(sizes.tk, device=sizes.device))

    def by_keys(self) -> bool:
        return False

    def of_sequence(self, n: int, tq: int, tk: int) -> Mask:
        return self

    def _device(self) -> torch.device:
        return torch.device("cpu")


def index_tuple(op: str, name: str, index: Any) -> tuple[Any, ...]:
    """Converts a sequence of positions to a tuple."""
    try:
        return tuple(index)
    except TypeError:
        raise TypeError(
            f"{op}: {name} must be a tuple of ints, got {name}={shown(index)}"
        ) from None


def require_global_tokens(op: str, index: Any, every: Any, names: tuple[str, str]) -> None:
    """Checks the arguments of `GlobalTokens`; `names` are the caller's names."""
    name, every_name = names
    if not isinstance(index, tuple):
        raise TypeError(f"{op}: {name} must be a tuple of ints, got {name}={shown(index)}")
    for position in index:
        require_int(op, name, position, 0)
    if len(set(index)) < len(index):
        raise ValueError(f"{op}: {name} must name no token twice, got {name}={shown(index)}")
    if every is not None:
        require_int(op, every_name, every, 1)
    if not index and every is None:
        raise ValueError(
            f"{op}: {name} or {every_name} must be given, got {name}=(), {every_name}=None"
        )


def require_representatives(op: str, window: Any, stride: Any, anchor: Any, levels: Any) -> None:
    """Checks the arguments of `Representatives`."""
    require_int(op, "window", window, 0)
    require_int(op, "stride", stride, 1)
    require_choice(op, "anchor", anchor, ("relative", "absolute"))
    if levels is None:
        return
    if anchor != "relative":
        raise ValueError(f"{op}: levels need the relative anchor, got anchor={shown(anchor)}")
    pairs = isinstance(levels, tuple) and all(
        isinstance(level, tuple) and len(level) == 2 for level in levels
    )
    if not pairs:
        raise TypeError(f"{op}: levels must be a tuple of pairs, got levels={shown(levels)}")
    for count, each in levels:
        require_int(op, "the count of levels", count, 1)
        require_int(op, "the stride of levels", each, 1)


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
        require_global_tokens("GlobalTokens", self.index, self.every, ("index", "every"))
        require_bool("GlobalTokens", "queries", self.queries)

    def among(self, positions: Tensor) -> Tensor:
        """Returns bool, True for positions of global tokens."""
        found = torch.isin(positions, torch.tensor(self.index, device=positions.device).long())
        if self.every is None:
            return found
        return found | ((positions % self.every == 0) & (positions >= 0))

    def sees(self, i: Tensor, k: Tensor) -> Tensor:
        key = self.among(k).expand(*i.shape[:-1], -1)
        return key | self.among(i) if self.queries else key


@dataclass(frozen=True)
class Representatives(OfPositions):
    """Single keys that represent the keys before the window of `window` keys before the query.

    They are anchored to the query, i - window - stride m for m = 1, 2, ..., or "absolute", the last
    keys of the blocks of `stride`. `levels` = ((n1, s1), (n2, s2), ...), for the relative anchor,
    is a pyramid in place of one stride: n1 at distances of s1, before them n2 at distances of s2.
    """

    window: int
    stride: int
    anchor: str = "relative"
    levels: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        require_representatives(
            "Representatives", self.window, self.stride, self.anchor, self.levels
        )

    def distances(self) -> list[int]:
        """Returns the distances of the representatives of `levels` from the window."""
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
