"""Linear layer computed by `functional.linear`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from omniattn import functional
from omniattn.checks.arguments import has_own_ops
from omniattn.modules.base.fields import Backend, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields


class Linear(Layer, nn.Linear):
    """Computes y = x W^T + b.

    A subclass of torch.nn.Linear, so that adapters (PEFT), quantisation and sharding recognise it.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (..., in_features) -> (..., out_features), in the dtype of x.

    Example:
        >>> layer = Linear(Linear.Config(8, 4))
        >>> layer(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes, `init_std` of the normal weights (a bias starts at 0), and the op's `backend`."""

        in_features: Size
        out_features: Size
        bias: bool = False
        init_std: float = 0.02
        backend: Backend = None

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config = c = config  # nn.Linear's constructor calls reset_parameters, which reads it
        nn.Linear.__init__(self, c.in_features, c.out_features, c.bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, init_std^2) and zeroes the bias."""
        if self.drawn_outside:
            return
        nn.init.normal_(self.weight, std=self.config.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x (..., in_features) to (..., out_features)."""
        return functional.linear(x, self.weight, self.bias, backend=self.config.backend)


def is_plain(*layers: Any) -> bool:
    """Returns True if each layer is determined by its weight and bias.

    An op can then read them instead of calling the layer. Adapters, hooks, and quantised or sharded
    weights require a call.
    """
    return all(
        type(layer).forward is Linear.forward
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks)
        and not has_own_ops(layer.weight)
        for layer in layers
    )


def weight_of(layer: Linear) -> torch.Tensor:
    """Returns the effective weight W of a layer without a bias: with adapters, dequantised."""
    if is_plain(layer):
        return layer.weight
    dtype = layer.weight.dtype
    one = torch.eye(layer.in_features, device=layer.weight.device, dtype=dtype)
    transposed: torch.Tensor = layer(one)
    return transposed.T
