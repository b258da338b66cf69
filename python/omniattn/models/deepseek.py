"""Decoders with multi-head latent attention: dense, and DeepSeek-V3's mixture of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from omniattn.models.family import LlamaFamilyConfig, llama_counterpart
from omniattn.models.hf import Conversion
from omniattn.modules import GatedMLP, MoE, MultiHeadLatentAttention, MultiTokenPredictor
from omniattn.modules.base.fields import Positive, Size, SizeOrZero
from omniattn.reference import scaling_to_hf


def _mscale_to_hf(ours: DeepSeekConfig) -> dict[str, Any]:
    if ours.mtp_depths:
        raise NotImplementedError(
            "DeepSeekConfig: transformers predicts no further tokens; "
            f"mtp_depths must be 0, got mtp_depths={ours.mtp_depths}"
        )
    if _mscale(scaling_to_hf(ours.rope_scaling)) != ours.mscale:
        raise NotImplementedError(
            "DeepSeekConfig: mscale must be that of rope_scaling in transformers, "
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
        return _latent_attention(self)

    def feed_forward(self, layer: int) -> GatedMLP.Config:
        return GatedMLP.Config(self.dim, self.hidden_dim, **self.common)


@dataclass(frozen=True)
class DeepSeekConfig(LlamaFamilyConfig):
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
            "q_lora_rank": "q_lora_rank",
            "kv_lora_rank": "kv_lora_rank",
            "qk_nope_dim": "qk_nope_head_dim",
            "qk_rope_dim": "qk_rope_head_dim",
            "v_dim": "v_head_dim",
            "dense_layers": "first_k_dense_replace",
            "expert_dim": "moe_intermediate_size",
            "experts": "n_routed_experts",
            "top_k": "num_experts_per_tok",
            "shared": "n_shared_experts",
            "groups": "n_group",
            "top_groups": "topk_group",
            "route_scale": "routed_scaling_factor",
        },
        {
            "num_key_value_heads": lambda c: c.num_heads,
            "norm_topk_prob": True,
            "attention_bias": False,
            "rope_interleave": True,
        },
        Conversion(_mscale_to_hf, lambda theirs: {"mscale": _mscale(theirs.rope_parameters)}),
    )

    q_lora_rank: Size | None = None
    kv_lora_rank: Size = 64
    qk_nope_dim: SizeOrZero = 32
    qk_rope_dim: SizeOrZero = 16
    v_dim: Size = 32
    mscale: Positive = 1.0
    dense_layers: SizeOrZero = 1
    expert_dim: Size = 96
    experts: Size = 16
    top_k: Size = 4
    shared: int = 1
    groups: Size = 1
    top_groups: Size = 1
    route_scale: float = 1.0
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

    def attention(self, layer: int) -> MultiHeadLatentAttention.Config:
        return _latent_attention(self)

    def feed_forward(self, layer: int) -> GatedMLP.Config | MoE.Config:
        if layer < self.dense_layers:
            return GatedMLP.Config(self.dim, self.hidden_dim, **self.common)
        return MoE.Config.deepseek_v3(
            self.dim,
            self.expert_dim,
            self.experts,
            self.top_k,
            shared=self.shared,
            groups=self.groups,
            top_groups=self.top_groups,
            route_scale=self.route_scale,
            bias_rate=self.bias_rate,
            **self.common,
        )


def _latent_attention(c: MLAConfig | DeepSeekConfig) -> MultiHeadLatentAttention.Config:
    return MultiHeadLatentAttention.Config(
        c.dim,
        c.num_heads,
        c.q_lora_rank,
        c.kv_lora_rank,
        c.qk_nope_dim,
        c.qk_rope_dim,
        c.v_dim,
        mscale=c.mscale,
        norm_eps=c.norm_eps,
        **c.common,
    )
