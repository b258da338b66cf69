"""Layers with parameters, each built from a frozen `Config` and named as in the field."""

from omniattn.modules.attention import Attention
from omniattn.modules.decoder_block import DecoderBlock
from omniattn.modules.differential import DifferentialAttention
from omniattn.modules.kv_cache import Cache, CrossCache, KVCache, LatentCache, RollingCache
from omniattn.modules.linear import Linear
from omniattn.modules.mla import MultiHeadLatentAttention
from omniattn.modules.mlp import GatedMLP
from omniattn.modules.moe import MoE, RouterState
from omniattn.modules.norm import LayerNorm, RMSNorm
from omniattn.modules.paged_cache import PagedCache, PagePool
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
    "Cache",
    "CrossCache",
    "DecoderBlock",
    "DifferentialAttention",
    "GatedMLP",
    "KVCache",
    "LatentCache",
    "LayerNorm",
    "LearnedPositional",
    "Linear",
    "MoE",
    "MultiHeadLatentAttention",
    "PagePool",
    "PagedCache",
    "RMSNorm",
    "RollingCache",
    "RotaryEmbedding",
    "RouterState",
    "SinCosPositional2d",
    "SinusoidalPositional",
]
