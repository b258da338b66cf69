"""Dropout whose bits are the same on every device."""

import torch
from torch import nn

from omniattn import functional


class Dropout(nn.Module):
    """Zeroes elements with probability p and divides the others by 1 - p, in training mode only.

    Philox chooses them, from a seed drawn from torch's generator: the same on every device. Only
    the seed is kept for the backward. See omniattn.functional.dropout.

    Args:
        p: in [0, 1].

    Shape:
        x (...) -> (...).

    Reference:
        Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR
        2014.

    Example:
        >>> Dropout(0.5).eval()(torch.ones(3))
        tensor([1., 1., 1.])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"Dropout: p must be in [0, 1], got p={p}")
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (...) -> (...)."""
        return functional.dropout(x, self.p, training=self.training)

    def extra_repr(self) -> str:
        """The probability, for print(module)."""
        return f"p={self.p}"
