"""Linear layer."""

import torch

from omniattn.reference.precision import widen


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + b, x (..., K), weight (N, K), bias (N,) -> (..., N)."""
    y = widen(x) @ widen(weight).mT
    if bias is not None:
        y = y + widen(bias)
    return y.to(x.dtype)
