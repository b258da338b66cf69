"""Calls whose tokens are split over ranks, as `omniattn.distributed.context_parallel` makes them."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

__all__ = ["Region", "current", "require_whole"]


class Region(TorchFunctionMode):
    """Calls in which a rank has some of the tokens of each sequence.

    A mode of torch, so that calls outside cost nothing: checks that take the shortest way to an op
    already ask for modes, and differentiable ops pass their calls to them.
    """

    @abstractmethod
    def require(self, op: str) -> None:
        """Raises unless the function or layer named `op` gives its result for split sequences."""

    @abstractmethod
    def positions(self, count: int, device: torch.device) -> Tensor:
        """Returns the positions (count,) of this rank's tokens in their sequences."""

    @abstractmethod
    def before(self, t: Tensor) -> Tensor:
        """Returns for each token of t (B, T, ...) the row of the token before it, 0 at starts."""


def current() -> Region | None:
    """Returns the region of the call, or None."""
    if is_compiling() or torch._C._len_torch_function_stack() == 0:
        return None
    modes = reversed(_get_current_function_mode_stack())
    return next((mode for mode in modes if isinstance(mode, Region)), None)


def require_whole(op: str) -> None:
    """Raises in a region in which `op`, which mixes tokens, would see only some of them."""
    region = current()
    if region is not None:
        region.require(op)
