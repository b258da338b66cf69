"""Linear attention with other keys: HGRN-2, lightning attention, ReBased, LightNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.modules.base.fields import Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.recurrent.hgrn import bounded_decays, require_bound
from omniattn.modules.recurrent.linear_attention import LinearAttention
from omniattn.modules.recurrent.recurrent import (
    Device,
    RecurrentConfig,
    RecurrentMixer,
    Result,
    fp32,
    low_rank,
)


class HGRN2(RecurrentMixer):
    """Gated linear attention whose keys are the forgotten shares, 1 - a.

    ``S_t = diag(a_t) S_{t-1} + (1 - a_t) v_t^T``, ``o_t = S_t^T silu(x W_q) / sqrt(K)`` with
    ``a = l + (1 - l) sigmoid(x W_k)`` and the lower bound l; ``y = W_o norm(o)`` with one norm of
    all heads.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_norm, o_proj, and with convolutions q_conv1d, k_conv1d,
        v_conv1d: shapes as in fla, which names k_proj f_proj, v_proj i_proj and o_norm g_norm.

    Reference:
        Qin et al., HGRN2: Gated Linear RNNs with State Expansion, 2024, arXiv 2404.07904. Verified
        against `layers/hgrn2.py` of fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> HGRN2(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    activates = False
    conv_activation = None

    @dataclass(frozen=True)
    class Config(RecurrentConfig):
        """Sizes and options, as in RecurrentConfig; the convolutions have no activation.

        Args:
            lower_bound: least decay l, in [0, 1). In the paper it grows from layer to layer.
            channel_bounds: True for a least decay of each channel, the buffer lower_bounds
                (num_heads * head_dim,): zeros that a checkpoint replaces.
        """

        joint_norm: ClassVar[bool] = True
        conv_size: int = 0
        gate: str | None = None
        lower_bound: float = 0.0
        channel_bounds: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            require_bound("HGRN2", self.lower_bound, self.channel_bounds)

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        if config.channel_bounds:
            width = config.num_heads * config.k_size
            zeros = torch.zeros(width, device=device, dtype=fp32(dtype))
            self.register_buffer("lower_bounds", zeros)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c = self.config
        logits = k.to(fp32(k.dtype))
        bound: float | Tensor = c.lower_bound
        if c.channel_bounds:
            bound = self.get_buffer("lower_bounds").view(k.shape[2:])
        forgotten, g = bounded_decays(logits, bound)
        g = g.repeat_interleave(c.v_heads // c.num_heads, 2)
        return functional.gated_linear_attention(nnf.silu(q), forgotten.to(q), v, g, **options)


class LightningAttention(RecurrentMixer):
    """Linear attention with a constant decay for each head, which is slower in later layers.

    ``S_t = exp(-r_h) S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t`` with q, k and v ``silu(x W)`` and
    the rates ``r_h = 2^(-8 (h + 1) / H) (1 - layer_idx / (num_layers - 1))``;
    ``y = W_o (norm(o) * sigmoid(x W_g))`` with one norm of all heads.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, g_proj, o_norm, o_proj, and with convolutions q_conv1d,
        k_conv1d, v_conv1d.

    Note:
        `functional.retention` computes it with ``gamma = exp(-r)`` and scale 1. The rates have
        MiniMax's small constants, which keep them above 0 in the last layer.

    Reference:
        Qin et al., Lightning Attention-2, 2024, arXiv 2401.04658; MiniMax, MiniMax-01, 2025, arXiv
        2501.08313. Verified against transformers' MiniMaxLightningAttention.

    Example:
        >>> LightningAttention(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(RecurrentConfig):
        """Sizes and options, as in RecurrentConfig.

        Args:
            layer_idx, num_layers: index of the layer in its model, from 0, and number of layers.
        """

        joint_norm: ClassVar[bool] = True
        conv_size: int = 0
        gate: str | None = "sigmoid"
        layer_idx: int = 0
        num_layers: Size = 1

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 <= self.layer_idx < self.num_layers:
                raise ValueError(
                    "LightningAttention: layer_idx must be in [0, num_layers), "
                    f"got layer_idx={self.layer_idx}, num_layers={self.num_layers}"
                )

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c = self.config
        heads = torch.arange(1, c.v_heads + 1, device=v.device, dtype=fp32(v.dtype))
        place = 1 - c.layer_idx / (c.num_layers - 1 + 1e-5) + 1e-5
        g = (-place * torch.exp2(-8 / c.v_heads * heads)).expand(v.shape[:3])
        return functional.gated_linear_attention(q, k, v, g, scale=1.0, **options)


class ReBased(LinearAttention):
    """Linear attention with the kernel (q . k)^2 of normalised queries and keys.

    ``o_t = sum_{s <= t} (q_t . k_s)^2 v_s / sum_{s <= t} (q_t . k_s)^2`` with
    ``q = layer_norm(x W_q) gamma + beta`` per head, and k alike; ``y = W_o o``. Based is
    LinearAttention with the feature map "taylor".

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, gamma and beta (K), which q and k share: in fla
        feature_map.gamma and feature_map.beta.

    Reference:
        Aksenov et al., Linear Transformers with Learnable Kernel Functions are Better In-Context
        Models, 2024, arXiv 2402.10644. Verified against `ops/rebased/naive.py` of
        fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> ReBased(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LinearAttention.Config):
        """Sizes and options, as in LinearAttention.

        Args:
            norm_eps: eps of the norm of q and k.
        """

        feature_map: str = "square"
        norm_eps: Epsilon = 1e-5

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        like = torch.empty(config.k_size, device=device, dtype=dtype)
        self.gamma, self.beta = nn.Parameter(like), nn.Parameter(like.clone())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets gamma to 1 and beta to 0."""
        nn.init.ones_(self.gamma)
        nn.init.zeros_(self.beta)

    def _rows(self, rows: Tensor) -> Tensor:
        c = self.config
        return functional.layer_norm(rows, self.gamma, self.beta, eps=c.norm_eps, backend=c.backend)


class LightNet(RecurrentMixer):
    """Linear attention whose keys are, for each channel, a softmax over the tokens so far.

    ``o_t = sum_j (q_t . w_tj) v_j / sqrt(K)`` with ``w_tj = softmax_{j <= t}(x_j W_k)`` and
    ``q = silu(x W_q)``; ``y = W_o (norm(o) * silu(x W_g1 W_g2))`` with one norm of all heads.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, g_proj of two layers, o_norm, o_proj, and with
        convolutions q_conv1d, k_conv1d, v_conv1d: names and shapes as in fla, whose g_norm is
        o_norm here.

    Reference:
        Qin et al., You Only Scan Once, 2024, arXiv 2405.21022. Verified against
        `layers/lightnet.py` of fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> LightNet(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    activates = False
    conv_activation = None

    @dataclass(frozen=True)
    class Config(RecurrentConfig):
        """Sizes and options, as in RecurrentConfig; the convolutions have no activation.

        Args:
            gate_rank: width between the two linear layers of the gate.
        """

        joint_norm: ClassVar[bool] = True
        conv_size: int = 0
        gate_rank: Size = 128

        @property
        def states(self) -> dict[str, tuple[int, ...]]:
            """Sums of products, sums of weights, and largest logits."""
            rows = (self.num_heads, self.k_size)
            return {"s": (self.v_heads, *self.state_size), "n": rows, "m": rows}

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        if config.gate is not None:
            values = config.v_heads * config.v_size
            self.g_proj = low_rank(config, config.gate_rank, values, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        return functional.lightnet_attention(nnf.silu(q), k, v, **options)
