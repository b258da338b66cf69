"""Initial values of RWKV parameters."""

from __future__ import annotations

import torch
from torch import Tensor


def ramp(count: int, last: bool = False) -> Tensor:
    """Returns n / count for n < count, or with `last` n / (count - 1), which ends at 1."""
    n = torch.arange(count, dtype=torch.float64)
    return n / (max(count - 1, 1) if last else count)


def zigzag(count: int) -> Tensor:
    """Returns 0, 1, -1, 0, 1, -1, ..."""
    return (torch.arange(count) + 1) % 3 - 1.0


def rank_of(factor: float, dim: int) -> int:
    """Returns the multiple of 32 nearest to factor * sqrt(dim), at least 32."""
    return max(32, round(factor * dim**0.5 / 32) * 32)
