"""Linear attention whose queries solve least-squares problems: MesaNet and Gated KalmaNet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import require_choice
from omniattn.modules.base.fields import Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.recurrent.delta_net import draw_rates
from omniattn.modules.recurrent.recurrent import (
    Device,
    RecurrentConfig,
    RecurrentMixer,
    Result,
    fp32,
    linear,
)


@dataclass(frozen=True)
class LeastSquaresConfig(RecurrentConfig):
    """Sizes and options, as in RecurrentConfig, whose num_v_heads is not supported."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.v_heads != self.num_heads:
            raise ValueError(
                f"{self.layer.__name__}: num_v_heads must be num_heads or None, "
                f"got num_v_heads={self.num_v_heads}, num_heads={self.num_heads}"
            )

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """Sums of products of keys with keys, and with values."""
        sizes = {"h_kk": self.k_size, "h_kv": self.v_size}
        return {name: (self.num_heads, self.k_size, size) for name, size in sizes.items()}


class MesaNet(RecurrentMixer):
    """Linear attention whose queries solve a least-squares problem over all past tokens.

    ``o_t = G_t^T (H_t + diag(lamb))^-1 q_t`` with H and G of `functional.mesa_net`, q and k of
    length 1, ``ln a = ln sigmoid(x W_a)``, ``beta = sigmoid(x W_b)`` and ``lamb =
    softplus(lambda_params) + lambda_lower_bound``; v is not convolved. ``y = W_o norm(o)``, or with
    a gate as in RecurrentConfig.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; lambda_params is created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, a_proj and b_proj with biases, q_conv1d,
        k_conv1d, lambda_params (H K) and o_norm, with a gate also g_proj: names and shapes as in
        fla.

    Reference:
        von Oswald et al., MesaNet, 2025, arXiv 2506.05233.

    Example:
        >>> MesaNet(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    convolved = "qk"

    @dataclass(frozen=True)
    class Config(LeastSquaresConfig):
        """Sizes and options, as in LeastSquaresConfig.

        Args:
            lambda_lower_bound: least lamb, below 1, its first value.
            max_cg_step_training: most steps of conjugate gradients.
            max_cg_step_decoding: the same for a single token after a state.
        """

        gate: str | None = None
        lambda_lower_bound: float = 0.25
        max_cg_step_training: Size = 30
        max_cg_step_decoding: Size = 30

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 <= self.lambda_lower_bound < 1:
                raise ValueError(
                    "MesaNet: lambda_lower_bound must be in [0, 1), "
                    f"got lambda_lower_bound={self.lambda_lower_bound}"
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
        self.a_proj = linear(c, c.dim, c.num_heads, True, **factory)
        self.b_proj = linear(c, c.dim, c.num_heads, True, **factory)
        like = torch.empty(c.num_heads * c.k_size, device=device, dtype=fp32(dtype))
        self.lambda_params = nn.Parameter(like)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets lamb to 1."""
        nn.init.constant_(
            self.lambda_params, math.log(math.expm1(1 - self.config.lambda_lower_bound))
        )

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c, wide = self.config, self.lambda_params.dtype
        decays: Tensor = self.a_proj(x)
        weights: Tensor = self.b_proj(x)
        lamb = nnf.softplus(self.lambda_params) + c.lambda_lower_bound
        # The number of packed tokens may be unknown to torch.compile.
        one = options["cu_seqlens"] is None and x.shape[1] == 1
        decodes = one and options["initial_state"] is not None
        return functional.mesa_net(
            *(q, k, v, -nnf.softplus(-decays.to(wide)), weights.to(wide).sigmoid()),
            lamb.view(c.num_heads, c.k_size),
            max_iterations=c.max_cg_step_decoding if decodes else c.max_cg_step_training,
            l2norm=True,
            **options,
        )


class GatedKalmaNet(RecurrentMixer):
    """Linear attention mixed with a ridge regression on all past tokens.

    ``o_t = U_t^T (q_t + alpha_t (x_t - q_t)) / sqrt(K)`` with x, H and U of
    `functional.gated_kalmanet`, whose keys and values are k and v times ``beta = sigmoid(x W_b) +
    1e-6``, q and k of length 1, ``g = gk = -exp(A_log) softplus(x W_a + dt_bias)`` and
    ``alpha = sigmoid(x W_alpha)``; ``y = W_o (norm(o) * silu(x W_g))``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log and dt_bias are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, g_proj, o_proj, a_proj, b_proj and alpha_proj with
        biases, A_log and dt_bias (H), q_conv1d, k_conv1d, v_conv1d and o_norm: names and shapes as
        in fla.

    Reference:
        Peng et al., Gated KalmaNet, 2025, arXiv 2511.21016. The formula is that of `layers/gka.py`
        of fla-org/flash-linear-attention, commit b22c42ca.

    Example:
        >>> GatedKalmaNet(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LeastSquaresConfig):
        """Sizes and options, as in LeastSquaresConfig.

        Args:
            weighted: False for beta = 1, without b_proj.
            mixed: False for alpha = 1, without alpha_proj.
            decay: what decays: "both", "values" for U alone, or "none", without a_proj, A_log and
                dt_bias.
            ridge_ratio, max_iterations: as in `functional.gated_kalmanet`.
        """

        norm_eps: Epsilon = 1e-6
        weighted: bool = True
        mixed: bool = True
        decay: str = "both"
        ridge_ratio: float = 0.02
        max_iterations: Size = 30

        def __post_init__(self) -> None:
            super().__post_init__()
            require_choice("GatedKalmaNet", "decay", self.decay, ("both", "values", "none"))
            if not self.ridge_ratio > 0:
                raise ValueError(
                    f"GatedKalmaNet: ridge_ratio must be > 0, got ridge_ratio={self.ridge_ratio}"
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
        if c.weighted:
            self.b_proj = linear(c, c.dim, c.num_heads, True, **factory)
        if c.mixed:
            self.alpha_proj = linear(c, c.dim, c.num_heads, True, **factory)
        if c.decay != "none":
            self.a_proj = linear(c, c.dim, c.num_heads, **factory)
            like = torch.empty(c.num_heads, device=device, dtype=fp32(dtype))
            self.A_log, self.dt_bias = nn.Parameter(like), nn.Parameter(like.clone())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws exp(A_log) from (0, 16) and softplus(dt_bias) from (1e-3, 0.1)."""
        if self.config.decay != "none":
            draw_rates(self.A_log, self.dt_bias, 0.0)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c, wide = self.config, fp32(q.dtype)
        q, k = _unit(q.to(wide)).to(q.dtype), _unit(k.to(wide))
        if c.weighted:
            weights: Tensor = self.b_proj(x)
            beta = weights.to(wide).sigmoid()[..., None] + 1e-6
            k, v = beta * k, (beta * v).to(v.dtype)
        g = None
        if c.decay != "none":
            step: Tensor = self.a_proj(x)
            g = -self.A_log.exp() * nnf.softplus(step.to(self.A_log.dtype) + self.dt_bias)
        return functional.gated_kalmanet(
            *(q, k.to(q.dtype), v, g),
            g if c.decay == "both" else None,
            self.alpha_proj(x).to(wide).sigmoid() if c.mixed else None,
            ridge_ratio=c.ridge_ratio,
            max_iterations=c.max_iterations,
            **options,
        )


def _unit(x: Tensor) -> Tensor:
    """Divides rows by their lengths, as the option l2norm of `functional.mesa_net`."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
