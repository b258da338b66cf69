"""Differential Transformer: Llama with the difference of two attention maps per head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omniattn.checks.arguments import shown
from omniattn.models.decoders.family import LlamaFamilyConfig, llama_counterpart
from omniattn.models.hf import Conversion
from omniattn.modules import DifferentialAttention, GatedMLP
from omniattn.modules.base.fields import Size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class DifferentialConfig(LlamaFamilyConfig):
    """Config of a Llama with half as many heads; each has two maps and values of twice the size.

    Args:
        num_kv_heads: number of pairs of key heads, and of value heads.
        head_dim: size of queries and keys of one map, default dim / (2 num_heads).

    Reference:
        Ye et al., "Differential Transformer", 2024, arXiv 2410.05258.
    """

    architecture = "differential"

    num_heads: Size = 3
    num_kv_heads: Size = 1
    head_dim: Size | None = None

    def attention(self, layer: int) -> DifferentialAttention.Config:
        return DifferentialAttention.Config(
            self.dim,
            self.num_heads,
            layer,
            self.num_kv_heads,
            self.head_dim,
            norm_eps=self.norm_eps,
            **self.common,
        )

    def feed_forward(self, layer: int) -> GatedMLP.Config:
        return GatedMLP.Config(self.dim, self.hidden_dim, **self.common)


def _heads_to_hf(ours: DiffLlamaConfig) -> dict[str, Any]:
    return {
        "num_attention_heads": 2 * ours.num_heads,
        "num_key_value_heads": 2 * ours.num_kv_heads,
        "head_dim": ours.attention(0).head_size,
    }


def _heads_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    heads, kv_heads = theirs.num_attention_heads, theirs.num_key_value_heads
    if heads % 2 or kv_heads % 2:
        raise NotImplementedError(
            "DiffLlamaConfig: num_attention_heads and num_key_value_heads must be even, "
            f"got num_attention_heads={shown(heads)}, num_key_value_heads={shown(kv_heads)}"
        )
    own = theirs.head_dim * heads != theirs.hidden_size
    return {
        "num_heads": heads // 2,
        "num_kv_heads": kv_heads // 2,
        "head_dim": theirs.head_dim if own else None,
    }


_COUNTERPART = llama_counterpart(
    "DiffLlamaForCausalLM", {}, {"attention_bias": False}, Conversion(_heads_to_hf, _heads_from_hf)
)


@dataclass(frozen=True)
class DiffLlamaConfig(DifferentialConfig):
    """Config of transformers' DiffLlama, which pairs maps of other heads, without norm weights.

    Args:
        num_kv_heads, head_dim: as in DifferentialConfig.

    Reference:
        Ye et al., "Differential Transformer", 2024, arXiv 2410.05258.
    """

    architecture = "diffllama"
    hf = replace(
        _COUNTERPART,
        options={n: theirs for n, theirs in _COUNTERPART.options.items() if n != "num_heads"},
    )

    def attention(self, layer: int) -> DifferentialAttention.Config:
        return replace(super().attention(layer), form="hf", rope_interleaved=False)
