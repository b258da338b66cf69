"""Decoders with multi-head latent attention: dense, and with the experts of DeepSeek-V2 and V3."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from omniattn.checks.arguments import shown
from omniattn.models.decoders.family import LlamaFamilyConfig, llama_counterpart
from omniattn.models.hf import Conversion
from omniattn.modules import (
    DeepSeekSparseAttention,
    GatedMLP,
    MoE,
    MultiHeadLatentAttention,
    MultiTokenPredictor,
)
from omniattn.modules.base.fields import Epsilon, Positive, Size, SizeOrZero
from omniattn.modules.base.layer import LayerConfig
from omniattn.reference import scaling_to_hf

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


#: Epsilon of the norms of latents in transformers, whatever the config says.
_LATENT_EPS = 1e-6


def _mscale_to_hf(ours: LatentExpertsConfig) -> dict[str, Any]:
    if isinstance(ours, DeepSeekConfig) and ours.mtp_depths:
        raise NotImplementedError(
            "DeepSeekConfig: transformers predicts no further tokens; "
            f"mtp_depths must be 0, got mtp_depths={ours.mtp_depths}"
        )
    if _mscale(scaling_to_hf(ours.rope_scaling)) != ours.mscale:
        raise NotImplementedError(
            f"{type(ours).__name__}: mscale must be that of rope_scaling in transformers, "
            f"got mscale={ours.mscale}, rope_scaling={ours.rope_scaling}"
        )
    return {}


def _mscale(rope: dict[str, Any]) -> float:
    """Returns YaRN's mscale as transformers computes it; 1 without mscale_all_dim."""
    return 0.1 * (rope.get("mscale_all_dim") or 0) * math.log(rope.get("factor", 1)) + 1


@dataclass(frozen=True)
class MLAConfig(LlamaFamilyConfig):
    """Config of a Llama with multi-head latent attention.

    Args:
        q_lora_rank, kv_lora_rank: sizes of the latents of queries (None for none), and of keys and
            values.
        qk_nope_dim, qk_rope_dim, v_dim: sizes per head.
        mscale: YaRN's scale; its square multiplies the scores.

    Reference:
        DeepSeek-AI, "DeepSeek-V2", 2024, arXiv 2405.04434.
    """

    architecture = "mla"

    q_lora_rank: Size | None = None
    kv_lora_rank: Size = 64
    qk_nope_dim: SizeOrZero = 32
    qk_rope_dim: SizeOrZero = 16
    v_dim: Size = 32
    mscale: Positive = 1.0

    def attention(self, layer: int) -> MultiHeadLatentAttention.Config:
        return MultiHeadLatentAttention.Config(
            self.dim,
            self.num_heads,
            self.q_lora_rank,
            self.kv_lora_rank,
            self.qk_nope_dim,
            self.qk_rope_dim,
            self.v_dim,
            mscale=self.mscale,
            norm_eps=self.norm_eps,
            **self.common,
        )

    def feed_forward(self, layer: int) -> LayerConfig:
        return GatedMLP.Config(self.dim, self.hidden_dim, **self.common)


@dataclass(frozen=True)
class LatentExpertsConfig(MLAConfig):
    """Sizes and options of decoders with latent attention, and experts after the first layers.

    Args:
        q_lora_rank, kv_lora_rank, qk_nope_dim, qk_rope_dim, v_dim, mscale: as in MLAConfig.
        dense_layers: number of first layers with a SwiGLU of `hidden_dim` instead of experts.
        expert_dim: hidden size of an expert.
        experts, top_k, shared: numbers of routed experts, of routed experts per token, and of
            shared experts.
        groups, top_groups: number of expert groups, and of groups selected per token.
        route_scale: factor of the routing weights.
    """

    dense_layers: SizeOrZero = 1
    expert_dim: Size = 96
    experts: Size = 16
    top_k: Size = 4
    shared: int = 1
    groups: Size = 1
    top_groups: Size = 1
    route_scale: float = 1.0

    @abstractmethod
    def routed(self) -> MoE.Config:
        """Returns the config of a layer of experts."""

    def feed_forward(self, layer: int) -> LayerConfig:
        return super().feed_forward(layer) if layer < self.dense_layers else self.routed()

    @property
    def expert_options(self) -> dict[str, Any]:
        """Options of the layers of experts."""
        return {
            "shared": self.shared,
            "groups": self.groups,
            "top_groups": self.top_groups,
            "route_scale": self.route_scale,
            **self.common,
        }


def _v32_to_hf(ours: DeepSeekV32Config) -> dict[str, Any]:
    if ours.q_lora_rank is None or ours.norm_eps != _LATENT_EPS:
        raise NotImplementedError(
            "DeepSeekV32Config: transformers has a latent of queries, and norms of latents with an "
            f"epsilon of 1e-6, got q_lora_rank={ours.q_lora_rank}, norm_eps={ours.norm_eps}"
        )
    return _mscale_to_hf(ours)


def _kinds_of_mlps(dense: int, count: int) -> list[str]:
    return ["dense" if layer < dense else "sparse" for layer in range(count)]


def _dense_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    kinds = list(theirs.mlp_layer_types)
    dense = kinds.count("dense")
    if kinds != _kinds_of_mlps(dense, len(kinds)):
        raise NotImplementedError(
            "LatentExpertsConfig: mlp_layer_types must be 'dense' for first layers, and 'sparse' "
            f"for the others, got mlp_layer_types={shown(kinds)}"
        )
    return {"dense_layers": dense}


#: Which layers have experts, for configs of transformers with `mlp_layer_types`.
FIRST_DENSE = Conversion(
    lambda ours: {"mlp_layer_types": _kinds_of_mlps(ours.dense_layers, ours.num_layers)},
    _dense_from_hf,
)

#: Our names of options -> names in configs of DeepSeek.
LATENT_NAMES = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_dim": "qk_nope_head_dim",
    "qk_rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "expert_dim": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "shared": "n_shared_experts",
    "route_scale": "routed_scaling_factor",
}


@dataclass(frozen=True)
class DeepSeekConfig(LatentExpertsConfig):
    """Config of DeepSeek-V3: latent attention, and experts with bias-balanced sigmoid routing.

    Args:
        q_lora_rank, kv_lora_rank, qk_nope_dim, qk_rope_dim, v_dim, mscale: as in MLAConfig.
        dense_layers: number of first layers with a SwiGLU of `hidden_dim` instead of experts.
        expert_dim: hidden size of an expert.
        experts, top_k, shared: numbers of routed experts, of routed experts per token, and of
            shared experts.
        groups, top_groups: number of expert groups, and of groups selected per token.
        route_scale: factor of the routing weights.
        bias_rate: step size of the bias updates.
        mtp_depths: number of further tokens predicted in training, 0 for none.
        mtp_weight: weight of their loss (the paper: 0.3, then 0.1).

    Reference:
        Dai et al., "DeepSeekMoE", 2024, arXiv 2401.06066; DeepSeek-AI, "DeepSeek-V3 Technical
        Report", 2024, arXiv 2412.19437.
    """

    architecture = "deepseek"
    hf = llama_counterpart(
        "DeepseekV3ForCausalLM",
        {
            **LATENT_NAMES,
            "dense_layers": "first_k_dense_replace",
            "groups": "n_group",
            "top_groups": "topk_group",
        },
        {
            "num_key_value_heads": lambda c: c.num_heads,
            "norm_topk_prob": True,
            "attention_bias": False,
            "rope_interleave": True,
        },
        Conversion(_mscale_to_hf, lambda theirs: {"mscale": _mscale(theirs.rope_parameters)}),
    )

    bias_rate: float = 1e-3
    mtp_depths: SizeOrZero = 0
    mtp_weight: float = 0.3

    @property
    def predictor(self) -> MultiTokenPredictor.Config | None:
        if self.mtp_depths == 0:
            return None
        return MultiTokenPredictor.Config(
            self.dim, self.mtp_depths, self.norm_eps, init_std=self.init_std, backend=self.backend
        )

    @property
    def predictor_weight(self) -> float:
        return self.mtp_weight

    def routed(self) -> MoE.Config:
        options = {"bias_rate": self.bias_rate, **self.expert_options}
        return MoE.Config.deepseek_v3(
            self.dim, self.expert_dim, self.experts, self.top_k, **options
        )


@dataclass(frozen=True)
class DeepSeekV32Config(DeepSeekConfig):
    """Config of DeepSeek-V3.2: DeepSeek-V3 with attention to the keys that an indexer selects.

    Args:
        q_lora_rank, kv_lora_rank, qk_nope_dim, qk_rope_dim, v_dim, mscale: as in MLAConfig.
        dense_layers, expert_dim, experts, top_k, shared, groups, top_groups: as in DeepSeekConfig.
        route_scale, bias_rate, mtp_depths, mtp_weight: as in DeepSeekConfig.
        index_heads, index_dim, index_topk: number and size of the indexer's heads, and number of
            selected keys per query.
        index_weight: weight of the indexer's loss, which `auxiliary_loss` includes in training.

    Reference:
        DeepSeek-AI, "DeepSeek-V3.2", 2025, arXiv 2512.02556.
    """

    architecture = "deepseek-v3.2"
    hf = llama_counterpart(
        "DeepseekV32ForCausalLM",
        {
            **LATENT_NAMES,
            "groups": "n_group",
            "top_groups": "topk_group",
            "index_heads": "index_n_heads",
            "index_dim": "index_head_dim",
            "index_topk": "index_topk",
        },
        {
            "num_key_value_heads": lambda c: c.num_heads,
            "norm_topk_prob": True,
            "attention_bias": False,
            "mlp_bias": False,
        },
        Conversion(_v32_to_hf, lambda theirs: {"mscale": _mscale(theirs.rope_parameters)}),
        FIRST_DENSE,
    )

    norm_eps: Epsilon = 1e-6
    q_lora_rank: Size | None = 96
    index_heads: Size = 4
    index_dim: Size = 32
    index_topk: Size = 32
    index_weight: float = 1.0

    def attention(self, layer: int) -> DeepSeekSparseAttention.Config:
        attention = super().attention(layer)
        return DeepSeekSparseAttention.Config(
            **{f.name: getattr(attention, f.name) for f in fields(attention)},
            index_heads=self.index_heads,
            index_dim=self.index_dim,
            index_topk=self.index_topk,
            index_weight=self.index_weight,
        )


def _v2_to_hf(ours: DeepSeekV2Config) -> dict[str, Any]:
    if ours.norm_eps != _LATENT_EPS:
        raise NotImplementedError(
            "DeepSeekV2Config: transformers has norms of latents with an epsilon of 1e-6; "
            f"norm_eps must be 1e-06, got norm_eps={ours.norm_eps}"
        )
    method = "greedy" if ours.top_groups == ours.groups else "group_limited_greedy"
    return _mscale_to_hf(ours) | {
        "topk_method": method,
        "n_group": ours.groups,
        "topk_group": ours.top_groups,
    }


def _v2_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    if theirs.rms_norm_eps != _LATENT_EPS:
        raise NotImplementedError(
            "DeepSeekV2Config: rms_norm_eps must be that of the norms of latents, 1e-06, "
            f"got rms_norm_eps={theirs.rms_norm_eps}"
        )
    if theirs.topk_method not in ("greedy", "group_limited_greedy"):
        raise NotImplementedError(
            "DeepSeekV2Config: topk_method must be 'greedy' or 'group_limited_greedy', "
            f"got topk_method={shown(theirs.topk_method)}"
        )
    groups = {"groups": 1, "top_groups": 1}
    if theirs.topk_method == "group_limited_greedy":
        groups = {"groups": theirs.n_group, "top_groups": theirs.topk_group}
    return {"mscale": _mscale(theirs.rope_parameters), **groups}


@dataclass(frozen=True)
class DeepSeekV2Config(LatentExpertsConfig):
    """Config of DeepSeek-V2: latent attention, and experts with group-limited softmax routing.

    Args:
        q_lora_rank, kv_lora_rank, qk_nope_dim, qk_rope_dim, v_dim, mscale: as in MLAConfig.
        dense_layers, expert_dim, experts, top_k, shared, groups, top_groups, route_scale: as in
            DeepSeekConfig.

    Reference:
        DeepSeek-AI, "DeepSeek-V2", 2024, arXiv 2405.04434.
    """

    architecture = "deepseek-v2"
    hf = llama_counterpart(
        "DeepseekV2ForCausalLM",
        {**LATENT_NAMES, "dense_layers": "first_k_dense_replace"},
        {
            "num_key_value_heads": lambda c: c.num_heads,
            "norm_topk_prob": False,
            "attention_bias": False,
            "mlp_bias": False,
        },
        Conversion(_v2_to_hf, _v2_from_hf),
    )

    norm_eps: Epsilon = 1e-6
    shared: int = 2

    def routed(self) -> MoE.Config:
        return MoE.Config.deepseek_v2(
            self.dim, self.expert_dim, self.experts, self.top_k, **self.expert_options
        )
