"""Layers of a few slots of memory: gated slot attention, ABC, Raven and CyFA."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_int
from omniattn.compat._errors import errors_of
from omniattn.compat._fla.norms import FusedRMSNormGated, RMSNorm
from omniattn.compat._fla.parts import RotaryEmbedding
from omniattn.compat._fla.slots import chunk_cyfa, chunk_gsa
from omniattn.compat.fla_layers.base import ACT2FN, RecurrentLayer
from omniattn.compat.fla_layers.delta import DeltaLayer
from omniattn.compat.fla_layers.feature_maps import T2RFeatureMap
from omniattn.modules.recurrent.delta_net import draw_rates


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
        self._start(mode, layer_idx)
        self._sizes(hidden_size, expand_k, expand_v, num_heads)
        self._group(num_kv_heads)
        self.num_slots, self.scale = num_slots or self.head_k_dim, scale
        self.gate_logit_normalizer = gate_logit_normalizer
        self.feature_map = slot_feature_map("GatedSlotAttention", feature_map, self.head_k_dim)
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
            gated: Any = FusedRMSNormGated(self.head_v_dim, affine, norm_eps)
            self.g_norm = gated
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
            norm: Any = self.g_norm if self.use_norm else None
            o = nnf.silu(gate) * o if norm is None else norm(o, gate)
        elif self.use_norm:
            o = self.g_norm(o)
        y: Tensor = self.o_proj(o.flatten(-2))
        return y, recurrent if sequences["output_final_state"] else None


class Raven(RecurrentLayer):
    """Gated slot attention whose tokens are routed to a few slots, see :class:`modules.Raven`.

    Args:
        mode: "chunk" or "fused_recurrent"; has no effect.
        hidden_size, expand_k, expand_v, num_heads, num_kv_heads, num_slots: see
            :class:`GatedSlotAttention`.
        elementwise_affine, norm_eps: norms of queries, keys and outputs.
        gate_logit_normalizer: divisor of the log-decays of slots.
        feature_map: function of queries and keys: "swish", "relu" or "t2r".
        use_output_gate, gate_fn: gate of the outputs, and the function of it, of values and of
            outputs.
        layer_idx: number of the layer, for a cache.
        scale: of the logits; None for the inverse root of the width of a key.
        decay_type: "Mamba2" for decays of heads, "GLA" for those of slots.
        topk: number of slots of a token; all by default if there are fewer.
        bias_rmm: True for a bias `r_bias` in the choice of slots.
        add_gumbel_noise: True for noise on the router in training.
        router_score, router_type: "sigmoid" or "softmax"; "lin" or "mlp".
        use_rope, rope_theta: rotary positions and their base.
        max_position_embeddings: has no effect: tables of positions grow.
        use_short_conv: must be False, as in fla.
        fuse_norm: False to apply gate_fn to the gate outside of the norm.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        num_slots: int | None = None,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 8,
        feature_map: str = "swish",
        use_output_gate: bool = False,
        gate_fn: str = "swish",
        layer_idx: int | None = None,
        scale: float | None = 1.0,
        decay_type: str = "Mamba2",
        topk: int = 32,
        bias_rmm: bool = False,
        add_gumbel_noise: bool = True,
        router_score: str = "sigmoid",
        router_type: str = "lin",
        use_rope: bool = False,
        rope_theta: float = 10000.0,
        max_position_embeddings: int | None = None,
        use_short_conv: bool = False,
        fuse_norm: bool = True,
    ) -> None:
        super().__init__()
        op = "Raven"
        self._start(mode, layer_idx)
        choices: dict[str, tuple[str, ...]] = {
            "decay_type": ("Mamba2", "GLA"),
            "router_type": ("lin", "mlp"),
            "router_score": ("sigmoid", "softmax"),
            "gate_fn": tuple(ACT2FN),
        }
        given = {"decay_type": decay_type, "router_type": router_type}
        given |= {"router_score": router_score, "gate_fn": gate_fn}
        for name, value in given.items():
            require_choice(op, name, value, choices[name])
        if use_short_conv:
            raise NotImplementedError(f"{op}: use_short_conv must be False, as in fla, got True")
        self._sizes(hidden_size, expand_k, expand_v, num_heads)
        self._group(num_kv_heads)
        self._convolutions(False, 4, False, None)
        self.num_slots = self.head_k_dim if num_slots is None else num_slots
        self.topk = min(topk, self.num_slots) if num_slots is None else topk
        if not 1 <= self.topk <= self.num_slots:
            raise ValueError(
                f"{op}: topk must be in [1, num_slots], got topk={topk}, num_slots={self.num_slots}"
            )
        self.decay_type, self.router_score = decay_type, router_score
        self.scale, self.gate_logit_normalizer = scale, gate_logit_normalizer
        self.bias_rmm, self.add_gumbel_noise = bias_rmm, add_gumbel_noise
        self.use_rope, self.use_output_gate = use_rope, use_output_gate
        self.gate_fn = ACT2FN[gate_fn]
        self.feature_map = slot_feature_map(op, feature_map, self.head_k_dim)
        heads, slots = self.num_kv_heads, self.num_kv_heads * self.num_slots
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim_per_group, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim_per_group, bias=False)
        if decay_type == "Mamba2":
            self.a_proj = nn.Linear(hidden_size, heads, bias=False)
            self.A_log, self.dt_bias = (nn.Parameter(torch.empty(heads)) for _ in range(2))
            with torch.no_grad():
                draw_rates(self.A_log, self.dt_bias, 1e-4)
        else:
            self.f_proj = nn.Linear(hidden_size, slots, bias=False)
        if bias_rmm:
            self.r_bias = nn.Parameter(torch.zeros(heads, self.num_slots))
        self.r_proj: nn.Module = nn.Linear(hidden_size, slots, bias=False)
        if router_type == "mlp":
            inner = nn.Linear(hidden_size, hidden_size)
            self.r_proj = nn.Sequential(inner, nn.GELU(), self.r_proj)
        if use_rope:
            self.rotary = RotaryEmbedding(self.head_k_dim, rope_theta)
        affine = bool(elementwise_affine)
        self.q_norm = RMSNorm(self.head_k_dim, affine, eps=norm_eps)
        self.k_norm = RMSNorm(self.head_k_dim, affine, eps=norm_eps)
        self.fuse_norm_and_gate = fuse_norm and gate_fn in ("swish", "silu", "sigmoid")
        if use_output_gate:
            self.o_gate_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
            self.o_norm: nn.Module = (
                FusedRMSNormGated(self.head_v_dim, affine, norm_eps, gate_fn)
                if self.fuse_norm_and_gate
                else RMSNorm(self.head_v_dim, affine, eps=norm_eps)
            )
        else:
            self.g_norm = RMSNorm(self.value_dim, affine, eps=norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k = (self.feature_map(t.unflatten(-1, (-1, self.head_k_dim))) for t in projected[:2])
        q, k = self.q_norm(q), self.k_norm(k)
        if self.use_rope:
            q, k = self._rotated(q, k, sequences, given)
        v = self.gate_fn(projected[2]).unflatten(-1, (-1, self.head_v_dim))
        f = (self._decays(x) * self._shares(x)).to(q.dtype)
        shares = (1 - f.exp()).to(q.dtype)
        o, recurrent = chunk_gsa(q, k, v, shares, f, self.scale, **sequences)
        o = self.gate_fn(o)
        if not self.use_output_gate:
            return self.o_proj(self.g_norm(o.flatten(-2))), recurrent
        gate = self.o_gate_proj(x).unflatten(-1, o.shape[2:])
        fused = self.fuse_norm_and_gate
        o = self.o_norm(o, gate) if fused else self.o_norm(o) * self.gate_fn(gate)
        return self.o_proj(o.flatten(-2)), recurrent

    def _decays(self, x: Tensor) -> Tensor:
        if self.decay_type == "Mamba2":
            step = nnf.softplus(self.a_proj(x).float() + self.dt_bias)
            return (-self.A_log.float().exp() * step)[..., None]
        f = nnf.logsigmoid(self.f_proj(x)) / self.gate_logit_normalizer
        return f.unflatten(-1, (-1, self.num_slots))

    def _shares(self, x: Tensor) -> Tensor:
        router = self.r_proj(x).unflatten(-1, (-1, self.num_slots))
        if self.add_gumbel_noise and self.training:
            router = router - torch.empty_like(router).exponential_().log()
        sigmoid = self.router_score == "sigmoid"
        scores = router.sigmoid() if sigmoid else router.softmax(-1)
        index = (scores + self.r_bias if self.bias_rmm else scores).topk(self.topk, -1).indices
        best = scores.gather(-1, index)
        if sigmoid:
            best = best / (best.sum(-1, keepdim=True) + 1e-9)
        return torch.zeros_like(router).scatter(-1, index, best.to(router.dtype))


def slot_feature_map(op: str, name: str, width: int) -> Callable[[Tensor], Tensor]:
    """Returns the function or layer that `feature_map` names."""
    require_choice(op, "feature_map", name, ("swish", "relu", "t2r"))
    return T2RFeatureMap(width) if name == "t2r" else ACT2FN[name]


class CyclicFlowAttention(DeltaLayer):
    """Cyclic flow attention, see :func:`functional.cyclic_flow_attention`.

    The layer is that of a pull request to fla, commit 904b95d1.

    Args:
        hidden_size: width of x and y.
        expand_k, expand_v: widths of a head of keys and of values, as multiples of head_dim.
        head_dim, num_heads: width and number of heads.
        mode: "chunk" or "fused_recurrent"; has no effect.
        use_short_conv, conv_size, conv_bias: short convolutions of q, k and v, without activation.
        num_slots: even number, one more than the slots of a head.
        checkpoint_level: 0 or 1; has no effect.
        layer_idx: number of the layer, for a cache.
        norm_eps: added to the mean squares of queries, keys and outputs.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        head_dim: int = 256,
        num_heads: int = 4,
        mode: str = "chunk",
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        num_slots: int = 128,
        checkpoint_level: int = 0,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        op = "CyclicFlowAttention"
        self._start(mode, layer_idx)
        self._heads(hidden_size, expand_v, head_dim, num_heads, None)
        self.expand_k, self.head_k_dim = expand_k, int(head_dim * expand_k)
        if not math.isclose(head_dim * expand_k, self.head_k_dim, rel_tol=1e-5):
            raise ValueError(
                f"{op}: head_dim * expand_k must be an integer, got {head_dim} * {expand_k}"
            )
        require_int(op, "checkpoint_level", checkpoint_level, 0, 1)
        if num_slots < 2 or num_slots % 2:
            raise ValueError(f"{op}: num_slots must be even and > 0, got num_slots={num_slots}")
        self.num_slots, self.num_readout_slots = num_slots, num_slots - 1
        self.checkpoint_level, self.key_dim = checkpoint_level, num_heads * self.head_k_dim
        widths = {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}
        for name, width in widths.items():
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, width, bias=False))
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.d_proj = nn.Linear(hidden_size, num_heads)
        self.b_proj = nn.Linear(hidden_size, num_heads)
        self._decays(torch.empty(num_heads).uniform_(0, 16), num_heads)
        slots = torch.eye(self.num_readout_slots)
        self.readout = nn.Parameter(slots.repeat(num_heads, 1, 1))
        self.q_norm = RMSNorm(self.head_k_dim, eps=norm_eps, dtype=torch.float32)
        self.k_norm = RMSNorm(self.head_k_dim, eps=norm_eps, dtype=torch.float32)
        self._convolutions(use_short_conv, conv_size, conv_bias, None, **widths)
        self._output_of_rank(norm_eps)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in projected)
        step = self.a_proj(x).float() + self.dt_bias
        norms: Any = self.q_norm, self.k_norm
        q_norm, k_norm = norms
        o, recurrent = chunk_cyfa(
            *(q, k, v, -self.A_log.float().exp() * nnf.softplus(step)),
            self.d_proj(x.detach()).float().sigmoid(),
            self.b_proj(x).float().sigmoid(),
            self.readout,
            *(q_norm.weight, k_norm.weight, q_norm.eps, k_norm.eps),
            self.head_k_dim**-0.5,
            **sequences,
        )
        # The factor keeps small means of values above the norm's eps.
        return self._projected_out(o * self.num_readout_slots, x), recurrent
