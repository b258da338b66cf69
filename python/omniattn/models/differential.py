"""Differential Transformer: Llama with the difference of two attention maps per head."""

from __future__ import annotations

from dataclasses import dataclass

from omniattn.models.family import LlamaFamilyConfig
from omniattn.modules import DifferentialAttention, GatedMLP
from omniattn.modules.base.fields import Size


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
