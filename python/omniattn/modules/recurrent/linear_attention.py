"""Linear attention: plain, gated per feature or head, with decays per channel or head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import require_choice
from omniattn.functional.recurrences.linear_attention import (
    FEATURE_MAPS,
    SIGNED,
    feature_size,
    log_sigmoid,
)
from omniattn.modules.base.fields import Backend, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.recurrent.headwise import per_head
from omniattn.modules.recurrent.recurrent import (
    Device,
    RecurrentConfig,
    RecurrentMixer,
    Result,
    fp32,
    low_rank,
    zeros_of_states,
)
from omniattn.modules.recurrent.state_mixer import StateMixer


class LinearAttention(StateMixer):
    """Attention with the kernel ``phi(q) . phi(k)`` instead of ``exp(q . k)``.

    ``o_t = sum_{s <= t} (phi(q_t) . phi(k_s)) v_s / sum_{s <= t} phi(q_t) . phi(k_s)``, or the sums
    over all s if not causal; ``y = W_o o``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj.

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
            dim, num_heads, head_dim: width of x and y; number of heads; width of a head, default
                dim // num_heads.
            feature_dim: width of a head of q and k, default that of v.
            feature_map, normalize: phi, and True to divide by the sum, as in
                functional.linear_attention.
            causal: True if tokens attend only to themselves and earlier tokens.
            init_std, backend: as in Attention.
        """

        dim: Size
        num_heads: Size
        head_dim: Size | None = None
        feature_map: str = "elu1"
        normalize: bool | None = None
        causal: bool = True
        init_std: float = 0.02
        backend: Backend = None
        feature_dim: Size | None = field(default=None, kw_only=True)

        def __post_init__(self) -> None:
            super().__post_init__()
            require_choice("LinearAttention", "feature_map", self.feature_map, FEATURE_MAPS)
            if self.head_dim is None:
                self._require_multiple("dim", "num_heads")

        @property
        def v_size(self) -> int:
            """Width of a head of v."""
            return self.head_dim or self.dim // self.num_heads

        @property
        def k_size(self) -> int:
            """Width of a head of q and k."""
            return self.feature_dim or self.v_size

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        keys, values = c.num_heads * c.k_size, c.num_heads * c.v_size

        def linear(n_in: int, n_out: int) -> Linear:
            config = Linear.Config(n_in, n_out, False, c.init_std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.q_proj, self.k_proj = linear(c.dim, keys), linear(c.dim, keys)
        self.v_proj, self.o_proj = linear(c.dim, values), linear(values, c.dim)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros `s` in fp32 (fp64 for fp64), as in functional.linear_attention."""
        c = self.config
        if not c.causal:
            raise ValueError("LinearAttention: a state must have causal=True, got causal=False")
        like = zeros_of_states(self.o_proj.weight, storage)
        divided = c.feature_map not in SIGNED if c.normalize is None else c.normalize
        shape = (batch, c.num_heads, feature_size(c.feature_map, c.k_size), c.v_size + divided)
        return RecurrentState(s=like.new_zeros(shape))

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        q, k, v = (
            projected(x).unflatten(-1, (c.num_heads, -1))
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self._rows(q), self._rows(k)
        g, beta = self._gates(x, q, k)
        o, s = functional.linear_attention(
            q,
            k,
            v,
            feature_map=c.feature_map,
            causal=c.causal,
            normalize=c.normalize,
            g=g,
            beta=beta,
            initial_state=None if state is None else state["s"],
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        return self.o_proj(o.flatten(-2)), {"s": s}

    def _rows(self, rows: Tensor) -> Tensor:
        """Maps queries or keys (B, T, H, K) before their feature map."""
        return rows

    def _gates(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns g and beta of functional.linear_attention."""
        return None, None


class DeltaAttention(LinearAttention):
    """Linear attention with a forget gate and an input gate per feature.

    ``o_t = phi(q_t)^T S_t / (phi(q_t) . z_t)`` with
    ``S_t = diag(g_t) S_{t-1} + (b_t * phi(k_t)) v_t^T``,
    ``z_t = g_t * z_{t-1} + b_t * phi(k_t)``, and per head ``g_t = sigmoid(W_g q_t + c_g)``,
    ``b_t = sigmoid(W_b k_t + c_b)``; ``y = W_o o``. The state has the size of LinearAttention's.
    Unlike the delta rule of DeltaNet, nothing is subtracted from it.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, g_weight and b_weight (H, K', K), or (H, K', dim)
        for gates computed from x, g_bias and b_bias (H, K'); K' is the number of key features, or 1
        for gates per head.

    Reference:
        Katharopoulos et al., Transformers are RNNs, 2020, arXiv 2006.16236, for the state; the
        gates are specific to this package.

    Example:
        >>> DeltaAttention(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    #: Biases by head, without weight decay.
    undecayed: ClassVar[tuple[str, ...]] = ("g_bias", "b_bias")

    @dataclass(frozen=True)
    class Config(LinearAttention.Config):
        """Sizes and options, as in LinearAttention; causal only.

        Args:
            gates: "features" for gates per feature, or "heads" for gates per head.
            gates_of: "qk" to compute g from q and b from k, or "x" to compute both from x.
            b_bias: True to add the bias c_b.
        """

        gates: str = "features"
        gates_of: str = "qk"
        b_bias: bool = True

        def __post_init__(self) -> None:
            super().__post_init__()
            require_choice("DeltaAttention", "gates", self.gates, ("features", "heads"))
            require_choice("DeltaAttention", "gates_of", self.gates_of, ("qk", "x"))
            if not self.causal:
                raise ValueError("DeltaAttention: causal must be True, got causal=False")

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        size = c.k_size
        gates = feature_size(c.feature_map, size) if c.gates == "features" else 1
        shape = (c.num_heads, gates, size if c.gates_of == "qk" else c.dim)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.g_weight = nn.Parameter(torch.empty(shape, **factory))
        self.b_weight = nn.Parameter(torch.empty(shape, **factory))
        self.g_bias = nn.Parameter(torch.empty(shape[:2], **factory))
        self.b_bias = nn.Parameter(torch.empty(shape[:2], **factory)) if c.b_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights from N(0, init_std^2); c_g = 4 for slow decays, c_b = 0."""
        for weight in (self.g_weight, self.b_weight):
            nn.init.normal_(weight, std=self.config.init_std)
        nn.init.constant_(self.g_bias, 4.0)
        if self.b_bias is not None:
            nn.init.zeros_(self.b_bias)

    def _gates(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        g = log_sigmoid(self._logits(self.g_weight, self.g_bias, x, q))
        beta = self._logits(self.b_weight, self.b_bias, x, k).sigmoid()
        return g, beta

    def _logits(self, weight: Tensor, bias: Tensor | None, x: Tensor, heads: Tensor) -> Tensor:
        """Computes gate logits (B, T, H, K') or (B, T, H) from the heads (B, T, H, K) or from x.

        The dtype is fp32 (fp64 for fp64).
        """
        c = self.config
        if c.gates_of == "qk":
            logits = per_head(heads, weight)
        else:
            y: Tensor = functional.linear(x, weight.flatten(0, 1), backend=c.backend)
            logits = y.unflatten(-1, tuple(weight.shape[:2]))
        logits = logits.to(fp32(logits.dtype))
        if bias is not None:
            logits = logits + bias
        return logits if c.gates == "features" else logits.squeeze(-1)


class GatedLinearAttention(RecurrentMixer):
    """Linear attention with one decay per key channel and token.

    ``S_t = diag(a_t) S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t / sqrt(K)`` with
    ``ln a_t = ln sigmoid(x W_1 W_2 + b) / 16``; ``y = W_o (norm(o) * silu(x W_g))``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, g_proj, o_proj, gk_proj of two layers, o_norm, and with
        convolutions q_conv1d, k_conv1d, v_conv1d: names and shapes as in fla, whose
        g_norm_swish_gate is o_norm here.

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
            gate_rank: width between the two linear layers of the decay.
            gate_normalizer: divisor of ln sigmoid, 16 in the formula above.
        """

        shrink: ClassVar[int] = 2
        expand: ClassVar[int] = 2
        conv_size: int = 0
        gate_rank: Size = 16
        gate_normalizer: float = 16.0

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        keys = config.v_heads * config.k_size
        self.gk_proj = low_rank(config, config.gate_rank, keys, True, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c = self.config
        logits: Tensor = self.gk_proj(x).unflatten(-1, (c.v_heads, c.k_size))
        g = log_sigmoid(logits.to(fp32(logits.dtype))) / c.gate_normalizer
        return functional.gated_linear_attention(q, k, v, g, **options)


class MultiScaleRetention(RecurrentMixer):
    """Retention: linear attention with one constant decay per head.

    ``S_t = gamma_h S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t / sqrt(K)`` with
    ``gamma_h = 1 - 2^(-5 - h)``, rotated q and k; ``y = W_o (norm(o) * silu(x W_g))``. With
    `normalize`, o is divided by a positive factor per row, which the norm cancels up to its eps,
    see :func:`functional.retention`.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, g_proj, o_proj, o_norm, and with convolutions q_conv1d,
        k_conv1d, v_conv1d: names and shapes as in fla, whose g_norm_swish_gate is o_norm here.

    Reference:
        Sun et al., Retentive Network, 2023, arXiv 2307.08621.

    Example:
        >>> MultiScaleRetention(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    activates = False

    @dataclass(frozen=True)
    class Config(RecurrentConfig):
        """Sizes and options, as in RecurrentConfig.

        Args:
            rope_interleaved: as in Attention.
            normalize: True to normalise o as in the paper and in torchscale.
        """

        expand: ClassVar[int] = 2
        conv_size: int = 0
        rope_interleaved: bool = False
        normalize: bool = False

        @property
        def state_size(self) -> tuple[int, int]:
            return self.k_size + self.normalize, self.v_size + self.normalize

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        return functional.retention(q, k, v, normalize=self.config.normalize, **options)
