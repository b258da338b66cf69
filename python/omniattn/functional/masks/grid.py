"""Neighborhoods in grids of tokens with one or more dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from omniattn.checks.arguments import require_bool, require_int, shown
from omniattn.encoding.masks import SIZE_BITS, WINDOW_BITS, GridAxis, Rule, Sizes
from omniattn.functional.masks.base import Mask
from omniattn.functional.masks.computed import has_values, lengths_of

T = TypeVar("T", int, bool)


@dataclass(frozen=True)
class GridNeighborhood(Mask):
    """The keys near a query in a grid of tokens, with NATTEN's definition and names.

    Token p is at the coordinates of p in `shape`, row by row. Along each axis a query sees the
    `kernel_size` coordinates around its own; for an even size one more before than after. At the
    ends the window is shifted inwards, not cut, so that every query sees the same number of keys.
    With `is_causal` the window is instead the query's coordinate and the coordinates before it, cut
    at the start. Only coordinates that differ by multiples of `dilation` count. The queries of a
    group of `stride` share the window of their middle one, the right one of two, or if causal of
    their last one, without the keys after each query.

    Args:
        shape: shape of the grid, (length,), (height, width) or (depth, height, width).
        kernel_size, stride, dilation, is_causal: for each axis, or one for all;
            stride <= kernel_size, kernel_size * dilation <= shape.

    Fewer keys than the grid has tokens are its first ones, as when they are generated one by one.

    Hassani et al., Neighborhood Attention Transformer, 2022, arXiv:2204.07143; dilation: Hassani
    and Shi, 2022, arXiv:2209.15001; stride: Hassani et al., Generalized Neighborhood Attention,
    2025, arXiv:2504.16922.
    """

    shape: tuple[int, ...]
    kernel_size: int | tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    dilation: int | tuple[int, ...] = 1
    is_causal: bool | tuple[bool, ...] = False

    def __post_init__(self) -> None:
        self.axes()

    def axes(self) -> list[GridAxis]:
        """Returns the checked rule of each axis."""
        options = self.kernel_size, self.stride, self.dilation, self.is_causal
        return grid_axes("GridNeighborhood", self.shape, *options)

    def rules(self) -> list[Rule]:
        return [axis.rule() for axis in self.axes()]

    def rules_of_call(self, sizes: Sizes, layout: Rule | None = None) -> list[Rule]:
        tokens, tq, tk = math.prod(self.shape), sizes.tq, sizes.tk
        if layout is None and (tk > tokens or tq > tk):
            raise ValueError(
                f"GridNeighborhood: Tq <= Tk <= {tokens} must hold for shape={self.shape}, "
                f"got Tq={tq}, Tk={tk}"
            )
        if layout is not None:
            _, keys = lengths_of(layout, sizes, by_keys=True)
            if isinstance(keys, Tensor) and keys.is_cpu and has_values(keys):
                most = int(keys.max()) if keys.numel() > 0 else 0
                if most > tokens:
                    raise ValueError(
                        f"GridNeighborhood: a sequence must have at most {tokens} keys for "
                        f"shape={self.shape}, got {most}"
                    )
        return self.rules()


GridNeighbourhood = GridNeighborhood  # the former spelling


def grid_axes(
    op: str,
    shape: tuple[int, ...],
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...],
    dilation: int | tuple[int, ...],
    is_causal: bool | tuple[bool, ...],
) -> list[GridAxis]:
    """Returns the checked rule of each axis of a `GridNeighborhood`."""
    if not isinstance(shape, (tuple, list)) or not 1 <= len(shape) <= 8:
        raise TypeError(f"{op}: shape must be 1 to 8 ints, got shape={shown(shape)}")
    for n in shape:
        require_int(op, "shape", n, 1, (1 << SIZE_BITS) - 1)
    kernels = each_axis(op, "kernel_size", kernel_size, len(shape))
    strides = each_axis(op, "stride", stride, len(shape))
    dilations = each_axis(op, "dilation", dilation, len(shape))
    causal = each_axis(op, "is_causal", is_causal, len(shape))
    axes, most = [], (1 << WINDOW_BITS) - 1
    for n, length in enumerate(shape):
        inner = math.prod(shape[n + 1 :])
        require_int(op, "tokens of a step along an axis", inner, 1, (1 << SIZE_BITS) - 1)
        require_int(op, "dilation", dilations[n], 1, most)
        require_int(op, "kernel_size", kernels[n], 1, min(length, most))
        if kernels[n] * dilations[n] > length:
            raise ValueError(
                f"{op}: kernel_size * dilation must be at most the tokens of the axis, "
                f"got kernel_size={kernels[n]}, dilation={dilations[n]}, tokens={length}"
            )
        require_int(op, "stride", strides[n], 1, kernels[n])
        require_bool(op, "is_causal", causal[n])
        axes.append(GridAxis(inner, length, kernels[n], dilations[n], strides[n], causal[n]))
    return axes


def each_axis(op: str, name: str, value: T | tuple[T, ...], axes: int) -> tuple[T, ...]:
    """Returns the values of all axes, given one for all or one per axis."""
    if not isinstance(value, (tuple, list)):
        return (value,) * axes
    if len(value) != axes:
        raise ValueError(f"{op}: {name} must be one value or {axes}, got {name}={shown(value)}")
    return tuple(value)
