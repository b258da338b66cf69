"""MesaNet layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.recurrent.recurrent import (
    Device,
    RecurrentConfig,
    RecurrentMixer,
    Result,
    fp32,
    linear,
)


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
    class Config(RecurrentConfig):
        """Sizes and options, as in RecurrentConfig, whose num_v_heads is not supported.

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
            if self.v_heads != self.num_heads:
                raise ValueError(
                    "MesaNet: num_v_heads must be num_heads or None, "
                    f"got num_v_heads={self.num_v_heads}, num_heads={self.num_heads}"
                )
            if not 0 <= self.lambda_lower_bound < 1:
                raise ValueError(
                    "MesaNet: lambda_lower_bound must be in [0, 1), "
                    f"got lambda_lower_bound={self.lambda_lower_bound}"
                )

        @property
        def states(self) -> dict[str, tuple[int, ...]]:
            sizes = {"h_kk": self.k_size, "h_kv": self.v_size}
            return {name: (self.num_heads, self.k_size, size) for name, size in sizes.items()}

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
