"""Linear layer on `functional.linear`."""

from dataclasses import dataclass

import torch
from torch import nn

from omniattn import functional
from omniattn.modules import _signatures
from omniattn.modules.layer import Layer, LayerConfig, config_or_fields


class Linear(Layer):
    """y = x W^T + b.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (..., in_features) -> (..., out_features), in the dtype of x.

    Example:
        >>> layer = Linear(Linear.Config(8, 4))
        >>> layer(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes; `init_std` of the normal weights (a bias starts at 0); `backend` of the op."""

        in_features: int
        out_features: int
        bias: bool = False
        init_std: float = 0.02
        backend: str | None = None

    @config_or_fields(Config, _signatures.Linear)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.out_features, config.in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        bias = torch.empty(config.out_features, device=device, dtype=dtype)
        self.bias = nn.Parameter(bias) if config.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, init_std^2) and zeroes the bias."""
        if self.drawn_outside:
            return
        nn.init.normal_(self.weight, std=self.config.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in_features) -> (..., out_features)."""
        return functional.linear(x, self.weight, self.bias, backend=self.config.backend)
