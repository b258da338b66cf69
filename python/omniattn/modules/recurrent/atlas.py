"""Layer of ATLAS' linear memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.modules.base.fields import Size, SizeOrZero
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.recurrent.recurrent import Device, Result, linear
from omniattn.modules.recurrent.titans import MemoryConfig, MemoryMixer


class AtlasLinear(MemoryMixer):
    """Layer with ATLAS' long-term memory: a matrix that descends the losses of the last tokens.

    o of `functional.atlas_linear`, with q and k of length 1 and, for degree 2, features ``(a_1 x_i,
    a_2 x_i x_j)`` of them, i <= j, whose products are ``a_1^2 q k^T + a_2^2 (q k^T)^2``; a is
    learned for each head and scaled to length 1. The weights of the losses are ``gamma = sigmoid(x
    W_gamma + b_gamma) / window``, forgetting is ``alpha = sigmoid(x W_alpha + b_alpha)`` and
    momentum ``eta = sigmoid(x W_eta + b_eta)``. Step sizes are ``theta = max_step (1 - eta)
    sigmoid(x W_theta + b_theta) / C``, without the factor 1 - eta where the steps are orthogonal.
    ``y = W_o norm(o)``, with a gate as in RecurrentConfig. The first memory M is learned.

    With 5 Newton-Schulz steps this is the paper's Atlas, without them its OmegaNet with momentum,
    both with a matrix in place of an MLP.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, q_conv1d, k_conv1d, v_conv1d, theta_proj,
        alpha_proj, eta_proj and gamma_proj with biases, M (H, F, V) with F = K, or K (K + 3) / 2
        for degree 2, and o_norm; with a gate g_proj, for degree 2 the coefficients a (H, 2).

    Reference:
        Behrouz et al., ATLAS: Learning to Optimally Memorize the Context at Test Time, 2025, arXiv
        2505.23735.

    Example:
        >>> AtlasLinear(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(MemoryConfig):
        """Sizes and options, as in MemoryConfig.

        Args:
            window: number of tokens whose losses a step descends.
            degree: degree of the features of q and k, 1 or 2.
            newton_schulz_steps: number of steps that orthogonalize those of the memory; 0 for
                none.
        """

        window: Size = 8
        degree: Size = 1
        newton_schulz_steps: SizeOrZero = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.degree > 2:
                raise ValueError(f"AtlasLinear: degree must be 1 or 2, got degree={self.degree}")

        @property
        def state_size(self) -> tuple[int, int]:
            k = self.k_size
            return (k * (k + 3) // 2 if self.degree == 2 else k), self.v_size

        @property
        def past(self) -> dict[str, tuple[int, ...]]:
            tokens, (rows, width) = (self.window - 1, self.num_heads), self.state_size
            return {"keys": (*tokens, rows), "values": (*tokens, width)}

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gamma_proj = linear(c, c.dim, c.num_heads * c.window, True, **factory)
        learned = nn.Parameter(torch.empty(c.num_heads, 2, **factory)) if c.degree == 2 else None
        self.register_parameter("coefficients", learned)
        self.reset_parameters()

    undecayed = ("M", "coefficients")
    coefficients: nn.Parameter | None

    def reset_parameters(self) -> None:
        """Draws M, sets alpha to about 0.02 and the coefficients to 1 / i!."""
        super().reset_parameters()
        if self.coefficients is not None:
            with torch.no_grad():
                self.coefficients.copy_(self.coefficients.new_tensor([1.0, 0.5]))

    def step_sizes(self, theta: Tensor, eta: Tensor) -> Tensor:
        """As in MemoryMixer; orthogonal steps have a size that does not grow with the momentum."""
        c = self.config
        if c.newton_schulz_steps == 0:
            return super().step_sizes(theta, eta)
        return theta.sigmoid() * (c.max_step / c.mini_batch_size)

    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *gates: Tensor, **options: Any
    ) -> Result:
        c = self.config
        if self.coefficients is not None:
            q, k = (_features(t, self.coefficients) for t in (q, k))
        gamma = self.gamma_proj(x).to(gates[0].dtype).sigmoid() / c.window
        options["newton_schulz_steps"] = c.newton_schulz_steps
        return functional.atlas_linear(
            q, k, v, gamma.unflatten(-1, (c.num_heads, c.window)), *gates, **options
        )


def _features(x: Tensor, coefficients: Tensor) -> Tensor:
    """Maps rows (B, T, H, K) of length 1 to their monomials of degrees 1 and 2, of length 1."""
    a = coefficients.to(torch.promote_types(x.dtype, torch.float32))
    a = (a / torch.linalg.vector_norm(a, dim=-1, keepdim=True)).to(x.dtype)
    first, second = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    twice = torch.where(first == second, 1.0, math.sqrt(2.0)).to(x.dtype)
    products = x[..., first] * x[..., second] * twice
    return torch.cat((a[:, :1] * x, a[:, 1:] * products), -1)
