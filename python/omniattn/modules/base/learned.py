"""Learned activations, xIELU and PolyNorm, and dynamic tanh in place of a norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_float, require_number, widen
from omniattn.modules.base.fields import Backend, Epsilon, Positive, Signed, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.base.mixer import Norm


class DynamicTanh(Norm):
    """Computes y = w tanh(alpha x) + b with one learned alpha, in place of a norm (DyT).

    Args:
        config: size and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (..., dim) -> (..., dim). With `residual` (..., dim): (y of h, h), h = x + residual, in
        float32 if the residual is. Parameters alpha (1,), weight (dim,), bias (dim,).

    Reference:
        Zhu et al., Transformers without Normalization, 2025, arXiv 2503.10622; equal to LigerDyT.

    Example:
        >>> DynamicTanh(dim=2)(torch.tensor([[0.0, 100.0]]))
        tensor([[0., 1.]], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Size and options.

        Args:
            dim: size of the last dimension.
            alpha: initial alpha.
            bias: True to add a bias.
        """

        dim: Size
        alpha: Positive = 0.5
        bias: bool = True

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(c.dim, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if c.bias:
            self.bias = nn.Parameter(torch.empty(c.dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets alpha to the config's, the weight to 1 and the bias to 0."""
        nn.init.constant_(self.alpha, self.config.alpha)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Maps x (..., dim) to y, or (y, x + residual) when a residual is given."""
        require_float("DynamicTanh", "x", x)
        h = x if residual is None else x + residual
        y = self.weight * torch.tanh(self.alpha * widen(h))
        y = (y if self.bias is None else y + self.bias).to(x.dtype)
        return y if residual is None else (y, h)


class XIELU(Layer):
    """Computes y = a x^2 + beta x for x > 0, else b (e^min(x, eps) - 1 - x) + beta x.

    ``a = softplus(alpha_p)`` and ``b = beta + softplus(alpha_n)`` are learned.

    Args:
        config: options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (...) -> (...). Parameters alpha_p, alpha_n (1,).

    Reference:
        Huang and Schlag, Deriving Activation Functions Using Integration, 2024, arXiv 2411.13010;
        equal to transformers' XIELUActivation (Apertus).

    Example:
        >>> XIELU()(torch.tensor([1.0, 2.0]))
        tensor([1.3000, 4.2000], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Options.

        Args:
            alpha_p: initial a.
            alpha_n: initial b, greater than beta.
            beta: slope at 0.
            eps: largest exponent, in (-1, 0).
        """

        alpha_p: Positive = 0.8
        alpha_n: Positive = 0.8
        beta: Positive = 0.5
        eps: Signed = -1e-6

        def __post_init__(self) -> None:
            super().__post_init__()
            require_number("XIELU", "alpha_n", self.alpha_n, above=self.beta)
            require_number("XIELU", "eps", self.eps, above=-1.0, below=0.0)

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.alpha_p = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.alpha_n = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets a and b to the config's."""
        c = self.config
        nn.init.constant_(self.alpha_p, math.log(math.expm1(c.alpha_p)))
        nn.init.constant_(self.alpha_n, math.log(math.expm1(c.alpha_n - c.beta)))

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (...) to (...)."""
        require_float("XIELU", "x", x)
        c, wide = self.config, widen(x)
        a = nn.functional.softplus(widen(self.alpha_p))
        b = c.beta + nn.functional.softplus(widen(self.alpha_n))
        below = b * (torch.expm1(wide.clamp(max=c.eps)) - wide)
        return (torch.where(wide > 0, a * wide * wide, below) + c.beta * wide).to(x.dtype)


class PolyNorm(Layer):
    """Computes y = w_0 norm(x^3) + w_1 norm(x^2) + w_2 norm(x) + b, norm(u) = u / rms(u).

    Args:
        config: options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (..., dim) -> (..., dim). Parameters weight (3,), bias ().

    Reference:
        Zhuo et al., Polynomial Composition Activations, 2024, arXiv 2411.03884; equal to
        LigerPolyNorm.

    Example:
        >>> PolyNorm()(torch.tensor([[2.0, 2.0]]))
        tensor([[2., 2.]], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Options.

        Args:
            eps: added to the mean squares.
            backend: backend of the norms.
        """

        eps: Epsilon = 1e-6
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
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weights to 1/3 and the bias to 1."""
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.ones_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., dim) to (..., dim)."""
        require_float("PolyNorm", "x", x)
        c, wide = self.config, widen(x)
        powers = (wide * wide * wide, wide * wide, wide)
        norms = (functional.rms_norm(p, eps=c.eps, backend=c.backend) for p in powers)
        y = self.bias + sum(w * norm for w, norm in zip(self.weight, norms, strict=True))
        return y.to(x.dtype)
