"""Decoders like Llama: pre-norm with RMSNorm, rotary positions, no biases.

An architecture of the family is a Config that defines the attention and feed-forward layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omniattn.models.decoders.blocks import layer_schedule
from omniattn.models.decoders.decoder import Decoder
from omniattn.models.hf import Conversion, Counterpart, Renames
from omniattn.modules import (
    Attention,
    DecoderBlock,
    DifferentialAttention,
    GatedMLP,
    MultiHeadLatentAttention,
    RMSNorm,
    RotaryEmbedding,
)
from omniattn.modules.base.fields import Epsilon, Positive, Size
from omniattn.modules.base.layer import LayerConfig
from omniattn.reference import RopeScaling, scaling_from_hf, scaling_to_hf

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Mixers that have a number of rotated dimensions.
RotaryAttention = Attention.Config | DifferentialAttention.Config | MultiHeadLatentAttention.Config


@dataclass(frozen=True)
class LlamaFamilyConfig(Decoder.Config):
    """Sizes and options shared by the family.

    Args:
        num_heads: number of query heads.
        hidden_dim: hidden size of the feed-forward layers.
        max_positions: longest sequence that the model was made for; allocates nothing.
        norm_eps: epsilon of the norms.
        rope_base, rope_scaling: base and scaling of the rotary embedding.
    """

    num_heads: Size = 6
    hidden_dim: Size = 512
    max_positions: Size = 2048
    norm_eps: Epsilon = 1e-5
    rope_base: Positive = 10000.0
    rope_scaling: RopeScaling | None = None

    @abstractmethod
    def attention(self, layer: int) -> RotaryAttention:
        """Returns the config of a layer's attention."""

    def mixer(self, layer: int) -> LayerConfig:
        """Returns the config of a layer's token mixer."""
        return self.attention(layer)

    @abstractmethod
    def feed_forward(self, layer: int) -> LayerConfig:
        """Returns the config of a layer's channel mixer."""

    @property
    def norm(self) -> RMSNorm.Config:
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def rope(self) -> RotaryEmbedding.Config | None:
        rotary_dim = self.attention(0).rotary_dim
        return RotaryEmbedding.Config(rotary_dim, self.rope_base, self.rope_scaling)

    def block(self, layer: int) -> DecoderBlock.Config:
        return DecoderBlock.Config(
            self.mixer(layer),
            self.feed_forward(layer),
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )


@dataclass(frozen=True)
class GroupedConfig(LlamaFamilyConfig):
    """Sizes and options of the members with grouped-query attention.

    Args:
        num_kv_heads: number of key and value heads.
        head_dim: size of a head, default dim / num_heads.
    """

    num_kv_heads: Size = 2
    head_dim: Size | None = None

    def attention(self, layer: int) -> Attention.Config:
        return Attention.Config(
            self.dim, self.num_heads, self.num_kv_heads, self.head_dim, **self.common
        )

    def feed_forward(self, layer: int) -> LayerConfig:
        return GatedMLP.Config(self.dim, self.hidden_dim, **self.common)


@dataclass(frozen=True)
class WindowedConfig(GroupedConfig):
    """Sizes and options of the members with sliding windows in some or all layers.

    Args:
        window: number of keys that a windowed layer sees, counting the token's own.
        schedule: which layers have the window ("swa") and which see all earlier tokens ("full"), as
            in :func:`layer_schedule`.
    """

    window: Size | None = None
    schedule: str | tuple[str, ...] = ("full",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None and "swa" in layer_schedule(self.schedule, self.num_layers):
            raise ValueError(
                f"{type(self).__name__}: window must be given for layers of kind 'swa', "
                f"got window=None, schedule={self.schedule}"
            )

    def attention(self, layer: int) -> Attention.Config:
        attention = super().attention(layer)
        if layer_schedule(self.schedule, layer + 1)[layer] == "full":
            return attention
        return replace(attention, window_size=left_window(self.window))


def left_window(window: int | None) -> tuple[int, int]:
    """Returns the window_size that shows each query its own key and the window - 1 before it."""
    return (-1, -1) if window is None else (window - 1, 0)


def llama_counterpart(
    model: str,
    options: Mapping[str, str],
    fixed: Mapping[str, Any],
    *conversions: Conversion,
    weights: Renames = (),
    **more: Any,
) -> Counterpart:
    """Returns an architecture's counterpart; arguments extend those shared by the family.

    `more`: further fields of Counterpart.
    """
    return Counterpart(
        model,
        {
            "vocab_size": "vocab_size",
            "dim": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "hidden_dim": "intermediate_size",
            "max_positions": "max_position_embeddings",
            "norm_eps": "rms_norm_eps",
            "tie_embeddings": "tie_word_embeddings",
            "init_std": "initializer_range",
            **options,
        },
        # As in transformers, rotary pairs are half-split, but interleaved in latent attention.
        (*weights, (r"^(?!lm_head)", "model."), (r"mixer", "self_attn")),
        fixed={"hidden_act": "silu", "attention_dropout": 0.0, **fixed},
        conversions=(Conversion(rope_to_hf, rope_from_hf), *conversions),
        **more,
    )


def rope_to_hf(ours: Any) -> dict[str, Any]:
    rope = scaling_to_hf(ours.rope_scaling) | {"rope_theta": ours.rope_base}
    return {"rope_parameters": rope}


def rope_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    rope = theirs.rope_parameters
    scaling = scaling_from_hf(rope, max_positions=theirs.max_position_embeddings)
    return {"rope_base": rope["rope_theta"], "rope_scaling": scaling}


def _head_dim_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    own = getattr(theirs, "head_dim", None)  # no field of each config, but read from each
    if own is not None and own * theirs.num_attention_heads == theirs.hidden_size:
        own = None
    return {"head_dim": own}


#: head_dim is None for the default, which transformers stores as a number.
HEAD_DIM = Conversion(lambda ours: {"head_dim": ours.attention(0).head_size}, _head_dim_from_hf)


def _windows_to_hf(ours: WindowedConfig) -> dict[str, Any]:
    names = {"swa": "sliding_attention", "full": "full_attention"}
    kinds = layer_schedule(ours.schedule, ours.num_layers)
    return {"layer_types": [names[kind] for kind in kinds], "sliding_window": ours.window}


def _windows_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    kinds = layer_schedule(theirs.layer_types, theirs.num_hidden_layers)
    return {"schedule": shortest_period(kinds), "window": theirs.sliding_window or None}


def shortest_period(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the shortest beginning of `kinds` that gives all of them when it is repeated."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[i % length] for i, kind in enumerate(kinds)):
            return kinds[:length]
    return kinds


#: The window and its layers, for configs of transformers with `layer_types`.
WINDOWS = Conversion(_windows_to_hf, _windows_from_hf)
