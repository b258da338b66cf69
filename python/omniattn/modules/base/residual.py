"""Residual connections: placement of norms, dropout and stochastic depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_int, require_number, shown, widen
from omniattn.modules.base.dropout import Dropout
from omniattn.modules.base.fields import Probability
from omniattn.modules.base.forms import C, ConfigAlone, OnDevice, either
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.mixer import Norm

PLACEMENTS = ("pre", "post", "sandwich", "post_in_residual")


class DropPath(nn.Module):
    """Stochastic depth: zeroes a sample with probability p and divides the others by 1 - p.

    Philox draws the samples from a seed of torch's generator, so that all devices drop the same
    samples. Active in training mode only.

    Args:
        p: probability of a sample to be zeroed, in [0, 1).

    Shape:
        x (B, ...) -> (B, ...).

    Reference:
        Huang et al., "Deep Networks with Stochastic Depth", 2016, arXiv 1603.09382.

    Example:
        >>> DropPath(0.5).eval()(torch.ones(2, 3)).sum()
        tensor(6.)
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        require_number("DropPath", "p", p, 0, below=1)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (B, ...) to (B, ...)."""
        if self.p == 0.0 or not self.training:
            return x
        factor = functional.dropout(torch.ones(x.shape[0], dtype=x.dtype, device=x.device), self.p)
        return x * factor.view(-1, *(1,) * (x.dim() - 1))

    def extra_repr(self) -> str:
        """Returns the probability, for print(module)."""
        return f"p={self.p}"


class LayerScale(nn.Module):
    """Computes x * weight with a trained factor per channel, which starts at `value`.

    Args:
        dim: width of x.
        value: initial factor.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (..., dim) -> (..., dim).

    Reference:
        Touvron et al., "Going deeper with Image Transformers", 2021, arXiv 2103.17239.

    Example:
        >>> LayerScale(2, 0.1)(torch.ones(1, 2))
        tensor([[0.1000, 0.1000]], grad_fn=...)
    """

    def __init__(
        self,
        dim: int,
        value: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_int("LayerScale", "dim", dim, 1)
        require_number("LayerScale", "value", value, above=0)
        self.value = value
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets all factors to the initial one."""
        nn.init.constant_(self.weight, self.value)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., dim) to (..., dim)."""
        return x * self.weight.to(x.dtype)

    def extra_repr(self) -> str:
        """Returns the width and the initial factor, for print(module)."""
        return f"{self.weight.shape[0]}, value={self.value}"


class _OfLayer(OnDevice):
    layer: nn.Module


class _ByConfig(ConfigAlone[C], _OfLayer): ...


class Residual(nn.Module):
    """Computes x + f(x) with norms placed by `placement`:

    - "pre": x + f(Norm(x)) (GPT-2, Llama; the model ends with a final norm);
    - "post": Norm(x + f(x)) (original Transformer, BERT), with the addition fused into the norm;
    - "sandwich": x + Norm2(f(Norm(x))) (Gemma 2);
    - "post_in_residual": x + Norm(f(x)) (OLMo 2).

    Dropout and DropPath apply to the branch, after its output norm if it has one.

    Args:
        layer: f; forward passes further arguments on to it.
        config: norm, placement and dropout.
        device, dtype: device and dtype of the norms.

    Shape:
        x (..., dim) -> (..., dim).

    Reference:
        Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020, arXiv
        2002.04745; sandwich: Ding et al., "CogView", 2021, arXiv 2105.13290; OLMo 2, 2024, arXiv
        2501.00656.

    Example:
        >>> from omniattn.modules import LayerNorm
        >>> Residual(torch.nn.Identity(), LayerNorm.Config(2), "post")(torch.zeros(1, 2))
        tensor([[0., 0.]], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Norm, placement and dropout of the branch.

        `residual_in_fp32` keeps x and the result in float32 around half-precision layers; x is
        rounded to the dtype of the norm's weight for the branch (Mamba in transformers). Not
        supported with "post", where the norm's output is the residual stream.
        """

        norm: LayerConfig
        placement: str = "pre"
        dropout_p: Probability = 0.0
        drop_path_p: Probability = 0.0
        residual_in_fp32: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            Norm.require_config("Residual", "norm", self.norm)
            if self.placement not in PLACEMENTS:
                raise ValueError(
                    f"Residual: placement must be one of {', '.join(PLACEMENTS)}, "
                    f"got placement={shown(self.placement)}"
                )
            if self.residual_in_fp32 and self.placement == "post":
                raise ValueError(
                    "Residual: residual_in_fp32 must be False if a norm's output is the stream, "
                    "got placement='post'"
                )

    class _Fields(Config, _OfLayer): ...

    @config_or_fields(Config, either(_ByConfig[Config], _Fields).init)
    def __init__(
        self,
        layer: nn.Module,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.norm = config.norm.build(device=device, dtype=dtype)
        if config.placement == "sandwich":
            self.post_norm = config.norm.build(device=device, dtype=dtype)
        self.dropout = Dropout(config.dropout_p)
        self.drop_path = DropPath(config.drop_path_p)

    def extra_repr(self) -> str:
        """Returns the config, for print(module)."""
        return self.config.as_arguments()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Maps x (..., dim) to (..., dim); passes the other arguments on to the layer."""
        placement, y = self.config.placement, x
        if self.config.residual_in_fp32:
            x = widen(x)
            y = x.to(self.norm.weight.dtype)
        if placement in ("pre", "sandwich"):
            y = self.norm(y)
        y = self.layer(y, *args, **kwargs)
        if placement == "sandwich":
            y = self.post_norm(y)
        elif placement == "post_in_residual":
            y = self.norm(y)
        y = self.drop_path(self.dropout(y))
        if placement == "post":
            normed, _ = self.norm(y.to(x.dtype), x)  # keeps the stream's dtype under autocast
            return normed
        return x + y


class ParallelResidual(nn.Module):
    """Computes x + f1(Norm(x)) + f2(Norm(x)) + ...: parallel layers on one norm (GPT-J, Cohere).

    Args:
        layers: f1, f2, ..., each from (..., dim) to (..., dim).
        norm: config of the norm.
        device, dtype: device and dtype of the norm.

    Shape:
        x (..., dim) -> (..., dim).

    Reference:
        Wang and Komatsuzaki, "GPT-J-6B", 2021; Chowdhery et al., "PaLM", 2022, arXiv 2204.02311.

    Example:
        >>> from omniattn.modules import LayerNorm
        >>> block = ParallelResidual([torch.nn.Identity()] * 2, LayerNorm.Config(2))
        >>> block(torch.zeros(1, 2)).shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        norm: LayerConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        Norm.require_config("ParallelResidual", "norm", norm)
        self.norm = norm.build(device=device, dtype=dtype)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., dim) to (..., dim)."""
        y = self.norm(x)
        for layer in self.layers:
            x = x + layer(y)
        return x
