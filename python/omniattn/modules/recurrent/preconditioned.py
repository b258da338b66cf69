"""Preconditioned delta-rule mixers: Gated DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.modules.base.fields import Epsilon, Signed
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.recurrent.delta_net import (
    DeltaConfig,
    DeltaMixer,
    GatedMixer,
    KimiDeltaAttention,
    draw_rates,
)
from omniattn.modules.recurrent.recurrent import Device, Result, fp32, linear


@dataclass(frozen=True)
class PrecondConfig(DeltaConfig):
    """Sizes and options, as in DeltaConfig.

    Args:
        squash_x, squash_eps: x and eps of functional.preconditioned_delta_rule.
        log_atk_scale_init: first value of log_atk_scale.
    """

    squash_x: float = 1.5
    squash_eps: Epsilon = 1e-6
    log_atk_scale_init: Signed = -0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.squash_x < math.inf:
            raise ValueError(
                f"{self.layer.__name__}: squash_x must be finite and at least 1, "
                f"got squash_x={self.squash_x}"
            )

    @property
    def atk_heads(self) -> int:
        """Number of heads of the keys that are preconditioned."""
        return self.num_heads

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        return {"s": (self.v_heads, *self.state_size), "A": (self.atk_heads, self.k_size)}


class PrecondMixer(DeltaMixer):
    """Base class of delta rules that scale written keys by their mean squares A.

    ``A_t = a_t A_{t-1} + sigmoid(x W_b) k_t^2``, ``ln a = -exp(A_log_atk) softplus(x W_a +
    dt_bias_atk)``. The state has A (B, H, K) beside the matrix s."""

    #: Name of the layer W_a, and least rate that A_log_atk starts with.
    atk_proj: ClassVar[str]
    least_rate: ClassVar[float]
    config: PrecondConfig
    A_log_atk: nn.Parameter
    dt_bias_atk: nn.Parameter
    log_atk_scale: nn.Parameter

    def __init__(
        self, config: PrecondConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        for name in (self.atk_proj, "b_atk_proj"):
            layer = linear(config, config.dim, config.atk_heads, device=device, dtype=dtype)
            self.add_module(name, layer)
        like = torch.empty(config.atk_heads, device=device, dtype=fp32(dtype))
        for name in ("A_log_atk", "dt_bias_atk", "log_atk_scale"):
            self.register_parameter(name, nn.Parameter(like.clone()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws A_log_atk and dt_bias_atk as in Gated DeltaNet."""
        super().reset_parameters()  # type: ignore[misc]
        if hasattr(self, "log_atk_scale"):
            draw_rates(self.A_log_atk, self.dt_bias_atk, self.least_rate)
            nn.init.constant_(self.log_atk_scale, self.config.log_atk_scale_init)

    def preconditioned(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        g: Tensor,
        beta: Tensor,
        **options: Any,
    ) -> Result:
        """Runs the recurrence with its decays g and writing strengths beta."""
        c, wide = self.config, self.A_log_atk.dtype
        step: Tensor = self.get_submodule(self.atk_proj)(x)
        g_atk = -self.A_log_atk.exp() * nnf.softplus(step.to(wide) + self.dt_bias_atk)
        logits: Tensor = self.get_submodule("b_atk_proj")(x)
        return functional.preconditioned_delta_rule(
            *(q, k, v, g, beta, g_atk, logits.to(wide).sigmoid(), self.log_atk_scale),
            x=c.squash_x,
            eps=c.squash_eps,
            l2norm=True,
            **options,
        )


class PrecondGatedDeltaNet(PrecondMixer, GatedMixer):
    """Gated DeltaNet whose writes have channels scaled by the mean squares of past keys.

    ``S_t = a_t S_{t-1} + beta_t (m_t * k_t) (v_t - a_t S_{t-1}^T k_t)^T`` with the preconditioner
    m_t of `functional.preconditioned_delta_rule`, whose gates are ``sigmoid(x W_b)`` and
    ``-exp(A_log_atk) softplus(x W_a + dt_bias_atk)``; otherwise as in Gated DeltaNet.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log, dt_bias, A_log_atk, dt_bias_atk
            and log_atk_scale are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters as in GatedDeltaNet, a_atk_proj and b_atk_proj (H, dim), A_log_atk, dt_bias_atk
        and log_atk_scale (H): names and shapes as in fla.

    Reference:
        Tumma, Loo, Rus, Preconditioned DeltaNet, 2026, arXiv 2604.21100.

    Example:
        >>> PrecondGatedDeltaNet(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(PrecondConfig):
        """Sizes and options, as in PrecondConfig."""

        expand: ClassVar[int] = 2

    config: Config
    atk_proj = "a_atk_proj"
    least_rate = 0.0

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        return self.preconditioned(q, k, v, x, self.decays(x), self.beta(x), **options)


class PrecondKDA(PrecondMixer, KimiDeltaAttention):
    """Kimi Delta Attention whose writes have channels scaled by the mean squares of past keys.

    ``S_t = S' + beta_t (m_t * k_t) (v_t - S'^T k_t)^T`` with ``S' = diag(a_t) S_{t-1}`` and the
    preconditioner m_t of `functional.preconditioned_delta_rule`, whose gates are
    ``sigmoid(x W_b)`` and ``-exp(A_log_atk) softplus(x W_a + dt_bias_atk)`` for each value head;
    otherwise as in Kimi Delta Attention.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log, dt_bias, A_log_atk, dt_bias_atk
            and log_atk_scale are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters as in KimiDeltaAttention, but b_proj (H, dim); a_proj and b_atk_proj (Hv, dim),
        A_log_atk, dt_bias_atk and log_atk_scale (Hv): names and shapes as in fla.

    Reference:
        Tumma, Loo, Rus, Preconditioned DeltaNet, 2026, arXiv 2604.21100.

    Example:
        >>> PrecondKDA(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(PrecondConfig, KimiDeltaAttention.Config):
        """Sizes and options, as in PrecondConfig and KimiDeltaAttention."""

        @property
        def betas(self) -> int:
            return self.num_heads

        @property
        def atk_heads(self) -> int:
            return self.v_heads

    config: Config
    atk_proj = "a_proj"
    least_rate = 1.0

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draws rates as in KimiDeltaAttention; dt_bias is 0."""
        super().reset_parameters()
        nn.init.zeros_(self.dt_bias)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        copies = self.config.v_heads // self.config.num_heads
        q, k, beta = (t.repeat_interleave(copies, 2) for t in (q, k, self.beta(x)))
        return self.preconditioned(q, k, v, x, self.decays(x), beta, **options)
