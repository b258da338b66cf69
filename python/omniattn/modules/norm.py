"""RMSNorm and LayerNorm on their functionals; a residual can be added in the same pass."""

from dataclasses import dataclass

import torch
from torch import nn

from omniattn import functional

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """y = x (offset + w) / sqrt(mean(x^2) + eps) over the last dimension.

    Args:
        config: size and options; `offset=1` with `weight` starting at 0 is Gemma's form.
        device, dtype: of the weight.

    Shape:
        x (..., dim) -> (..., dim). With `residual` (..., dim): (norm(h), h), h = x + residual.

    Reference:
        Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.

    Example:
        >>> RMSNorm(RMSNorm.Config(4))(torch.ones(1, 4))
        tensor([[1.0000, 1.0000, 1.0000, 1.0000]], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config:
        """Size and options of the norm."""

        dim: int
        eps: float = 1e-6
        offset: float = 0.0
        backend: str | None = None

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes the factor offset + w one."""
        nn.init.constant_(self.weight, 1 - self.config.offset)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """x (..., dim) -> y, or (y, x + residual) when a residual is given."""
        c = self.config
        return functional.rms_norm(
            x, self.weight, eps=c.eps, offset=c.offset, residual=residual, backend=c.backend
        )

    def extra_repr(self) -> str:
        """The size and eps, for print(module)."""
        return f"{self.config.dim}, eps={self.config.eps}"


class LayerNorm(nn.Module):
    """y = (x - mean) w / sqrt(var + eps) + b over the last dimension.

    Args:
        config: size and options.
        device, dtype: of weight and bias.

    Shape:
        x (..., dim) -> (..., dim). With `residual` (..., dim): (norm(h), h), h = x + residual.

    Reference:
        Ba, Kiros, Hinton, "Layer Normalization", 2016, arXiv 1607.06450.

    Example:
        >>> LayerNorm(LayerNorm.Config(2))(torch.tensor([[-3.0, 3.0]])).round()
        tensor([[-1.,  1.]], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config:
        """Size and options of the norm."""

        dim: int
        eps: float = 1e-5
        bias: bool = True
        backend: str | None = None

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.dim, device=device, dtype=dtype))
        bias = torch.empty(config.dim, device=device, dtype=dtype)
        self.bias = nn.Parameter(bias) if config.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """x (..., dim) -> y, or (y, x + residual) when a residual is given."""
        c = self.config
        return functional.layer_norm(
            x, self.weight, self.bias, eps=c.eps, residual=residual, backend=c.backend
        )

    def extra_repr(self) -> str:
        """The size and eps, for print(module)."""
        return f"{self.config.dim}, eps={self.config.eps}"
