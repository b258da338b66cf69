"""Decoders like Llama: RMSNorm in front, rotary positions, SwiGLU, no biases.

An architecture of the family is a Config that changes what `attention` or `feed_forward` returns.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omniattn.models.decoder import Decoder
from omniattn.modules import Attention, DecoderBlock, GatedMLP, RMSNorm, RotaryEmbedding
from omniattn.modules.layer import LayerConfig
from omniattn.reference import RopeScaling, scaling_from_hf, scaling_to_hf

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Names in transformers that are the same for all of the family.
HF_OPTIONS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
#: Both keep rotary pairs half-split, and both interleave those of latent attention.
HF_WEIGHTS = ((r"^(?!lm_head)", "model."), (r"mixer", "self_attn"))


@dataclass(frozen=True)
class LlamaFamilyConfig(Decoder.Config):
    """Sizes and options.

    Args:
        num_heads: query heads.
        hidden_dim: of the feed-forward layer.
        max_positions: longest sequence it was made for; nothing is allocated for it.
        norm_eps, rope_base, rope_scaling: of the norms and the rotary embedding.
    """

    num_heads: int = 6
    hidden_dim: int = 512
    max_positions: int = 2048
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""

    @abstractmethod
    def attention(self, layer: int) -> LayerConfig:
        """Config of the token mixer of a layer."""

    def feed_forward(self, layer: int) -> LayerConfig:
        """Config of the channel mixer of a layer."""
        return GatedMLP.Config(
            self.dim,
            self.hidden_dim,
            **self.common,
        )

    @property
    def norm(self) -> RMSNorm.Config:
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def rope(self) -> RotaryEmbedding.Config:
        return RotaryEmbedding.Config(self.rotary_dim, self.rope_base, self.rope_scaling)

    def block(self, layer: int) -> DecoderBlock.Config:
        return DecoderBlock.Config(
            self.attention(layer),
            self.feed_forward(layer),
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )

    def hf_values(self) -> dict[str, Any]:
        return super().hf_values() | {"hidden_act": "silu", "attention_dropout": 0.0}

    def hf_special(self) -> dict[str, Any]:
        rope = scaling_to_hf(self.rope_scaling) | {"rope_theta": self.rope_base}
        return {"rope_parameters": rope}

    @classmethod
    def special_from_hf(cls, config: PreTrainedConfig) -> dict[str, Any]:
        rope = config.rope_parameters
        scaling = scaling_from_hf(rope, max_positions=config.max_position_embeddings)
        return {"rope_base": rope["rope_theta"], "rope_scaling": scaling}


@dataclass(frozen=True)
class GroupedQueryConfig(LlamaFamilyConfig):
    """The family with grouped-query attention.

    Args:
        num_kv_heads: key and value heads.
        head_dim: default dim / num_heads.
    """

    num_kv_heads: int = 2
    head_dim: int | None = None

    @property
    def rotary_dim(self) -> int:
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    def attention(self, layer: int) -> LayerConfig:
        return Attention.Config(
            self.dim,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            **self.common,
        )

    def hf_special(self) -> dict[str, Any]:
        return super().hf_special() | {"head_dim": self.head_dim or self.dim // self.num_heads}

    @classmethod
    def special_from_hf(cls, config: PreTrainedConfig) -> dict[str, Any]:
        own = config.head_dim
        if own is not None and own * config.num_attention_heads == config.hidden_size:
            own = None
        return super().special_from_hf(config) | {"head_dim": own}
