"""Layers of a few slots of memory: gated slot attention and ABC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import require_choice
from omniattn.compat._errors import errors_of
from omniattn.compat._fla_norms import FusedRMSNormGated, RMSNorm
from omniattn.compat._fla_parts import RotaryEmbedding
from omniattn.compat._fla_slots import chunk_gsa
from omniattn.compat.fla_layers.base import ACT2FN, RecurrentLayer
from omniattn.compat.fla_layers.linear import T2RFeatureMap


class GatedSlotAttention(RecurrentLayer):
    """Gated slot attention, see :func:`functional.gated_slot_attention`.

    Args:
        mode: "chunk" or "fused_recurrent"; has no effect.
        hidden_size: width of x and y.
        expand_k, expand_v: widths of all keys and values, as multiples of hidden_size.
        num_heads, num_kv_heads: number of heads of queries, and of keys, values and slots.
        use_short_conv, conv_size, conv_bias: short convolutions of q, k and v.
        num_slots: number of slots of a head; the width of its keys by default.
        elementwise_affine: True for a weight of the output norm, whose eps is 1e-5.
        gate_logit_normalizer: log-decays are ``logsigmoid(f) / gate_logit_normalizer``.
        feature_map: function of queries and keys: "swish", "relu" or "t2r".
        layer_idx: number of the layer, for a cache.
        scale: of the logits; None for the inverse root of the width of a key.
        norm_eps, use_output_gate, use_norm, gate_fn, fuse_norm: have no effect, as in fla.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        num_slots: int | None = None,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 8,
        feature_map: str = "swish",
        use_output_gate: bool = False,
        use_norm: bool = True,
        layer_idx: int | None = None,
        scale: float | None = 1.0,
        gate_fn: str = "swish",
        fuse_norm: bool = True,
    ) -> None:
        super().__init__()
        op = "GatedSlotAttention"
        self._start(mode, layer_idx)
        self._sizes(hidden_size, expand_k, expand_v, num_heads)
        self._group(num_kv_heads)
        self.num_slots, self.scale = num_slots or self.head_k_dim, scale
        self.gate_logit_normalizer = gate_logit_normalizer
        require_choice(op, "feature_map", feature_map, ("swish", "relu", "t2r"))
        learned = feature_map == "t2r"
        self.feature_map: Callable[[Tensor], Tensor] = (
            T2RFeatureMap(self.head_k_dim) if learned else ACT2FN[feature_map]
        )
        keys, values = self.key_dim_per_group, self.value_dim_per_group
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.f_proj = nn.Linear(hidden_size, self.num_kv_heads * self.num_slots, bias=False)
        widths = {"q": self.key_dim, "k": keys, "v": values}
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", **widths)
        self.g_norm = RMSNorm(hidden_size, bool(elementwise_affine), dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k = (self.feature_map(t.unflatten(-1, (-1, self.head_k_dim))) for t in projected[:2])
        v = nnf.silu(projected[2]).unflatten(-1, (-1, self.head_v_dim))
        f = nnf.logsigmoid(self.f_proj(x)).unflatten(-1, (-1, self.num_slots))
        f = f / self.gate_logit_normalizer
        shares = (1 - f.exp()).to(v.dtype)
        o, recurrent = chunk_gsa(q, k, v, shares, f, self.scale, **sequences)
        return self.o_proj(self.g_norm(nnf.silu(o).flatten(-2))), recurrent


class ABCAttention(RecurrentLayer):
    """Attention with bounded-memory control, see :func:`functional.abc_attention`.

    Its states continue exactly, where fla's have no weights of past tokens. Padding is left out;
    fla gives it values of 0, and weights in the slots. `cu_seqlens` is accepted, unlike in fla.

    Args:
        hidden_size, expand_k, expand_v, num_heads: see :class:`GatedSlotAttention`.
        use_short_conv, conv_size, conv_bias, num_slots: see there.
        elementwise_affine, norm_eps: norm of the outputs.
        use_rope: True for rotary positions.
        use_input_gate: True for SiLU of q, k and v.
        use_output_gate, use_norm: True for a gate and a norm of the outputs.
        clamp_min, clamp_max: limits of the logits of the slots, or None.
        layer_idx: number of the layer, for a cache.
        gate_low_rank_dim, gate_logit_normalizer, gate_fn, fuse_norm: have no effect, as in fla.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        num_slots: int | None = None,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: int = 16,
        use_rope: bool = True,
        use_input_gate: bool = False,
        use_output_gate: bool = True,
        use_norm: bool = True,
        clamp_min: float | None = -32,
        clamp_max: float | None = 32,
        layer_idx: int | None = None,
        gate_fn: str = "swish",
        fuse_norm: bool = True,
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self._sizes(hidden_size, expand_k, expand_v, num_heads)
        self.num_slots = num_slots or self.head_k_dim
        self.clamp_min, self.clamp_max = clamp_min, clamp_max
        self.use_rope, self.use_input_gate = use_rope, use_input_gate
        self.use_output_gate, self.use_norm = use_output_gate, use_norm
        widths = {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}
        for name, width in widths.items():
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, width, bias=False))
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.s_proj = nn.Linear(hidden_size, num_heads * self.num_slots, bias=False)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", **widths)
        affine = bool(elementwise_affine)
        if use_norm and use_output_gate:
            self.g_norm: nn.Module = FusedRMSNormGated(self.head_v_dim, affine, norm_eps)
        elif use_norm:
            self.g_norm = RMSNorm(self.head_v_dim, affine, eps=norm_eps, dtype=torch.float32)
        if use_rope:
            self.rotary = RotaryEmbedding(self.head_k_dim)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        if self.use_input_gate:
            projected = [nnf.silu(t) for t in projected]
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in projected)
        if self.use_rope:
            q, k = self._rotated(q, k, sequences, given)
        s = self.s_proj(x).unflatten(-1, (-1, self.num_slots))
        if self.clamp_min is not None or self.clamp_max is not None:
            s = s.clamp(self.clamp_min, self.clamp_max)
        options = {name: sequences[name] for name in ("initial_state", "cu_seqlens")}
        with errors_of("ABCAttention"):
            o, recurrent = functional.abc_attention(q, k, v, s, **options)
        if self.use_output_gate:
            gate = self.g_proj(x).unflatten(-1, o.shape[2:])
            o = self.g_norm(o, gate) if self.use_norm else nnf.silu(gate) * o
        elif self.use_norm:
            o = self.g_norm(o)
        y: Tensor = self.o_proj(o.flatten(-2))
        return y, recurrent if sequences["output_final_state"] else None
