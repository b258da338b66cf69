"""Decoders with multi-head latent attention: with dense layers, and DeepSeek-V3's with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omniattn.models.family import LlamaFamilyConfig
from omniattn.modules import MoE, MultiHeadLatentAttention
from omniattn.modules.build import FeedForwardConfig


@dataclass(frozen=True)
class MLAConfig(LlamaFamilyConfig):
    """Sizes of the attention; the rest is Llama's.

    Args:
        q_lora_rank, kv_lora_rank: of the latents of queries (None for none), and of keys and
            values.
        qk_nope_dim, qk_rope_dim, v_dim: of a head.
        mscale: its square is a factor of the scores (YaRN).

    Reference:
        DeepSeek-AI, "DeepSeek-V2", 2024, arXiv 2405.04434.
    """

    architecture = "mla"

    q_lora_rank: int | None = None
    kv_lora_rank: int = 64
    qk_nope_dim: int = 32
    qk_rope_dim: int = 16
    v_dim: int = 32
    mscale: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_dim

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


@dataclass(frozen=True)
class DeepSeekConfig(MLAConfig):
    """Sizes of the experts, routed as in DeepSeek-V3: sigmoid scores, balanced by a bias.

    Args:
        dense_layers: the first layers, with a SwiGLU of `hidden_dim`.
        expert_dim: hidden size of an expert.
        experts, top_k, shared: routed ones, those of a token, and those that take every token.
        groups, top_groups: the experts form groups, of which a token uses some.
        route_scale: factor of the routed experts' weights.
        bias_rate: what a step moves the biases by.

    Reference:
        Dai et al., "DeepSeekMoE", 2024, arXiv 2401.06066; DeepSeek-AI, "DeepSeek-V3 Technical
        Report", 2024, arXiv 2412.19437.
    """

    architecture = "deepseek"

    dense_layers: int = 1
    expert_dim: int = 96
    experts: int = 16
    top_k: int = 4
    shared: int = 1
    groups: int = 1
    top_groups: int = 1
    route_scale: float = 1.0
    bias_rate: float = 1e-3

    def feed_forward(self, layer: int) -> FeedForwardConfig:
        if layer < self.dense_layers:
            return super().feed_forward(layer)
        moe = MoE.Config.deepseek_v3(
            self.dim,
            self.expert_dim,
            self.experts,
            self.top_k,
            shared=self.shared,
            groups=self.groups,
            top_groups=self.top_groups,
            route_scale=self.route_scale,
        )
        return replace(moe, bias_rate=self.bias_rate, **self.common)
