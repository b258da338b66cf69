"""Mamba: a gated selective scan after a causal convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.functional.recurrences._steps import decay_rates
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.norm import RMSNorm
from omniattn.modules.base.state import RecurrentState
from omniattn.modules.recurrent.headwise import Headwise, per_head
from omniattn.modules.recurrent.recurrent import Device, draw_steps, fp32
from omniattn.modules.state_space.gated_scan import GatedScan

__all__ = ["Mamba"]

_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class StepProjection(nn.Linear):
    """Projection W_dt (inner, rank) with a bias b_dt (inner) that the scan adds."""

    def __init__(self, config: Mamba.Config, **factory: Any) -> None:
        self.config = config  # nn.Linear's constructor calls reset_parameters, which reads it
        super().__init__(config.rank, config.inner, **factory)

    def reset_parameters(self) -> None:
        """Draws weight and bias by the config's dt options."""
        _draw(self, self.config)

    def forward(self, r: Tensor) -> Tensor:
        """Maps r (B, T, rank) to r W_dt (B, T, inner), without b_dt."""
        return functional.linear(r, self.weight, backend=self.config.backend)


class HeadsStepProjection(nn.Module):
    """StepProjection of several heads: rows of weight and bias belong to the heads in turn."""

    def __init__(self, config: Mamba.Config, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.inner, config.rank, **factory))
        self.bias = nn.Parameter(torch.empty(config.inner, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias by the config's dt options."""
        _draw(self, self.config)

    def forward(self, r: Tensor) -> Tensor:
        """Maps r (B, T, heads, rank) to (B, T, inner), without b_dt."""
        return per_head(r, self.weight.unflatten(0, (r.shape[2], -1))).flatten(-2)


@torch.no_grad()
def _draw(projection: StepProjection | HeadsStepProjection, c: Mamba.Config) -> None:
    bound = c.rank**-0.5 * c.dt_scale
    if c.dt_init == "constant":
        nn.init.constant_(projection.weight, bound)
    else:
        nn.init.uniform_(projection.weight, -bound, bound)
    draw_steps(projection.bias, c.dt_min, c.dt_max, c.dt_init_floor)


class Mamba(GatedScan):
    """Computes ``y = W_out selective_scan(u, dt, -exp(A_log), B, C, D, z)``.

    ``u = silu(conv(x W_u))``, ``z = x W_z``, ``[r, B, C] = u W_x`` and
    ``dt = softplus(r W_dt + b_dt)``, see :func:`functional.selective_scan`. Blocks of this layer
    need no feed-forward layer. Decoding takes one step of the scan per token, in constant time.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log and D are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters in_proj (2 inner, dim), conv1d (inner, 1, d_conv), x_proj (rank + 2 N, inner),
        dt_proj (inner, rank), A_log (inner, N), D (inner) and out_proj (dim, inner): names and
        shapes as in mamba-ssm and transformers; with `norm_eps` also Jamba's dt_layernorm,
        b_layernorm and c_layernorm. With heads x_proj is (heads, rank + 2 N, inner / heads).

    Reference:
        Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
        arXiv 2312.00752; the norms: Lieber et al., Jamba, 2024, arXiv 2403.19887, and Zuo et al.,
        Falcon Mamba, 2024, arXiv 2410.05355.

    Example:
        >>> Mamba(dim=8)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    #: Matrices without weight decay: they determine the states' time scales.
    undecayed: ClassVar[tuple[str, ...]] = ("A_log",)

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y, mamba-ssm's d_model.
            d_state: N, the number of states per channel.
            d_conv: number of taps of the causal convolution.
            expand: inner = expand * dim.
            inner_dim: inner, overrides expand.
            dt_rank: width of r; None (mamba-ssm's "auto") for dim / 16, rounded up.
            dt_min, dt_max: range of the initial softplus(b_dt), drawn log-uniformly.
            dt_init_floor: lower bound of the initial softplus(b_dt).
            dt_init: "random" to draw W_dt uniformly from +- dt_scale rank^-0.5, "constant" to set
                it to this bound.
            dt_scale: scale of the initial W_dt.
            conv_bias: True if conv1d has a bias.
            bias: True if in_proj and out_proj have biases.
            norm_eps: eps of Jamba's RMS norms of r, B and C; None for no norms.
            norm_weights: True if these norms have weights; False in FalconMamba.
            init_std, out_init_std, backend: as in Attention.
            num_heads: number of heads, each with its own W_x, B and C (Zamba).
        """

        dim: Size
        d_state: int = 16
        d_conv: int = 4
        expand: int = 2
        inner_dim: Size | None = None
        dt_rank: Size | None = None
        dt_min: float = 1e-3
        dt_max: float = 0.1
        dt_init: str = "random"
        dt_scale: float = 1.0
        dt_init_floor: float = 1e-4
        conv_bias: bool = True
        bias: bool = False
        norm_eps: Epsilon | None = None
        norm_weights: bool = True
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None
        num_heads: Size = 1

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("d_state", "d_conv", "expand"):
                if getattr(self, name) < 1:
                    raise ValueError(
                        f"Mamba: {name} must be >= 1, got {name}={getattr(self, name)}"
                    )
            if self.inner % self.num_heads:
                raise ValueError(
                    "Mamba: inner must be a multiple of num_heads, "
                    f"got inner={self.inner}, num_heads={self.num_heads}"
                )
            if self.dt_init not in ("random", "constant"):
                raise ValueError(
                    f"Mamba: dt_init must be 'random' or 'constant', "
                    f"got dt_init={shown(self.dt_init)}"
                )
            if not 0 < self.dt_min <= self.dt_max or self.dt_init_floor <= 0:
                raise ValueError(
                    "Mamba: dt_min must be in (0, dt_max] and dt_init_floor above 0, got "
                    f"dt_min={self.dt_min}, dt_max={self.dt_max}, "
                    f"dt_init_floor={self.dt_init_floor}"
                )

        @property
        def inner(self) -> int:
            return self.inner_dim or self.expand * self.dim

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
        self.x_proj: nn.Module
        if c.num_heads == 1:
            self.x_proj = linear(c.inner, c.rank + 2 * c.d_state)
        else:
            sizes = (c.inner // c.num_heads, c.rank + 2 * c.d_state)
            self.x_proj = Headwise(c.num_heads, *sizes, c.init_std, **factory)
        steps = StepProjection if c.num_heads == 1 else HeadsStepProjection
        self.dt_proj: StepProjection | HeadsStepProjection = steps(c, **factory)
        wide: dict[str, Any] = {"device": device, "dtype": fp32(dtype)}
        self.A_log = nn.Parameter(torch.empty(c.inner, c.d_state, **wide))
        self.D = nn.Parameter(torch.empty(c.inner, **wide))
        self.out_proj = linear(c.inner, c.dim, c.bias, c.out_init_std)
        if c.norm_eps is not None and c.norm_weights:
            for name, size in zip(_NORMS, (c.rank, c.d_state, c.d_state), strict=True):
                norm = RMSNorm.Config(size, c.norm_eps, backend=c.backend)
                self.add_module(name, norm.build(**factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises A to -1, ..., -N in each channel, and D to 1."""
        rates = torch.arange(1, self.config.d_state + 1, dtype=torch.float64)
        self.A_log.copy_(rates.log().expand_as(self.A_log))
        nn.init.ones_(self.D)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        """Applies the norm of r, B or C if the layer has norms."""
        c = self.config
        if c.norm_eps is None:
            return x
        if c.norm_weights:
            return cast(Tensor, self.get_submodule(name)(x))
        return functional.rms_norm(x, eps=c.norm_eps, backend=c.backend)

    @property
    def _has_single_steps(self) -> bool:
        return self.config.num_heads == 1

    @property
    def _parameters_of_scan(self) -> tuple[Tensor, ...]:
        return self.A_log, self.D, self.dt_proj.bias

    def _inputs(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        parts = self.x_proj(u).split((c.rank, c.d_state, c.d_state), -1)
        r, b, rows = map(self._normed, _NORMS, parts)
        return self.dt_proj(r), b, rows

    def _scan(
        self, u: Tensor, delta: Tensor, b: Tensor, rows: Tensor, z: Tensor, **given: Any
    ) -> tuple[Tensor, Tensor]:
        a, bias = -self.A_log.exp(), self.dt_proj.bias
        return functional.selective_scan(u, delta, a, b, rows, self.D, z, bias, True, **given)

    def _rates(self, state: RecurrentState) -> Tensor:
        return state.derived("A", self.A_log, decay_rates)
