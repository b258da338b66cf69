"""Linear layer of ternary weights and 8-bit inputs."""

from dataclasses import dataclass

import torch

from omniattn import functional
from omniattn.modules.base.fields import Epsilon
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import RMSNorm


class BitLinear(Linear):
    """Computes y = Q(norm(x)) Q(W)^T + b with ternary weights and inputs of 8 bits.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (..., in_features) -> (..., out_features), in the dtype of x. Parameters weight
        (out_features, in_features), norm.weight (in_features,) and bias (out_features,).

    Reference:
        See functional.bit_linear.

    Example:
        >>> BitLinear(in_features=8, out_features=4)(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """

    @dataclass(frozen=True)
    class Config(Linear.Config):
        """Sizes and options, as of Linear, and the norm's eps."""

        norm_eps: Epsilon = 1e-8

    class _Fields(Config, OnDevice): ...

    config: Config

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        norm = RMSNorm.Config(config.in_features, config.norm_eps, backend=config.backend)
        self.norm = RMSNorm(norm, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x (..., in_features) to (..., out_features)."""
        c = self.config
        return functional.bit_linear(
            *(x, self.weight, self.bias, self.norm.weight), eps=c.norm_eps, backend=c.backend
        )
