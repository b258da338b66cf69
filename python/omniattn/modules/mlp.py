"""Gated feed-forward layer."""

from dataclasses import dataclass

import torch
from torch import nn

from omniattn import functional
from omniattn.modules.linear import Linear

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "bilinear")


class GatedMLP(nn.Module):
    """y = (act(x W_gate) * (x W_up)) W_down.

    Args:
        config: sizes and options; `activation` is one of swiglu, geglu, geglu_tanh, reglu,
            bilinear; `out_init_std` of `down_proj` (models scale it by 1 / sqrt(2 layers)).
        device, dtype: of the parameters.

    Shape:
        x (..., dim) -> (..., dim). Weights gate_proj and up_proj (hidden_dim, dim), down_proj
        (dim, hidden_dim).

    Reference:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.

    Example:
        >>> GatedMLP(GatedMLP.Config(8, 24))(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    @dataclass(frozen=True)
    class Config:
        """Sizes and options of the layer."""

        dim: int
        hidden_dim: int
        activation: str = "swiglu"
        bias: bool = False
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: str | None = None

        def __post_init__(self) -> None:
            if self.activation not in ACTIVATIONS:
                raise ValueError(
                    f"GatedMLP: activation must be one of {', '.join(ACTIVATIONS)}, "
                    f"got activation={self.activation!r}"
                )

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        wide = Linear.Config(c.dim, c.hidden_dim, c.bias, c.init_std, c.backend)
        narrow = Linear.Config(c.hidden_dim, c.dim, c.bias, c.out_init_std, c.backend)
        self.gate_proj = Linear(wide, device=device, dtype=dtype)
        self.up_proj = Linear(wide, device=device, dtype=dtype)
        self.down_proj = Linear(narrow, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., dim) -> (..., dim)."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        name, backend = self.config.activation, self.config.backend
        if name == "geglu_tanh":
            hidden = functional.geglu(gate, up, approximate="tanh", backend=backend)
        else:
            hidden = getattr(functional, name)(gate, up, backend=backend)
        y: torch.Tensor = self.down_proj(hidden)
        return y
