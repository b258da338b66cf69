"""Rotary tables of a model, computed once per forward pass and shared by its layers."""

from dataclasses import dataclass

import torch
from torch import nn

from omniattn import functional
from omniattn.reference import RopeScaling


class RotaryEmbedding(nn.Module):
    """cos and sin of p * theta_i, theta_i = base^(-2i / rotary_dim), possibly scaled.

    The tables are computed from the positions in fp64 at each call. There is no buffer, so
    `module.to(torch.bfloat16)` cannot round the angles.

    Args:
        config: `rotary_dim` (even, at most the head size), `base`, `scaling` of long contexts.

    Shape:
        positions (T,) or (B, T) int -> cos, sin (T, rotary_dim / 2) or (B, T, rotary_dim / 2) fp32.

    Reference:
        Su et al., "RoFormer", 2021, arXiv 2104.09864.

    Example:
        >>> cos, sin = RotaryEmbedding(RotaryEmbedding.Config(4))(torch.arange(3))
        >>> cos.shape
        torch.Size([3, 2])
    """

    @dataclass(frozen=True)
    class Config:
        """Frequencies of the rotation."""

        rotary_dim: int
        base: float = 10000.0
        scaling: RopeScaling | None = None

        def __post_init__(self) -> None:
            if self.rotary_dim <= 0 or self.rotary_dim % 2:
                raise ValueError(
                    "RotaryEmbedding: rotary_dim must be positive and even, "
                    f"got rotary_dim={self.rotary_dim}"
                )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (T,) or (B, T) -> cos, sin (..., T, rotary_dim / 2)."""
        c = self.config
        theta = functional.rope_frequencies(
            c.rotary_dim, base=c.base, scaling=c.scaling, device=positions.device
        )
        return functional.rotary_tables(theta, positions)

    def extra_repr(self) -> str:
        """The frequencies, for print(module)."""
        return f"{self.config.rotary_dim}, base={self.config.base:g}"
