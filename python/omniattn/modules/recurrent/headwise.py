"""Linear layers of heads: each head of channels has a weight of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies x (..., H, inputs) by the weights (H, outputs, inputs) of the heads."""
    return torch.einsum("...hi,hoi->...ho", x, weight.to(x.dtype))


class Headwise(nn.Module):
    """Block-diagonal linear layer without a bias; weight (heads, outputs, inputs).

    Args:
        heads: number of heads.
        n_in, n_out: width of a head of x and of y.
        std: standard deviation of the weight when it is drawn.
        factory: device and dtype of the weight.
    """

    def __init__(self, heads: int, n_in: int, n_out: int, std: float, **factory: Any) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(heads, n_out, n_in, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws a normal weight."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., heads * n_in) to (..., heads, n_out)."""
        return per_head(x.unflatten(-1, (len(self.weight), -1)), self.weight)
