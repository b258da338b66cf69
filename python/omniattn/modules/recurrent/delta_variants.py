"""Delta-rule mixers with several keys for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.recurrent.delta_net import DeltaConfig, GatedMixer, draw_rates
from omniattn.modules.recurrent.recurrent import (
    Device,
    RecurrentMixer,
    Result,
    fp32,
    linear,
    low_rank,
)


class GatedDeltaProduct(GatedMixer):
    """Gated DeltaNet with several updates for each token.

    ``S_t = U_n(.. U_1(a_t S_{t-1}))``, ``U_j(S) = S + beta_tj k_tj (v_tj - S^T k_tj)^T`` with
    ``beta = 2 sigmoid(x W_b)``; decays, output gate and norm as in Gated DeltaNet. Products of
    reflections let a layer permute its state, which one reflection for each token cannot.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log and dt_bias are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters as in GatedDeltaNet, with n times the rows in k_proj, v_proj, b_proj, k_conv1d
        and v_conv1d: names and shapes as in fla.

    Reference:
        Siems et al., DeltaProduct, 2025, arXiv 2502.10297.

    Example:
        >>> GatedDeltaProduct(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(DeltaConfig):
        """Sizes and options, as in DeltaConfig.

        Args:
            num_householder: number n of updates for each token.
        """

        expand: ClassVar[int] = 2
        allow_neg_eigval: bool = True
        num_householder: Size = 2

        @property
        def updates(self) -> int:
            return self.num_householder

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        n = self.config.num_householder
        k, v, beta = (t.unflatten(2, (n, -1)) for t in (k, v, self.beta(x)))
        return functional.gated_delta_product(q, k, v, self.decays(x), beta, l2norm=True, **options)


class Comba(GatedMixer):
    """Gated DeltaNet that erases with a key of its own and corrects its queries.

    ``S_t = a_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T``, ``o_t = S_t^T q_t / sqrt(K)`` with
    ``p = sigmoid(decay) k`` and ``q - D p`` in place of q, both before q, k and p get length 1;
    otherwise as in Gated DeltaNet, but ``y = W_o (norm(o) * sigmoid(x W_g))``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log and dt_bias are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters as in GatedDeltaNet, decay and D (H): names and shapes as in fla.

    Note:
        As in fla, p gets length 1 after its factor, so that the factor acts through q alone.

    Reference:
        Hu et al., Comba, 2025, arXiv 2506.02475.

    Example:
        >>> Comba(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(DeltaConfig):
        """Sizes and options, as in DeltaConfig.

        Args:
            inner_decay: True for the factor sigmoid(decay) of p.
            correction_factor: first value of D; None for no correction of q. fla's authors found
                0.02 better in some small models.
            erase_decayed: as in functional.comba.
        """

        expand: ClassVar[int] = 2
        gate: str | None = "sigmoid"
        inner_decay: bool = True
        correction_factor: float | None = 1.0
        erase_decayed: bool = False

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        like = torch.empty(config.num_heads, device=device, dtype=dtype)
        self.decay = nn.Parameter(like) if config.inner_decay else None
        corrects = config.correction_factor is not None
        self.D = nn.Parameter(like.clone()) if corrects else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws A_log and dt_bias as in GatedDeltaNet; decay = 1, D = correction_factor."""
        super().reset_parameters()
        factors = {"decay": 1.0, "D": self.config.correction_factor}
        for name, value in factors.items():
            parameter = getattr(self, name, None)
            if parameter is not None and value is not None:
                nn.init.constant_(parameter, value)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        p = k if self.decay is None else k * self.decay.sigmoid()[:, None]
        if self.D is not None:
            q = q - self.D[:, None] * p
        erased = self.config.erase_decayed
        g, beta = self.decays(x), self.beta(x)
        return functional.comba(q, k, v, p, g, beta, l2norm=True, erase_decayed=erased, **options)


class GatedDeltaNet2(RecurrentMixer):
    """Kimi Delta Attention with a gate for each erased channel and each written channel.

    ``S_t = S' + k_t (w_t * v_t - S'^T (b_t * k_t))^T`` with ``S' = diag(a_t) S_{t-1}``,
    ``b = sigmoid(x W_b)``, ``w = sigmoid(x W_w)`` and
    ``ln a_t = -exp(A_log) softplus(x W_f1 W_f2 + dt_bias)``; q and k have length 1;
    ``y = W_o (norm(o) * sigmoid(x W_g1 W_g2))``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log and dt_bias are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, b_proj (H K, dim), w_proj (Hv V, dim), f_proj and
        g_proj of two layers each, q_conv1d, k_conv1d, v_conv1d, o_norm, A_log (H) and dt_bias
        (H K): names and shapes as in fla.

    Reference:
        Hatamizadeh, Choi, Kautz, Gated DeltaNet-2, 2026, arXiv 2605.22791.

    Example:
        >>> GatedDeltaNet2(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(DeltaConfig):
        """Sizes and options, as in DeltaConfig; `allow_neg_eigval` doubles b."""

        gate: str | None = "sigmoid"

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        keys, values = c.num_heads * c.k_size, c.v_heads * c.v_size
        self.f_proj = low_rank(c, c.v_size, keys, **factory)
        self.b_proj = linear(c, c.dim, keys, **factory)
        self.w_proj = linear(c, c.dim, values, **factory)
        if c.gate is not None:
            self.g_proj = low_rank(c, c.v_size, values, True, **factory)
        like = torch.empty(c.num_heads, device=device, dtype=fp32(dtype))
        self.A_log, self.dt_bias = nn.Parameter(like), nn.Parameter(like.new_empty(keys))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws exp(A_log) from (1, 16) and softplus(dt_bias) from (1e-3, 0.1)."""
        draw_rates(self.A_log, self.dt_bias, 1.0)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c = self.config
        layers = self.f_proj, self.b_proj, self.w_proj
        f, b, w = (layer(x).to(self.A_log.dtype) for layer in layers)
        step = nnf.softplus(f + self.dt_bias).unflatten(-1, (c.num_heads, -1))
        g = (-self.A_log.exp()[:, None] * step).repeat_interleave(c.v_heads // c.num_heads, 2)
        b = b.sigmoid().unflatten(-1, (c.num_heads, -1)) * (1 + c.allow_neg_eigval)
        w = w.sigmoid().unflatten(-1, (c.v_heads, -1))
        return functional.gated_delta_rule_2(q, k, v, g, b, w, l2norm=True, **options)
