"""Attention to a memory of a few slots: gated slot attention and ABC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.functional.recurrences.linear_attention import log_sigmoid
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
            totals = dict.fromkeys(("n", "m"), (self.num_heads, self.slots))
            return super().states | totals

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
