"""Elementwise random numbers by index (philox.py): dropout and uniform numbers."""

import torch

from omniattn.reference.layers import philox
from omniattn.reference.precision import widen


def dropout(x: torch.Tensor, p: float = 0.5, *, seed: torch.Tensor | None = None) -> torch.Tensor:
    """x / (1 - p) where word(seed, n) >= floor(p 2^32), else 0; n is the element's flat index."""
    if p == 0.0:
        return x
    seed = philox.new_seed() if seed is None else seed
    keep = philox.elementwise_keep(x.shape, p, seed).to(x.device)
    scale = 1 / (1 - p) if p < 1 else 0.0
    return torch.where(keep, widen(x) * scale, 0.0).to(x.dtype)


def uniform_like(x: torch.Tensor, *, seed: torch.Tensor) -> torch.Tensor:
    """Returns uniform fp32 numbers in [0, 1) of x's shape: each word's upper 24 bits / 2^24."""
    return philox.uniform(x.numel(), seed).view(x.shape).to(x.device)
