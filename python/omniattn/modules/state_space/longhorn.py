"""Longhorn: Mamba's block with a scan whose decays follow from its keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.modules.base.fields import Backend, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.state import RecurrentState
from omniattn.modules.recurrent.recurrent import Device, fp32
from omniattn.modules.state_space.gated_scan import GatedScan

__all__ = ["Longhorn"]


class StepLogits(Linear):
    """Projection W_dt (inner, rank) with a bias b_dt (inner) that the scan adds."""

    def forward(self, r: Tensor) -> Tensor:
        """Maps r (B, T, rank) to r W_dt (B, T, inner), without b_dt."""
        return functional.linear(r, self.weight, backend=self.config.backend)


class Longhorn(GatedScan):
    """Computes ``y = W_out longhorn_scan(u, delta, k, q, D, z)``.

    ``u = silu(conv(x W_u))``, ``z = x W_z``, ``[r, k, q] = u W_x`` and ``delta = r W_dt + b_dt``,
    see :func:`functional.longhorn_scan`. Blocks of this layer need no feed-forward layer. Decoding
    takes one step of the scan per token, in constant time.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; D is created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters in_proj (2 inner, dim), conv1d (inner, 1, d_conv), x_proj (rank + 2 N, inner),
        dt_head (inner, rank), D (inner) and out_proj (dim, inner): names and shapes as in the
        authors' code.

    Reference:
        Liu et al., Longhorn: State Space Models are Amortized Online Learners, 2024, arXiv
        2407.14207; `models/longhorn.py` of Cranial-XIX/longhorn at commit 4ea1745.

    Example:
        >>> Longhorn(dim=8)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y, the authors' d_model.
            d_state: N, the number of states per channel.
            d_conv: number of taps of the causal convolution.
            expand: inner = expand * dim.
            dt_rank: width of r; None (the authors' "auto") for dim / 16, rounded up.
            conv_bias: True if conv1d has a bias.
            bias: True if in_proj and out_proj have biases.
            init_std, out_init_std, backend: as in Attention.
        """

        dim: Size
        d_state: Size = 16
        d_conv: Size = 4
        expand: Size = 2
        dt_rank: Size | None = None
        conv_bias: bool = True
        bias: bool = False
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        @property
        def inner(self) -> int:
            return self.expand * self.dim

        @property
        def rank(self) -> int:
            return self.dt_rank or math.ceil(self.dim / 16)

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        linear = self._add_inputs(**factory)
        self.x_proj = linear(c.inner, c.rank + 2 * c.d_state)
        dt = Linear.Config(c.rank, c.inner, True, c.init_std, c.backend)
        self.dt_head = StepLogits(dt, **factory)
        self.out_proj = linear(c.inner, c.dim, c.bias, c.out_init_std)
        self.D = nn.Parameter(torch.empty(c.inner, device=device, dtype=fp32(dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises D to 1."""
        nn.init.ones_(self.D)

    @property
    def _parameters_of_scan(self) -> tuple[Tensor, ...]:
        assert self.dt_head.bias is not None
        return self.D, self.dt_head.bias

    def _inputs(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        r, k, q = self.x_proj(u).split((c.rank, c.d_state, c.d_state), -1)
        return self.dt_head(r), k, q

    def _scan(
        self, u: Tensor, delta: Tensor, b: Tensor, rows: Tensor, z: Tensor, **given: Any
    ) -> tuple[Tensor, Tensor]:
        return functional.longhorn_scan(u, delta, b, rows, self.D, z, self.dt_head.bias, **given)

    def _rates(self, state: RecurrentState) -> None:
        return None
