"""Masks of `xformers.ops.fmha.attn_bias`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from omniattn.checks.arguments import require_int
from omniattn.functional.masks import SlidingWindow

Bias = TypeVar("Bias", bound="AttentionBias")


class Window(NamedTuple):
    """Keys that a query sees: at most `left` before it and `right` after it, -1 for all."""

    left: int = -1
    right: int = -1
    top_left: bool = False

    def mask(self) -> SlidingWindow | None:
        """Returns the mask of `functional.attention`."""
        return None if self.left == self.right == -1 else SlidingWindow(*self)

    def allowed(self, queries: int, keys: int) -> Tensor:
        """Returns the pairs that see each other, (queries, keys) bool."""
        shift = 0 if self.top_left else keys - queries
        ones = torch.ones(queries, keys, dtype=torch.bool)
        after = ones if self.right < 0 else ones.tril(shift + self.right)
        return after if self.left < 0 else after & ones.triu(shift - self.left)


def causal(window_size: int | None = None, *, top_left: bool = False) -> Window:
    """Returns the window of a causal mask, of the last `window_size` keys if given."""
    return Window(-1 if window_size is None else window_size - 1, 0, top_left)


class AttentionBias:
    """Base class of masks, the `attn_bias` of :func:`memory_efficient_attention`."""

    def window(self) -> Window:
        """Returns the keys that a query sees within its sequence."""
        return Window()

    def materialize(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Returns the mask as a tensor (..., queries, keys), 0 where allowed and else -inf."""
        return bias_of(self.window().allowed(*shape[-2:]), dtype, device).expand(shape)

    def to(self: Bias, device: torch.device | str) -> Bias:
        """Returns the mask with its tensors on a device."""
        moved = {n: t.to(device) for n, t in vars(self).items() if hasattr(t, "to")}
        found = object.__new__(type(self))
        vars(found).update(vars(self), **moved)
        return found


class LowerTriangularMask(AttentionBias):
    """Causal mask, aligned with the first query and the first key; `device` has no effect."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        pass

    def window(self) -> Window:
        return causal(top_left=True)

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """Returns this mask with an additive bias."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal mask, with a bias (B, H, Tq, Tk) that is added to the logits."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def materialize(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Keys from `window_left` before to `window_right` after a query, aligned at the last ones."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        for name in ("window_left", "window_right"):
            require_int(type(self).__name__, name, getattr(self, name), 0)

    def window(self) -> Window:
        return Window(self.window_left, self.window_right)


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal mask, aligned with the last query and the last key."""

    def window(self) -> Window:
        return causal()

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Returns this mask with a window."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal mask of the last `_window_size` keys, aligned with the last query and key."""

    _window_size: int

    def __post_init__(self) -> None:
        require_window(self, self._window_size)

    def window(self) -> Window:
        return causal(self._window_size)


def bias_of(allowed: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns 0 where allowed and else -inf."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return zeros.masked_fill_(~allowed.to(device), -torch.inf)


def require_window(mask: Any, window_size: int) -> None:
    """Requires a window of at least one key."""
    require_int(type(mask).__name__, "window_size", window_size, 1)
