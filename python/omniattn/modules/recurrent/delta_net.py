"""Delta-rule mixers: DeltaNet, Gated DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.modules.base.fields import Signed
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.recurrent.recurrent import (
    Device,
    RecurrentConfig,
    RecurrentMixer,
    Result,
    draw_steps,
    fp32,
    linear,
    low_rank,
)


@dataclass(frozen=True)
class DeltaConfig(RecurrentConfig):
    """Sizes and options.

    Args:
        allow_neg_eigval: True for beta in (0, 2) instead of (0, 1), which allows negative
            eigenvalues of the state transition.
    """

    allow_neg_eigval: bool = False

    @property
    def betas(self) -> int:
        """Number of writing strengths of a token."""
        return self.updates * self.v_heads


class DeltaMixer(RecurrentMixer):
    """Base class of delta rules with ``beta = sigmoid(x W_b)``."""

    config: DeltaConfig

    def __init__(
        self, config: DeltaConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.b_proj = linear(config, config.dim, config.betas, device=device, dtype=dtype)

    def beta(self, x: Tensor) -> Tensor:
        """Computes beta (B, T, Hv), for n updates (B, T, n Hv), in fp32 (fp64 for fp64)."""
        logits: Tensor = self.b_proj(x)
        beta = logits.to(fp32(logits.dtype)).sigmoid()
        return 2 * beta if self.config.allow_neg_eigval else beta


class GatedMixer(DeltaMixer):
    """Base class of delta rules with ``ln a = -exp(A_log) softplus(x W_a + dt_bias)``."""

    def __init__(
        self, config: DeltaConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.a_proj = linear(config, config.dim, config.v_heads, device=device, dtype=dtype)
        like = torch.empty(config.v_heads, device=device, dtype=fp32(dtype))
        self.A_log, self.dt_bias = nn.Parameter(like), nn.Parameter(like.clone())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws exp(A_log) from (0, 16) and softplus(dt_bias) from (1e-3, 0.1)."""
        draw_rates(self.A_log, self.dt_bias, 0.0)

    def decays(self, x: Tensor) -> Tensor:
        """Computes the logarithms of the decays (B, T, Hv)."""
        step: Tensor = self.a_proj(x)
        return -self.A_log.exp() * nnf.softplus(step.to(self.A_log.dtype) + self.dt_bias)


class DeltaNet(DeltaMixer):
    """Linear attention with the delta rule, which overwrites the value stored under a key.

    ``S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T``, ``o_t = S_t^T q_t / sqrt(K)`` with
    L2-normalised q and k, ``beta = sigmoid(x W_b)``; ``y = W_o norm(o)``, see RecurrentConfig.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, b_proj, o_proj, q_conv1d, k_conv1d, v_conv1d and o_norm,
        with a gate also g_proj: names and shapes as in fla.

    Reference:
        Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, arXiv 2406.06484.

    Example:
        >>> DeltaNet(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(DeltaConfig):
        """Sizes and options, as in DeltaConfig."""

        gate: str | None = None

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        return functional.delta_rule(q, k, v, self.beta(x), l2norm=True, **options)


class GatedDeltaNet(GatedMixer):
    """DeltaNet with one decay per head and token, and a gated output.

    ``S_t = a_t S_{t-1} + k_t u_t^T``, ``u_t = beta_t (v_t - a_t S_{t-1}^T k_t)`` with
    ``ln a_t = -exp(A_log) softplus(x W_a + dt_bias)``, otherwise as in DeltaNet;
    ``y = W_o (norm(o) * silu(x W_g))``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log and dt_bias are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters as in DeltaNet, a_proj (Hv, dim), A_log and dt_bias (Hv): names and shapes as in
        fla.

    Reference:
        Yang, Kautz, Hatamizadeh, Gated Delta Networks, 2024, arXiv 2412.06464.

    Example:
        >>> GatedDeltaNet(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(DeltaConfig):
        """Sizes and options, as in DeltaConfig."""

        expand: ClassVar[int] = 2

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        g, beta = self.decays(x), self.beta(x)
        return functional.gated_delta_rule(q, k, v, g, beta, l2norm=True, **options)


class KimiDeltaAttention(DeltaMixer):
    """Gated DeltaNet with one decay per key channel and token.

    ``ln a_t = -exp(A_log) softplus(f_t + dt_bias)`` with f_t = x W_f1 W_f2 (Hv, K), or
    ``lower_bound sigmoid(exp(A_log) (f_t + dt_bias))``, otherwise as in Gated DeltaNet;
    ``y = W_o (norm(o) * sigmoid(x W_g1 W_g2))``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log and dt_bias are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters as in DeltaNet, f_proj and g_proj of two layers each, A_log (Hv) and dt_bias
        (Hv K): names and shapes as in fla.

    Reference:
        Kimi Team, Kimi Linear, 2025, arXiv 2510.26692.

    Example:
        >>> KimiDeltaAttention(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(DeltaConfig):
        """Sizes and options, as in DeltaConfig.

        Args:
            lower_bound: lower bound of ln a, below 0; None for no bound.
            gate_bias: True if the second layer of the output gate has a bias.
        """

        gate: str | None = "sigmoid"
        lower_bound: Signed | None = None
        gate_bias: bool = True

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.lower_bound is not None and not -math.inf < self.lower_bound < 0:
                raise ValueError(
                    "KimiDeltaAttention: lower_bound must be finite and < 0, "
                    f"got lower_bound={self.lower_bound}"
                )

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.f_proj = low_rank(c, c.v_size, c.v_heads * c.k_size, **factory)
        if c.gate is not None:
            self.g_proj = low_rank(c, c.v_size, c.v_heads * c.v_size, c.gate_bias, **factory)
        like = torch.empty(c.v_heads, device=device, dtype=fp32(dtype))
        self.A_log = nn.Parameter(like)
        self.dt_bias = nn.Parameter(like.new_empty(c.v_heads * c.k_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws exp(A_log) from (1, 16) and softplus(dt_bias) from (1e-3, 0.1).

        With a lower bound exp(A_log) starts at 1.
        """
        draw_rates(self.A_log, self.dt_bias, 1.0)
        if self.config.lower_bound is not None:
            nn.init.zeros_(self.A_log)

    def decays(self, x: Tensor) -> Tensor:
        """Computes the logarithms of the decays (B, T, Hv, K)."""
        c = self.config
        step: Tensor = self.f_proj(x)
        step = (step.to(self.A_log.dtype) + self.dt_bias).unflatten(-1, (c.v_heads, c.k_size))
        rate = self.A_log.exp()[:, None]
        if c.lower_bound is None:
            return -rate * nnf.softplus(step)
        return c.lower_bound * (rate * step).sigmoid()

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        g, beta = self.decays(x), self.beta(x)
        return functional.kimi_delta_attention(q, k, v, g, beta, l2norm=True, **options)


@torch.no_grad()
def draw_rates(a_log: Tensor, dt_bias: Tensor, least: float) -> None:
    """Draws exp(a_log) uniformly from (least, 16).

    Draws softplus(dt_bias) log-uniformly from 1e-3 to 0.1.
    """
    a_log.uniform_(least, 16).clamp_(min=1e-4).log_()
    draw_steps(dt_bias, 1e-3, 0.1)
