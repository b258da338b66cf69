"""Attention to a memory of a few slots: gated slot attention, ABC, Raven and CyFA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import require_choice
from omniattn.functional.recurrences.linear_attention import log_sigmoid
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.norm import RMSNorm
from omniattn.modules.recurrent.delta_net import draw_rates
from omniattn.modules.recurrent.recurrent import (
    Device,
    RecurrentConfig,
    RecurrentMixer,
    Result,
    fp32,
    linear,
    low_rank,
)


@dataclass(frozen=True)
class SlotConfig(RecurrentConfig):
    """Sizes and options, as in RecurrentConfig; `num_v_heads` must be None.

    Args:
        num_slots: number M of slots of a head, default head_dim.
    """

    conv_size: int = 0
    num_slots: Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.v_heads != self.num_heads:
            raise ValueError(
                f"{self.layer.__name__}: num_v_heads must be None, "
                f"got num_v_heads={self.num_v_heads}"
            )

    @property
    def slots(self) -> int:
        """Number of slots of a head."""
        return self.num_slots or self.k_size

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """Keys and values of the slots."""
        heads, slots = self.num_heads, self.slots
        return {"keys": (heads, self.k_size, slots), "values": (heads, slots, self.v_size)}


class GatedSlotAttention(RecurrentMixer):
    """Softmax attention to slots, which forget and take in each token by learned shares.

    ``K_t = K_{t-1} diag(a_t) + k_t (1 - a_t)^T``, ``V_t = diag(a_t) V_{t-1} + (1 - a_t) v_t^T``,
    ``o_t = V_t^T softmax(K_t^T q_t)`` with ``a = sigmoid(x W_f)^(1/8)`` and q, k and v each
    ``silu(x W)``; ``y = W_o norm(silu(o))`` with one norm of all heads.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, f_proj (H M, dim), o_norm, o_proj, and with convolutions
        q_conv1d, k_conv1d, v_conv1d: names and shapes as in fla, whose g_norm is o_norm here.

    Note:
        With convolutions, as in fla, SiLU comes after them and once more.

    Reference:
        Zhang et al., Gated Slot Attention, 2024, arXiv 2409.07146. Verified against `layers/gsa.py`
        of fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> GatedSlotAttention(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    activates = False

    @dataclass(frozen=True)
    class Config(SlotConfig):
        """Sizes and options, as in SlotConfig.

        Args:
            gate_normalizer: divisor of ln sigmoid, 8 in the formula above.
        """

        joint_norm: ClassVar[bool] = True
        gate: str | None = None
        gate_normalizer: float = 8.0

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        wide = config.num_heads * config.slots
        self.f_proj = linear(config, config.dim, wide, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c = self.config
        logits: Tensor = self.f_proj(x).unflatten(-1, (c.num_heads, c.slots))
        g = log_sigmoid(logits.to(fp32(logits.dtype))) / c.gate_normalizer
        q, k, v = nnf.silu(q), nnf.silu(k), nnf.silu(v)
        shares = (-torch.expm1(g)).to(q.dtype)
        o, state = functional.gated_slot_attention(q, k, v, shares, g, scale=1.0, **options)
        return nnf.silu(o), state


class ABCAttention(RecurrentMixer):
    """Softmax attention to slots, which hold means of all past keys and values.

    ``o_t = V_t^T softmax(K_t^T q_t / sqrt(K))`` with ``K_t = sum_j k_j w_tj^T``,
    ``V_t = sum_j w_tj v_j^T`` and the weights ``w_tj = softmax_{j <= t}(clamp(x_j W_s))`` of each
    slot; ``y = W_o (norm(o) * silu(x W_g))``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, g_proj, s_proj (H M, dim), o_norm, o_proj, and with
        convolutions q_conv1d, k_conv1d, v_conv1d: names and shapes as in fla, whose g_norm is
        o_norm here.

    Reference:
        Peng et al., ABC: Attention with Bounded-memory Control, 2021, arXiv 2110.02488. Verified
        against `layers/abc.py` of fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> ABCAttention(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    activates = False

    @dataclass(frozen=True)
    class Config(SlotConfig):
        """Sizes and options, as in SlotConfig.

        Args:
            clamp: largest magnitude of the slots' logits.
            rope_interleaved: as in Attention.
        """

        shrink: ClassVar[int] = 2
        expand: ClassVar[int] = 2
        clamp: float = 32.0
        rope_interleaved: bool = False

        @property
        def states(self) -> dict[str, tuple[int, ...]]:
            """Sums of keys and values, of weights, and the largest logit."""
            heads, slots = self.num_heads, self.slots
            sums = {"keys": (heads, self.k_size, slots), "values": (heads, slots, self.v_size)}
            return sums | {"n": (heads, slots), "m": (heads, slots)}

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        wide = config.num_heads * config.slots
        self.s_proj = linear(config, config.dim, wide, device=device, dtype=dtype)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c = self.config
        logits: Tensor = self.s_proj(x).unflatten(-1, (c.num_heads, c.slots))
        return functional.abc_attention(q, k, v, logits.clamp(-c.clamp, c.clamp), **options)


class Raven(RecurrentMixer):
    """Gated slot attention whose tokens are routed to a few slots; the others stay as they are.

    ``K_t = K_{t-1} diag(a_t) + k_t (1 - a_t)^T``, ``V_t = diag(a_t) V_{t-1} + (1 - a_t) v_t^T``,
    ``o_t = V_t^T softmax(K_t^T q_t)`` with ``ln a = -exp(A_log) softplus(x W_a + dt_bias) r``. The
    shares r of the slots are the top_k largest of ``sigmoid(x W_r)``, divided by their sum, and 0
    for the other slots; q and k are ``norm(silu(x W))`` and v is ``silu(x W)``;
    ``y = W_o norm(silu(o))`` with one norm of all heads.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log and dt_bias are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, r_proj (H M, dim), q_norm, k_norm, o_norm, o_proj, and
        a_proj (H, dim), A_log and dt_bias (H), or f_proj (H M, dim) with decays of slots: names and
        shapes as in fla, whose g_norm is o_norm here.

    Reference:
        Raven: High-Recall Sequence Modeling with Sparse Memory Routing, 2026, goombalab/raven.
        Verified against `layers/raven.py` of fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> Raven(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    activates = False

    @dataclass(frozen=True)
    class Config(SlotConfig):
        """Sizes and options, as in SlotConfig.

        Args:
            top_k: number of slots of a token, default 32, or all if there are fewer.
            decay: "heads" for the decays above, "slots" for ``ln sigmoid(x W_f) / 8`` of each slot
                in place of the one of its head.
            router: "sigmoid" for the shares above, "softmax" for those of the softmax over slots.
            noise: True for Gumbel noise on ``x W_r`` in training.
            rope_interleaved: as in Attention.
        """

        joint_norm: ClassVar[bool] = True
        gate: str | None = None
        top_k: Size | None = None
        decay: str = "heads"
        router: str = "sigmoid"
        noise: bool = False
        rope_interleaved: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            require_choice("Raven", "decay", self.decay, ("heads", "slots"))
            require_choice("Raven", "router", self.router, ("sigmoid", "softmax"))
            if self.routed > self.slots:
                raise ValueError(
                    "Raven: top_k must be at most the number of slots, "
                    f"got top_k={self.top_k}, num_slots={self.slots}"
                )

        @property
        def routed(self) -> int:
            """Number of slots of a token."""
            return self.top_k or min(32, self.slots)

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        wide = c.num_heads * c.slots
        self.r_proj = linear(c, c.dim, wide, **factory)
        if c.decay == "heads":
            self.a_proj = linear(c, c.dim, c.num_heads, **factory)
            like = torch.empty(c.num_heads, device=device, dtype=fp32(dtype))
            self.A_log, self.dt_bias = nn.Parameter(like), nn.Parameter(like.clone())
        else:
            self.f_proj = linear(c, c.dim, wide, **factory)
        norm = RMSNorm.Config(c.k_size, c.norm_eps, backend=c.backend)
        self.q_norm, self.k_norm = norm.build(**factory), norm.build(**factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws exp(A_log) from (0, 16) and softplus(dt_bias) from (1e-3, 0.1)."""
        if hasattr(self, "A_log"):
            with torch.no_grad():
                draw_rates(self.A_log, self.dt_bias, 0.0)

    def _part(self, name: str, *given: Any) -> Tensor:
        y = nnf.silu(super()._part(name, *given))
        return y if name == "v" else self.get_submodule(f"{name}_norm")(y)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        g = self._decays(x) * self._shares(x)
        shares = (-torch.expm1(g)).to(q.dtype)
        o, state = functional.gated_slot_attention(q, k, v, shares, g, scale=1.0, **options)
        return nnf.silu(o), state

    def _decays(self, x: Tensor) -> Tensor:
        """Computes log-decays (B, T, H, 1) of heads or (B, T, H, M) of slots."""
        c = self.config
        if c.decay == "slots":
            logits: Tensor = self.f_proj(x).unflatten(-1, (c.num_heads, c.slots))
            return log_sigmoid(logits.to(fp32(logits.dtype))) / 8
        step = self.a_proj(x).to(self.A_log.dtype) + self.dt_bias
        return (-self.A_log.exp() * nnf.softplus(step))[..., None]

    def _shares(self, x: Tensor) -> Tensor:
        """Computes the share of a token for each slot (B, T, H, M), 0 for most slots."""
        c = self.config
        logits: Tensor = self.r_proj(x).unflatten(-1, (c.num_heads, c.slots))
        logits = logits.to(fp32(logits.dtype))
        if c.noise and self.training:
            logits = logits - torch.empty_like(logits).exponential_().log()
        sigmoid = c.router == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        best, index = scores.topk(c.routed, -1)
        if sigmoid:
            best = best / (best.sum(-1, keepdim=True) + 1e-9)
        return torch.zeros_like(scores).scatter(-1, index, best)


class CyclicFlowAttention(RecurrentMixer):
    """Softmax attention to slots of relative time, through which tokens flow with a learned clock.

    `functional.cyclic_flow_attention` with q and k ``norm(conv(x W))``, v ``conv(x W)``,
    ``g = -exp(A_log) softplus(x W_a + dt_bias)``, ``beta = sigmoid(x W_b)`` and ``delta =
    sigmoid(x W_d)``, which has no gradient to x; ``y = W_o (norm(P o) * sigmoid(x W_g1 W_g2))``
    with P slots.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log, dt_bias and readout are created
            in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, a_proj, b_proj and d_proj with biases, A_log and
        dt_bias (H), readout (H, P, P), q_conv1d, k_conv1d, v_conv1d, q_norm, k_norm, g_proj of two
        layers and o_norm: names and shapes as in fla, whose num_slots is P + 1.

    Reference:
        CyFA: Linear Sequence Modeling with Relative-Time-Partitioned Memory, 2026, arXiv
        2609.36259. The formula is that of `layers/cyfa.py` of fla-org/flash-linear-attention,
        commit 904b95d1.

    Example:
        >>> CyclicFlowAttention(dim=8, num_heads=2, num_slots=5)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    activates = False
    conv_activation = None

    @dataclass(frozen=True)
    class Config(SlotConfig):
        """Sizes and options, as in SlotConfig; the convolutions have no activation.

        Args:
            num_slots: odd number P of slots of a head, default 127.
        """

        conv_size: int = 4
        gate: str | None = "sigmoid"

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.slots % 2 == 0:
                raise ValueError(
                    f"CyclicFlowAttention: num_slots must be odd, got num_slots={self.num_slots}"
                )

        @property
        def slots(self) -> int:
            """Number of slots of a head."""
            return self.num_slots or 127

        @property
        def states(self) -> dict[str, tuple[int, ...]]:
            """Waves of keys and values over slots, and the clocks."""
            heads, waves = self.num_heads, self.slots + 1
            pair = {"keys": (heads, self.k_size, waves), "values": (heads, waves, self.v_size)}
            return pair | {"clock": (heads,)}

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.a_proj = linear(c, c.dim, c.num_heads, **factory)
        self.b_proj = linear(c, c.dim, c.num_heads, True, **factory)
        self.d_proj = linear(c, c.dim, c.num_heads, True, **factory)
        if c.gate is not None:
            self.g_proj = low_rank(c, c.v_size, c.num_heads * c.v_size, True, **factory)
        norm = RMSNorm.Config(c.k_size, c.norm_eps, backend=c.backend)
        self.q_norm, self.k_norm = norm.build(**factory), norm.build(**factory)
        like = torch.empty(c.num_heads, device=device, dtype=fp32(dtype))
        self.A_log, self.dt_bias = nn.Parameter(like), nn.Parameter(like.clone())
        self.readout = nn.Parameter(like.new_empty(c.num_heads, c.slots, c.slots))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws exp(A_log) from (0, 16) and softplus(dt_bias) from (1e-3, 0.1); readout is 1."""
        draw_rates(self.A_log, self.dt_bias, 0.0)
        self.readout.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)

    def _part(self, name: str, *given: Any) -> Tensor:
        y = super()._part(name, *given)
        return y if name == "v" else self.get_submodule(f"{name}_norm")(y)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        wide = self.A_log.dtype
        step = self.a_proj(x).to(wide) + self.dt_bias
        g = -self.A_log.exp() * nnf.softplus(step)
        delta, beta = (y.to(wide).sigmoid() for y in (self.d_proj(x.detach()), self.b_proj(x)))
        o, state = functional.cyclic_flow_attention(
            q, k, v, g, delta, beta, self.readout, **options
        )
        # The factor keeps small means of values above the norm's eps.
        return o * self.config.slots, state
