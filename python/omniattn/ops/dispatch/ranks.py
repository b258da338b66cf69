"""Calls whose tokens are split over ranks, see `omniattn.distributed.context_parallel`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

__all__ = ["ACTIVE", "Region", "require_whole"]


class Region(ABC):
    """Calls in which a rank has some of the tokens of each sequence."""

    @abstractmethod
    def run(self, op: Any, args: tuple[Any, ...]) -> Any:
        """Runs a differentiable op on this rank's tokens."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Computes `functional.attention` of this rank's queries."""

    @abstractmethod
    def require(self, op: str) -> None:
        """Raises unless the function or layer named `op` gives its result for split sequences."""

    @abstractmethod
    def positions(self, count: int, device: torch.device) -> Tensor:
        """Returns the positions (count,) of this rank's tokens in their sequences."""

    @abstractmethod
    def length(self, count: int) -> int:
        """Returns the number of tokens of a sequence of which this rank has `count`."""

    @abstractmethod
    def unshard(self, t: Tensor, dim: int = 1) -> Tensor:
        """Returns all tokens of t, whose `dim` has those of this rank; gradients go back."""

    @abstractmethod
    def before(self, t: Tensor) -> Tensor:
        """Returns for each token of t (B, T, ...) the row of the token before it, 0 at starts."""

    @abstractmethod
    def after(self, t: Tensor) -> Tensor:
        """Returns for each token of t (B, T, ...) the row of the token after it, 0 at ends."""

    @abstractmethod
    def sums(self, t: Tensor) -> Tensor:
        """Returns for each token the sum of t (B, T, ...) over its sequence so far."""

    @abstractmethod
    def several(self, steps: int) -> AbstractContextManager[None]:
        """Returns a context in which recurrences have so many steps for each token."""

    @abstractmethod
    def first(self, t: Tensor) -> Tensor | None:
        """Returns for each token of packed t (1, T, ...) the row of its sequence's first token,
        without gradients; None for a batch of sequences."""


class _Active:
    """The region of the process; not of a thread, since layers are recomputed on autograd's."""

    region: Region | None = None


ACTIVE = _Active()


def require_whole(op: str) -> None:
    """Raises in a region in which `op`, which mixes tokens, would see only some of them."""
    if ACTIVE.region is not None:
        ACTIVE.region.require(op)
