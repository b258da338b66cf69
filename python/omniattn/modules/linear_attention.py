"""Mixers on linear attention: LinearAttention, GatedLinearAttention, MultiScaleRetention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.functional._checks import require_choice
from omniattn.functional.recurrence import FEATURE_MAPS, SIGNED, feature_size
from omniattn.modules import _signatures
from omniattn.modules.layer import LayerConfig, config_or_fields
from omniattn.modules.linear import Linear
from omniattn.modules.recurrent import (
    Device,
    RecurrentConfig,
    RecurrentMixer,
    Result,
    fp32,
    low_rank,
    zeros_of_states,
)
from omniattn.modules.state import RecurrentState, Storage
from omniattn.modules.state_mixer import StateMixer


class LinearAttention(StateMixer):
    """Attention with the kernel ``phi(q) . phi(k)`` in place of ``exp(q . k)``.

    ``o_t = sum_{s <= t} (phi(q_t) . phi(k_s)) v_s / sum_{s <= t} phi(q_t) . phi(k_s)``; over all s
    if not causal. ``y = W_o o``.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim) -> the same. Parameters q_proj, k_proj, v_proj, o_proj.

    Reference:
        Katharopoulos et al., Transformers are RNNs, 2020, arXiv 2006.16236.

    Example:
        >>> LinearAttention(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim, num_heads, head_dim: width of x and y; heads; width of a head, default
                dim // num_heads.
            feature_map, normalize: phi and whether to divide, as in functional.linear_attention.
            causal: whether tokens see earlier ones and themselves only.
            init_std, backend: as in Attention.
        """

        dim: int
        num_heads: int
        head_dim: int | None = None
        feature_map: str = "elu1"
        normalize: bool | None = None
        causal: bool = True
        init_std: float = 0.02
        backend: str | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            require_choice("LinearAttention", "feature_map", self.feature_map, FEATURE_MAPS)
            if self.head_dim is None:
                self._require_multiple("dim", "num_heads")

    @config_or_fields(Config, _signatures.LinearAttention)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        wide = c.num_heads * (c.head_dim or c.dim // c.num_heads)

        def linear(n_in: int, n_out: int) -> Linear:
            config = Linear.Config(n_in, n_out, False, c.init_std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.q_proj, self.k_proj = linear(c.dim, wide), linear(c.dim, wide)
        self.v_proj, self.o_proj = linear(c.dim, wide), linear(wide, c.dim)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Zeros `s` in fp32 (fp64 for fp64), as in functional.linear_attention."""
        c = self.config
        if not c.causal:
            raise ValueError("LinearAttention: a state must have causal=True, got causal=False")
        like = zeros_of_states(self.o_proj.weight, storage)
        size = c.head_dim or c.dim // c.num_heads
        divided = c.feature_map not in SIGNED if c.normalize is None else c.normalize
        shape = (batch, c.num_heads, feature_size(c.feature_map, size), size + divided)
        return RecurrentState(s=like.new_zeros(shape))

    def _mix(
        self, x: Tensor, state: RecurrentState | None, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        q, k, v = (
            projected(x).unflatten(-1, (c.num_heads, -1))
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        o, s = functional.linear_attention(
            q,
            k,
            v,
            feature_map=c.feature_map,
            causal=c.causal,
            normalize=c.normalize,
            initial_state=None if state is None else state["s"],
            backend=c.backend,
        )
        return self.o_proj(o.flatten(-2)), {"s": s}


class GatedLinearAttention(RecurrentMixer):
    """Linear attention whose state decays by a factor for each channel of the keys and token.

    ``S_t = diag(a_t) S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t / sqrt(K)`` with
    ``ln a_t = ln sigmoid(x W_1 W_2 + b) / 16``; ``y = W_o (norm(o) * silu(x W_g))``.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim) -> the same. Parameters q_proj, k_proj, v_proj, g_proj, o_proj, gk_proj of two
        layers, o_norm, and with convolutions q_conv1d, k_conv1d, v_conv1d: names and shapes as in
        fla, whose g_norm_swish_gate is o_norm here.

    Reference:
        Yang et al., Gated Linear Attention Transformers, 2023, arXiv 2312.06635.

    Example:
        >>> GatedLinearAttention(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    activates = False

    @dataclass(frozen=True)
    class Config(RecurrentConfig):
        """Sizes and options, as in RecurrentConfig.

        Args:
            gate_rank: width between the two layers of the decay.
            gate_normaliser: what ln sigmoid is divided by.
        """

        shrink: ClassVar[int] = 2
        expand: ClassVar[int] = 2
        conv_size: int = 0
        gate_rank: int = 16
        gate_normaliser: float = 16.0

    config: Config

    @config_or_fields(Config, _signatures.GatedLinearAttention)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        keys = config.v_heads * config.k_size
        self.gk_proj = low_rank(config, config.gate_rank, keys, True, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c = self.config
        logits: Tensor = self.gk_proj(x).unflatten(-1, (c.v_heads, c.k_size))
        g = nnf.logsigmoid(logits.to(fp32(logits.dtype))) / c.gate_normaliser
        return functional.gated_linear_attention(q, k, v, g, **options)


class MultiScaleRetention(RecurrentMixer):
    """Linear attention whose heads forget at rates of their own: retention.

    ``S_t = gamma_h S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t / sqrt(K)`` with
    ``gamma_h = 1 - 2^(-5 - h)``, rotated q and k; ``y = W_o (norm(o) * silu(x W_g))``.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim) -> the same. Parameters q_proj, k_proj, v_proj, g_proj, o_proj, o_norm, and
        with convolutions q_conv1d, k_conv1d, v_conv1d: names and shapes as in fla, whose
        g_norm_swish_gate is o_norm here.

    Reference:
        Sun et al., Retentive Network, 2023, arXiv 2307.08621.

    Example:
        >>> MultiScaleRetention(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    activates = False

    @dataclass(frozen=True)
    class Config(RecurrentConfig):
        """Sizes and options, as in RecurrentConfig; rope_interleaved as in Attention."""

        expand: ClassVar[int] = 2
        conv_size: int = 0
        rope_interleaved: bool = False

    config: Config

    @config_or_fields(Config, _signatures.MultiScaleRetention)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)

    def rotated(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """q and k at their positions."""
        c = self.config
        q, turned = functional.apply_rotary(
            q, k, *rope, interleaved=c.rope_interleaved, backend=c.backend
        )
        assert turned is not None
        return q, turned

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        return functional.retention(q, k, v, **options)
