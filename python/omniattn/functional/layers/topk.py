"""Stable top-k."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    implementation,
    require_bool,
    require_device,
    require_float,
    require_int,
    require_shape,
)
from omniattn.ops import topk as ops

__all__ = ["top_k"]


def top_k(
    scores: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    sorted_by_index: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the k largest scores of each row; unlike torch.topk, with a defined order of ties.

    ``values[0] >= values[1] >= ...``, and of equal scores the smaller index comes first

    Args:
        scores: (..., n), float64, float32, bfloat16 or float16, any strides.
        k: in [0, n].
        mask: (..., n) bool, False for elements that cannot be selected, or None.
        sorted_by_index: return the k elements in the order of their indices instead, -1 last, so
            that gathers read memory in order.
        backend: None for the native kernel of the device, "cpu" to insist on it, "reference" for
            the eager definition.

    Returns:
        values (..., k) of the scores' dtype, index (..., k) int64. If a row has fewer than k
        selectable elements, the missing ones have index -1 and value -inf.

    Raises:
        TypeError: scores that are not floating point, a mask that is not bool.
        ValueError: a k, shape or device that does not fit.
        NotImplementedError: no native kernel for the device.

    Note:
        -0 equals +0, and NaN is less than -inf. The gradient of a value flows to its score; the
        index has none.

    Example:
        >>> top_k(torch.tensor([1.0, 3.0, 2.0, 3.0]), 3)
        (tensor([3., 3., 2.]), tensor([1, 3, 2]))
    """
    op = "top_k"
    require_float(op, "scores", scores)
    require_int(op, "k", k)
    if scores.dim() == 0 or not 0 <= k <= scores.shape[-1]:
        raise ValueError(
            f"{op}: scores must have shape (..., n) with 0 <= k <= n, "
            f"got scores.shape={tuple(scores.shape)}, k={k}"
        )
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = getattr(mask, "dtype", type(mask).__name__)
            raise TypeError(f"{op}: mask must be a bool tensor, got {got}")
        require_shape(op, "mask", mask, scores.shape)
        require_device(op, "mask", mask, scores, "scores")
    require_bool(op, "sorted_by_index", sorted_by_index)
    index = implementation(op, backend, scores, ops.top_k)(scores.detach(), k, mask)
    if sorted_by_index:
        n = scores.shape[-1]
        index = index.masked_fill(index < 0, n).sort(-1).values
        index = index.masked_fill(index == n, -1)
    values = scores.gather(-1, index.clamp(min=0))
    return (values if mask is None else values.masked_fill(index < 0, -torch.inf)), index
