"""The language models of Llama 4: chunks, layers without positions, top-1 experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omniattn.checks.arguments import shown
from omniattn.models.decoders.family import (
    HEAD_DIM,
    GroupedConfig,
    llama_counterpart,
    shortest_period,
)
from omniattn.models.hf import Conversion
from omniattn.modules import Attention, GatedMLP, MoE
from omniattn.modules.base.fields import Size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_KINDS = ("rope", "nope")


def _to_hf(ours: Llama4Config) -> dict[str, Any]:
    rotated = [int(ours.kind(layer) == "rope") for layer in range(ours.num_layers)]
    if not any(rotated):  # transformers replaces a list of zeros by its default
        raise NotImplementedError(
            f"Llama4Config: schedule must have layers of kind 'rope' in transformers, "
            f"got schedule={shown(ours.schedule)}"
        )
    chunked = "chunked_attention" if ours.chunk_size is not None else "full_attention"
    return {
        "no_rope_layers": rotated,
        "layer_types": [chunked if rope else "full_attention" for rope in rotated],
        "moe_layers": [i for i in range(ours.num_layers) if (i + 1) % ours.expert_period == 0],
        "attn_temperature_tuning": ours.query_growth > 0,
        "attn_scale": ours.query_growth,
    }


def _from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    kinds = tuple("rope" if rope else "nope" for rope in theirs.no_rope_layers)
    growth = theirs.attn_scale if theirs.attn_temperature_tuning else 0.0
    return {"schedule": shortest_period(kinds), "query_growth": growth}


@dataclass(frozen=True)
class Llama4Config(GroupedConfig):
    """Config of the language model of a Llama 4.

    Args:
        num_kv_heads, head_dim: as in LlamaConfig.
        hidden_dim: hidden size of the feed-forward layers without experts.
        schedule: kinds of the layers, repeated: "rope" for layers with rotary positions that see
            their chunk only, "nope" for layers without positions that see all tokens.
        chunk_size: number of tokens of a chunk, None for no chunks.
        qk_norm: True if layers with rotary positions norm queries and keys, without weights.
        query_growth, query_period: of layers without positions, as in Attention.
        experts, top_k, expert_dim: number of experts of a layer and of experts per token, and the
            hidden size of an expert and of the shared expert.
        expert_period: layers i have experts where i + 1 is a multiple of it.

    Reference:
        Meta AI, "The Llama 4 herd", 2025.
    """

    architecture = "llama4"
    hf = llama_counterpart(
        "Llama4ForCausalLM",
        {
            "num_kv_heads": "num_key_value_heads",
            "hidden_dim": "intermediate_size_mlp",
            "chunk_size": "attention_chunk_size",
            "qk_norm": "use_qk_norm",
            "query_period": "floor_scale",
            "experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "expert_dim": "intermediate_size",
            "expert_period": "interleave_moe_layer_step",
        },
        {"attention_bias": False, "router_jitter_noise": 0.0},
        HEAD_DIM,
        Conversion(_to_hf, _from_hf),
        weights=(
            (r"mlp\.gate\.", "mlp.router."),
            (r"shared_experts", "shared_expert"),
            (r"mlp", "feed_forward"),
        ),
        transposed=r"experts\.(gate_up|down)_proj$",
    )

    schedule: tuple[str, ...] = ("rope", "rope", "rope", "nope")
    chunk_size: Size | None = 8192
    qk_norm: bool = True
    query_growth: float = 0.1
    query_period: Size = 8192
    experts: Size = 16
    top_k: Size = 1
    expert_dim: Size = 512
    expert_period: Size = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedule or not set(self.schedule) <= set(_KINDS):
            raise ValueError(
                "Llama4Config: schedule must be kinds of layers, 'rope' and 'nope', "
                f"got schedule={shown(self.schedule)}"
            )

    def kind(self, layer: int) -> str:
        """Returns the kind of a layer, "rope" or "nope"."""
        return self.schedule[layer % len(self.schedule)]

    def attention(self, layer: int) -> Attention.Config:
        attention = replace(super().attention(layer), rope_interleaved=True)
        if self.kind(layer) == "nope":
            return replace(
                attention,
                rotary=False,
                query_growth=self.query_growth,
                query_period=self.query_period,
            )
        norm = "rms_fixed" if self.qk_norm else None
        return replace(
            attention, chunk_size=self.chunk_size, qk_norm=norm, qk_norm_eps=self.norm_eps
        )

    def feed_forward(self, layer: int) -> GatedMLP.Config | MoE.Config:
        if (layer + 1) % self.expert_period:
            return GatedMLP.Config(self.dim, self.hidden_dim, **self.common)
        return MoE.Config.llama4(self.dim, self.expert_dim, self.experts, self.top_k, **self.common)
