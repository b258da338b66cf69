"""Qwen2, Qwen2.5 and Qwen3: Llama with biased or normed queries and keys, also with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omniattn.models.decoders.family import (
    HEAD_DIM,
    WINDOWS,
    GroupedConfig,
    WindowedConfig,
    llama_counterpart,
)
from omniattn.models.hf import Conversion
from omniattn.modules import Attention, GatedMLP, MoE
from omniattn.modules.base.fields import Epsilon, Size, SizeOrZero

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GROUPED = {"num_kv_heads": "num_key_value_heads"}
_WINDOWED = {"use_sliding_window": lambda c: c.window is not None}


@dataclass(frozen=True)
class Qwen2Config(WindowedConfig):
    """Config of a Qwen2 or Qwen2.5: biases of queries, keys and values.

    Args:
        num_kv_heads, head_dim: as in LlamaConfig.
        window: number of keys that a windowed layer sees, counting the token's own.
        schedule: which layers have the window, as in :func:`layer_schedule`.

    Reference:
        Qwen Team, "Qwen2.5 Technical Report", 2024, arXiv 2412.15115.
    """

    architecture = "qwen2"
    hf = llama_counterpart("Qwen2ForCausalLM", GROUPED, _WINDOWED, HEAD_DIM, WINDOWS)

    norm_eps: Epsilon = 1e-6

    def attention(self, layer: int) -> Attention.Config:
        return replace(super().attention(layer), bias=True)


@dataclass(frozen=True)
class Qwen3Config(WindowedConfig):
    """Config of a Qwen3: normed queries and keys, with `norm_eps` too, and no biases.

    Args:
        num_kv_heads, head_dim, window, schedule: as in Qwen2Config.

    Reference:
        Qwen Team, "Qwen3 Technical Report", 2025, arXiv 2505.09388.
    """

    architecture = "qwen3"
    hf = llama_counterpart(
        "Qwen3ForCausalLM", GROUPED, {"attention_bias": False, **_WINDOWED}, HEAD_DIM, WINDOWS
    )

    norm_eps: Epsilon = 1e-6

    def attention(self, layer: int) -> Attention.Config:
        return replace(super().attention(layer), qk_norm="rms", qk_norm_eps=self.norm_eps)


EXPERTS = {
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "renormalize": "norm_topk_prob",
    "expert_period": "decoder_sparse_step",
}


def _dense_to_hf(ours: Any) -> dict[str, Any]:
    return {"mlp_only_layers": list(ours.dense_layers)}


def _dense_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    return {"dense_layers": tuple(theirs.mlp_only_layers)}


DENSE = Conversion(_dense_to_hf, _dense_from_hf)


@dataclass(frozen=True)
class QwenExpertsConfig(GroupedConfig):
    """Sizes and options of layers with experts, and a shared expert with a sigmoid gate.

    Args:
        num_kv_heads, head_dim: as in LlamaConfig.
        experts, top_k: number of experts of a layer, and of experts per token.
        expert_dim, shared_dim: hidden sizes of an expert and of the shared expert, 0 for no shared
            expert.
        renormalize: divide the weights of a token's experts by their sum.
        expert_period, dense_layers: layers i have experts where i + 1 is a multiple of the period
            and i is not in `dense_layers`; the others have a SwiGLU of `hidden_dim`.
    """

    experts: Size = 8
    top_k: Size = 2
    expert_dim: Size = 128
    shared_dim: SizeOrZero = 256
    renormalize: bool = False
    expert_period: Size = 1
    dense_layers: tuple[int, ...] = ()

    def feed_forward(self, layer: int) -> GatedMLP.Config | MoE.Config:
        if layer in self.dense_layers or (layer + 1) % self.expert_period:
            return GatedMLP.Config(self.dim, self.hidden_dim, **self.common)
        return MoE.Config.qwen2_moe(
            self.dim,
            self.expert_dim,
            self.experts,
            self.top_k,
            self.shared_dim,
            renormalize=self.renormalize,
            shared_gate=self.shared_dim > 0,
            **self.common,
        )


@dataclass(frozen=True)
class Qwen2MoeConfig(QwenExpertsConfig, Qwen2Config):
    """Config of a Qwen1.5-MoE or Qwen2-MoE: experts, and a shared expert with a sigmoid gate.

    Args:
        num_kv_heads, head_dim, window, schedule: as in Qwen2Config.
        experts, top_k, expert_dim, shared_dim, renormalize, expert_period, dense_layers: as in
            QwenExpertsConfig.

    Reference:
        Qwen Team, "Qwen2 Technical Report", 2024, arXiv 2407.10671.
    """

    architecture = "qwen2-moe"
    hf = llama_counterpart(
        "Qwen2MoeForCausalLM",
        {**GROUPED, **EXPERTS, "shared_dim": "shared_expert_intermediate_size"},
        {"qkv_bias": True, **_WINDOWED},
        HEAD_DIM,
        WINDOWS,
        DENSE,
        weights=((r"shared_experts", "shared_expert"),),
    )


def _neither_window_nor_shared(ours: Qwen3MoeConfig) -> dict[str, Any]:
    for name, plain in (("window", None), ("shared_dim", 0)):
        if getattr(ours, name) != plain:
            raise NotImplementedError(
                f"Qwen3MoeConfig: {name} must be {plain} in transformers, "
                f"got {name}={getattr(ours, name)}"
            )
    return {}


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen2MoeConfig):
    """Config of a Qwen3 with experts: normed queries and keys, and no shared expert.

    Args:
        num_kv_heads, head_dim, window, schedule: as in Qwen2Config.
        experts, top_k, expert_dim, shared_dim, renormalize, expert_period, dense_layers: as in
            QwenExpertsConfig.

    Reference:
        Qwen Team, "Qwen3 Technical Report", 2025, arXiv 2505.09388.
    """

    architecture = "qwen3-moe"
    hf = llama_counterpart(
        "Qwen3MoeForCausalLM",
        {**GROUPED, **EXPERTS},
        {"attention_bias": False, "use_sliding_window": False},
        HEAD_DIM,
        Conversion(_neither_window_nor_shared, lambda theirs: {}),
        DENSE,
    )

    shared_dim: SizeOrZero = 0
    renormalize: bool = True

    def attention(self, layer: int) -> Attention.Config:
        attention = replace(super().attention(layer), bias=False)
        return replace(attention, qk_norm="rms", qk_norm_eps=self.norm_eps)
