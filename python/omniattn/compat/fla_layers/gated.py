"""Layers with decays: gated linear attention, retention, simple GLA, HGRN, HGRN-2, LightNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.compat._errors import errors_of
from omniattn.compat._fla.heads import chunk_simple_gla
from omniattn.compat._fla.linear import chunk_gla, chunk_hgrn, chunk_retention
from omniattn.compat._fla.norms import FusedRMSNormGated, RMSNorm
from omniattn.compat._fla.parts import RotaryEmbedding
from omniattn.compat.fla_layers.base import (
    Layer,
    RecurrentLayer,
    Result,
    feature_map_of,
    get_layer_cache,
    update_layer_cache,
)


class GatedLinearAttention(RecurrentLayer):
    """Gated linear attention, see :func:`functional.gated_linear_attention`.

    Args:
        mode: "chunk", "fused_recurrent" or "fused_chunk"; has no effect.
        hidden_size: width of x and y.
        expand_k, expand_v: widths of all keys and values, as multiples of hidden_size.
        num_heads, num_kv_heads: number of heads of queries, and of keys and values.
        feature_map: function of queries and keys, such as "relu", or None.
        use_short_conv, conv_size, conv_bias: short convolutions of q, k and v.
        use_output_gate, gate_fn: gate of the outputs and its function.
        elementwise_affine, norm_eps, fuse_norm: norm of the outputs.
        gate_logit_normalizer, gate_low_rank_dim, clamp_min: log-decays are
            ``logsigmoid(gk) / gate_logit_normalizer``, at least clamp_min.
        layer_idx: number of the layer, for a cache.
    """

    modes = ("chunk", "fused_recurrent", "fused_chunk")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        self._sizes(hidden_size, expand_k, expand_v, num_heads)
        self._group(num_kv_heads)
        self.feature_map_fn = feature_map_of("GatedLinearAttention", feature_map)
        self.use_output_gate, self.clamp_min = use_output_gate, clamp_min
        self.gate_logit_normalizer = gate_logit_normalizer
        keys, values = self.key_dim_per_group, self.value_dim_per_group
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        widths = {"q": self.key_dim, "k": keys, "v": values}
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", **widths)
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, keys),
        )
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self._output_norm(gate_fn, fuse_norm, elementwise_affine, norm_eps, use_output_gate)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = projected
        q, k, gk = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k, self.gk_proj(x)))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        k, v, gk = (t.repeat_interleave(self.num_kv_groups, -2) for t in (k, v, gk))
        gk = nnf.logsigmoid(gk) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            gk = gk.clamp_min(self.clamp_min)
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        o, recurrent = chunk_gla(
            q, k, v, gk,
            state_v_first=True, **sequences,
        )  # fmt: skip
        return self.o_proj(
            self._normed(o, self.g_proj(x) if self.use_output_gate else None)
        ), recurrent


class MultiScaleRetention(RecurrentLayer):
    """Retention with rotary positions, see :func:`functional.retention`.

    Args:
        mode: "chunk", "fused_chunk", "parallel" or "fused_recurrent"; has no effect.
        hidden_size, expand_k, expand_v, num_heads, num_kv_heads: see
            :class:`GatedLinearAttention`.
        feature_map, use_short_conv, conv_size, conv_bias: see there.
        use_output_gate, gate_fn, elementwise_affine, norm_eps, fuse_norm, layer_idx: see there.
    """

    modes = ("chunk", "fused_chunk", "parallel", "fused_recurrent")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        self._sizes(hidden_size, expand_k, expand_v, num_heads)
        self._group(num_kv_heads)
        self.feature_map_fn = feature_map_of("MultiScaleRetention", feature_map)
        self.use_output_gate = use_output_gate
        keys, values = self.key_dim_per_group, self.value_dim_per_group
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        widths = {"q": self.key_dim, "k": keys, "v": values}
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", **widths)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self._output_norm(gate_fn, fuse_norm, elementwise_affine, norm_eps, use_output_gate)
        self.rotary = RotaryEmbedding(self.head_k_dim)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = projected
        q, k = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        q, k = self._rotated(q, k, sequences, given)
        k, v = (t.repeat_interleave(self.num_kv_groups, -2) for t in (k, v))
        o, recurrent = chunk_retention(
            q, k, v,
            **sequences,
        )  # fmt: skip
        return self.o_proj(
            self._normed(o, self.g_proj(x) if self.use_output_gate else None)
        ), recurrent


class SimpleGatedLinearAttention(Layer):
    """Linear attention with a decay for each head, see `functional.gated_linear_attention`.

    Args:
        mode: "chunk" or "fused_recurrent"; has no effect.
        hidden_size, expand_k, expand_v, num_heads, num_kv_heads: see
            :class:`GatedLinearAttention`.
        feature_map, use_short_conv, conv_size, conv_bias, gate_fn: see there.
        elementwise_affine, norm_eps, gate_logit_normalizer, fuse_norm, layer_idx: see there.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 16,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        self._sizes(hidden_size, expand_k, expand_v, num_heads)
        self._group(num_kv_heads)
        self.feature_map_fn = feature_map_of("SimpleGatedLinearAttention", feature_map)
        self.gate_logit_normalizer = gate_logit_normalizer
        keys, values = self.key_dim_per_group, self.value_dim_per_group
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        widths = {"q": self.key_dim, "k": keys, "v": values}
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", **widths)
        self.gk_proj = nn.Linear(hidden_size, num_heads)
        self._output_norm(gate_fn, fuse_norm, elementwise_affine, norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; `cu_seqlens` are the boundaries of packed sequences.

        Padding gives values of 0 and still decays states, as in fla.
        """
        _, tokens = self._checked(hidden_states, attention_mask)
        state = get_layer_cache(self, past_key_values)
        x, cu = hidden_states, kwargs.get("cu_seqlens")
        mask = None if attention_mask is None else attention_mask[:, -tokens:]
        options = {"cu_seqlens": cu, "mask": mask} if self.use_short_conv else {}
        (q, k, v), conv = self._convolved(x, state, use_cache, **options)
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        if mask is not None:
            v = v * mask[..., None].to(v.dtype)
        q = q.unflatten(-1, (self.num_heads, -1))
        k, v = (
            t.unflatten(-1, (self.num_kv_heads, -1)).repeat_interleave(self.num_kv_groups, -2)
            for t in (k, v)
        )
        gk = nnf.logsigmoid(self.gk_proj(x)) / self.gate_logit_normalizer
        o, recurrent = chunk_simple_gla(
            q, k, v, gk,
            initial_state=None if state is None else state["recurrent_state"],
            output_final_state=bool(use_cache), state_v_first=True, cu_seqlens=cu,
        )  # fmt: skip
        states = {"recurrent_state": recurrent, "conv_state": conv}
        update_layer_cache(self, past_key_values, **states, offset=tokens)
        return self.o_proj(self._normed(o, self.g_proj(x))), None, past_key_values


class _BoundedLayer(RecurrentLayer):
    """Base class of HGRN layers: decays have a lower bound."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        lower_bound: Tensor | None = None,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; `lower_bound` (hidden_size,) of decays from layer 1 on."""
        call = hidden_states, attention_mask, past_key_values, use_cache, output_attentions
        return super().forward(*call, lower_bound=lower_bound, **kwargs)

    def _log_decays(self, f: Tensor, lower_bound: Tensor | None) -> Tensor:
        """Returns the logarithms of decays with logits f, above the bound from layer 1 on."""
        g = nnf.logsigmoid(f)
        if lower_bound is not None and (self.layer_idx or 0) > 0:
            g = torch.logaddexp(lower_bound.log(), torch.log1p(-lower_bound) + g)
        return g


class HGRNAttention(_BoundedLayer):
    """HGRN, see :func:`functional.linear_scan`: ``h_t = f_t h_{t-1} + (1 - f_t) silu(i_t)``.

    Args:
        mode: "chunk" or "fused_recurrent"; has no effect.
        hidden_size: width of x and y.
        expand_ratio: width of the recurrence, as a multiple of hidden_size.
        use_short_conv, conv_size, conv_bias: short convolutions of i and f.
        elementwise_affine, norm_eps: norm of the outputs.
        layer_idx: number of the layer, for a cache and `lower_bound`.
    """

    _projected = ("i", "f")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_ratio: int | None = 1,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        self.hidden_size, self.expand_ratio = (
            hidden_size,
            1 if expand_ratio is None else expand_ratio,
        )
        self.input_dim = width = int(hidden_size * self.expand_ratio)
        self.i_proj = nn.Linear(hidden_size, width, bias=False)
        self.f_proj = nn.Linear(hidden_size, width, bias=False)
        self.g_proj = nn.Linear(hidden_size, width, bias=False)
        self._convolutions(use_short_conv, conv_size, conv_bias, None, f=width, i=width)
        self.g_norm = FusedRMSNormGated(width, bool(elementwise_affine), norm_eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        i, f = projected
        g = self._log_decays(f, given["lower_bound"])
        o, recurrent = chunk_hgrn(nnf.silu(i) * (1 - g.exp()).to(i.dtype), g, **sequences)
        return self.o_proj(self.g_norm(o, self.g_proj(x))), recurrent


class HGRN2Attention(_BoundedLayer):
    """HGRN-2: a linear recurrence whose keys are 1 minus the decays.

    Args:
        mode: "chunk", "fused_recurrent" or "fused_chunk"; has no effect.
        hidden_size: width of x and y.
        num_heads: number of heads; hidden_size // expand_ratio if expand_ratio is given.
        expand_ratio: width of a head of q and f, or None.
        use_short_conv, conv_size, conv_bias: short convolutions of q, f and i.
        elementwise_affine: True for a weight of the output norm, whose eps is 1e-5.
        layer_idx: number of the layer, for a cache and `lower_bound`.
        norm_eps: has no effect, as in fla.
    """

    modes = ("chunk", "fused_recurrent", "fused_chunk")
    _projected = ("q", "f", "i")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        if expand_ratio is not None:
            num_heads = hidden_size // expand_ratio
        if not num_heads or hidden_size % num_heads:
            raise ValueError(
                "HGRN2Attention: expand_ratio or num_heads must divide hidden_size, got "
                f"expand_ratio={expand_ratio}, num_heads={num_heads}, hidden_size={hidden_size}"
            )
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.expand_ratio = expand_ratio or hidden_size // num_heads
        self.forget_dim, self.input_dim = num_heads * self.expand_ratio, hidden_size
        self.head_f_dim, self.head_i_dim = self.expand_ratio, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, self.forget_dim, bias=False)
        self.f_proj = nn.Linear(hidden_size, self.forget_dim, bias=False)
        self.i_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        widths = {"q": self.forget_dim, "f": self.forget_dim, "i": hidden_size}
        self._convolutions(use_short_conv, conv_size, conv_bias, None, **widths)
        affine = bool(elementwise_affine)
        self.g_norm = RMSNorm(hidden_size, affine, dtype=torch.float32)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, f, i = projected
        g = self._log_decays(f, given["lower_bound"])
        k = 1 - g.exp()
        heads = (t.unflatten(-1, (-1, self.head_f_dim)) for t in (nnf.silu(q), k.to(i.dtype), g))
        q, k, g = heads
        o, recurrent = chunk_gla(
            q, k, i.unflatten(-1, (-1, self.head_i_dim)), g,
            state_v_first=True, **sequences,
        )  # fmt: skip
        return self.o_proj(self.g_norm(o.flatten(-2))), recurrent


class LightNetAttention(RecurrentLayer):
    """LightNet's attention, see :func:`functional.lightnet_attention`.

    `cu_seqlens` is accepted, unlike in fla.

    Args:
        mode: "chunk" or "fused_chunk"; has no effect.
        hidden_size: width of x and y.
        num_heads: number of heads; hidden_size // expand_ratio by default.
        expand_ratio: width of a head of q and k; hidden_size // num_heads if None.
        use_short_conv, conv_size, conv_bias: short convolutions of q, k and v.
        gate_low_rank_dim: width between the two layers of the gate.
        elementwise_affine: True for a weight of the output norm, whose eps is 1e-6.
        layer_idx: number of the layer, for a cache.
        norm_eps: has no effect, as in fla.
    """

    modes = ("chunk", "fused_chunk")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_low_rank_dim: int = 128,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        if num_heads is None and expand_ratio is not None:
            num_heads = hidden_size // expand_ratio
        if not num_heads or hidden_size % num_heads:
            raise ValueError(
                "LightNetAttention: expand_ratio or num_heads must divide hidden_size, got "
                f"expand_ratio={expand_ratio}, num_heads={num_heads}, hidden_size={hidden_size}"
            )
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.expand_ratio = expand_ratio or hidden_size // num_heads
        self.key_dim, self.value_dim = num_heads * self.expand_ratio, hidden_size
        widths = {"q": self.key_dim, "k": self.key_dim, "v": hidden_size}
        for name, width in widths.items():
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, width, bias=False))
        self._convolutions(use_short_conv, conv_size, conv_bias, None, **widths)
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, hidden_size, bias=False),
        )
        norm: Any = FusedRMSNormGated(hidden_size, bool(elementwise_affine), 1e-6)
        self.g_norm = norm
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in projected)
        options = {name: sequences[name] for name in ("initial_state", "cu_seqlens")}
        with errors_of("LightNetAttention"):
            o, recurrent = functional.lightnet_attention(nnf.silu(q), k, v, **options)
        norm: Any = self.g_norm
        y: Tensor = self.o_proj(norm(o.flatten(-2), self.g_proj(x)))
        return y, recurrent if sequences["output_final_state"] else None
