"""Dropout with identical masks on all devices."""

import torch
from torch import nn

from omniattn import functional


class Dropout(nn.Module):
    """Zeroes elements with probability p and divides the others by 1 - p, in training mode only.

    Philox draws the mask from a seed of torch's generator, so that all devices drop the same
    elements. Only the seed is saved for the backward pass. See omniattn.functional.dropout.

    Args:
        p: probability of an element to be zeroed, in [0, 1].

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
        """Maps x (...) to (...)."""
        return functional.dropout(x, self.p, training=self.training)

    def extra_repr(self) -> str:
        """Returns the probability, for print(module)."""
        return f"p={self.p}"
