"""Mistral: Llama with a sliding window in each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omniattn.models.decoders.family import HEAD_DIM, GroupedConfig, left_window, llama_counterpart
from omniattn.modules import Attention
from omniattn.modules.base.fields import Size


@dataclass(frozen=True)
class MistralConfig(GroupedConfig):
    """Config of a Mistral.

    Args:
        num_kv_heads, head_dim: as in LlamaConfig.
        window: number of keys that each query sees, counting its own; None for all earlier ones.

    Reference:
        Jiang et al., "Mistral 7B", 2023, arXiv 2310.06825.
    """

    architecture = "mistral"
    hf = llama_counterpart(
        "MistralForCausalLM",
        {"num_kv_heads": "num_key_value_heads", "window": "sliding_window"},
        {},
        HEAD_DIM,
    )

    window: Size | None = 4096

    def attention(self, layer: int) -> Attention.Config:
        return replace(super().attention(layer), window_size=left_window(self.window))
