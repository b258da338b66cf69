"""The Differential Transformer: Llama with the difference of two attention maps a head."""

from __future__ import annotations

from dataclasses import dataclass

from omniattn.models.family import GroupedQueryConfig
from omniattn.modules import DifferentialAttention


@dataclass(frozen=True)
class DifferentialConfig(GroupedQueryConfig):
    """Sizes as of a Llama, with half as many heads: each has two maps and values of twice the size.

    Reference:
        Ye et al., "Differential Transformer", 2024, arXiv 2410.05258.
    """

    architecture = "differential"

    num_heads: int = 3
    num_kv_heads: int = 1

    @property
    def rotary_dim(self) -> int:
        return self.attention(0).head_size

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
