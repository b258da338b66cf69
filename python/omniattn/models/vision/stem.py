"""Convolutional stem: patch embedding by convolutions of stride 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class ConvStem(nn.Module):
    """Halves the image once per width: 3 x 3 convolution, BatchNorm, ReLU; then 1 x 1 to dim.

    Args:
        channels: of the images.
        widths: channels after each 3 x 3 convolution.
        dim: width of the tokens.
        factory: device and dtype of the parameters.

    Shape:
        images (B, channels, H, W) -> (B, H / 2^n, W / 2^n, dim) with n widths.
    """

    def __init__(self, channels: int, widths: Sequence[int], dim: int, **factory: Any) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in widths:
            layers += [
                nn.Conv2d(channels, width, 3, 2, 1, bias=False, **factory),
                nn.BatchNorm2d(width, **factory),
                nn.ReLU(),
            ]
            channels = width
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, dim, 1, **factory))

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (B, channels, H, W) to tokens (B, h, w, dim)."""
        y: Tensor = self.layers(images).permute(0, 2, 3, 1)
        return y.contiguous()
