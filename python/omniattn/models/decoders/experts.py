"""Decoders of the Llama family whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from omniattn.models.decoders.family import HEAD_DIM, GroupedConfig, llama_counterpart
from omniattn.modules import MLP, MoE
from omniattn.modules.base.fields import Size


@dataclass(frozen=True)
class MixtralConfig(GroupedConfig):
    """Config of a Mixtral: each layer has `experts` SwiGLUs of size `hidden_dim`.

    Args:
        num_kv_heads, head_dim: as in LlamaConfig.
        experts, top_k: number of experts per layer, and of experts per token.

    Reference:
        Jiang et al., "Mixtral of Experts", 2024, arXiv 2401.04088.
    """

    architecture = "mixtral"
    hf = llama_counterpart(
        "MixtralForCausalLM",
        {
            "num_kv_heads": "num_key_value_heads",
            "experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
        },
        {"sliding_window": None, "router_jitter_noise": 0.0},
        HEAD_DIM,
    )

    experts: Size = 8
    top_k: Size = 2

    def feed_forward(self, layer: int) -> MoE.Config:
        return MoE.Config.mixtral(
            self.dim, self.hidden_dim, self.experts, self.top_k, **self.common
        )


@dataclass(frozen=True)
class SwitchConfig(GroupedConfig):
    """Config of a Llama with the feed-forward layers of the Switch Transformer.

    Every other layer, from the second on, has `experts` ReLU MLPs of size `hidden_dim`. Each token
    uses one, unless it exceeds the expert's capacity. The other layers have a single MLP.

    Args:
        num_kv_heads, head_dim: as in LlamaConfig.
        experts: number of experts per layer.

    Reference:
        Fedus, Zoph, Shazeer, "Switch Transformers", 2021, arXiv 2101.03961.
    """

    architecture = "switch"

    experts: Size = 8

    def feed_forward(self, layer: int) -> MLP.Config | MoE.Config:
        if layer % 2 == 0:
            return MLP.Config(self.dim, self.hidden_dim, "relu", bias=False, **self.common)
        return MoE.Config.switch(self.dim, self.hidden_dim, self.experts, **self.common)
