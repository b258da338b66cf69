"""Layers with parameters, each built from a frozen `Config` and named as in the field."""

from omniattn.modules.attention import Attention
from omniattn.modules.decoder_block import DecoderBlock
from omniattn.modules.kv_cache import KVCache
from omniattn.modules.linear import Linear
from omniattn.modules.mlp import GatedMLP
from omniattn.modules.norm import LayerNorm, RMSNorm
from omniattn.modules.positions import (
    ALiBi,
    LearnedPositional,
    SinCosPositional2d,
    SinusoidalPositional,
)
from omniattn.modules.rope import RotaryEmbedding

__all__ = [
    "ALiBi",
    "Attention",
    "DecoderBlock",
    "GatedMLP",
    "KVCache",
    "LayerNorm",
    "LearnedPositional",
    "Linear",
    "RMSNorm",
    "RotaryEmbedding",
    "SinCosPositional2d",
    "SinusoidalPositional",
]
