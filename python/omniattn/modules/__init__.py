"""Layers with parameters, built from a frozen `Config` or from its fields."""

import importlib
import warnings

from omniattn.functional._keywords import explain_keywords
from omniattn.modules.attention.attention import Attention
from omniattn.modules.attention.differential import DifferentialAttention
from omniattn.modules.attention.gau import GatedAttentionUnit
from omniattn.modules.attention.mla import MultiHeadLatentAttention
from omniattn.modules.attention.multihead import MultiheadAttention
from omniattn.modules.attention.path_attention import PaTHAttention
from omniattn.modules.attention.relative_attention import DisentangledAttention, T5RelativeBias
from omniattn.modules.attention.transformer_xl import TransformerXLAttention
from omniattn.modules.attention.wall_attention import WallAttention
from omniattn.modules.base.bit_linear import BitLinear
from omniattn.modules.base.dropout import Dropout
from omniattn.modules.base.engram import Engram
from omniattn.modules.base.layer import LayerConfig
from omniattn.modules.base.learned import XIELU, DynamicTanh, PolyNorm
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import ChannelMixer, Mixer, Norm
from omniattn.modules.base.mlp import MLP, GatedMLP
from omniattn.modules.base.norm import GroupNorm, LayerNorm, RMSNorm, RMSNormGated
from omniattn.modules.base.positions import (
    ALiBi,
    LearnedPositional,
    SinCosPositional2d,
    SinusoidalPositional,
)
from omniattn.modules.base.residual import DropPath, LayerScale, ParallelResidual, Residual
from omniattn.modules.base.rope import RotaryEmbedding
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import RecurrentState, State
from omniattn.modules.base.streams import Streams
from omniattn.modules.blocks.decoder_block import DecoderBlock
from omniattn.modules.blocks.mtp import MultiTokenPredictor
from omniattn.modules.blocks.residual_streams import (
    AttentionResiduals,
    HyperConnections,
    ManifoldHyperConnections,
)
from omniattn.modules.caches.cache import Cache
from omniattn.modules.caches.compressed import CSAState
from omniattn.modules.caches.evicting import EvictingCache
from omniattn.modules.caches.eviction import H2O, Eviction, SnapKV, Streaming, Threshold, Window
from omniattn.modules.caches.forgetting import ForgettingCache
from omniattn.modules.caches.kv_cache import (
    BlockKeyCache,
    CrossCache,
    KVCache,
    LatentCache,
    PeriodicKeyCache,
)
from omniattn.modules.caches.paged import PagedCache, PagePool
from omniattn.modules.caches.path import PathCache
from omniattn.modules.caches.quantized import QuantizedCache
from omniattn.modules.caches.queries import QueryCache
from omniattn.modules.caches.rolling import RollingCache
from omniattn.modules.caches.selective import SelectiveCache
from omniattn.modules.experts.expert_parallel import ExpertParallel
from omniattn.modules.experts.experts import Experts
from omniattn.modules.experts.moe import MoE
from omniattn.modules.experts.router import Router
from omniattn.modules.experts.router_state import RouterState
from omniattn.modules.recurrent.atlas import AtlasLinear
from omniattn.modules.recurrent.delta_net import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from omniattn.modules.recurrent.delta_variants import Comba, GatedDeltaNet2, GatedDeltaProduct
from omniattn.modules.recurrent.hgrn import HGRN
from omniattn.modules.recurrent.large_mlstm import LargeMLSTM
from omniattn.modules.recurrent.least_squares import GatedKalmaNet, MesaNet
from omniattn.modules.recurrent.linear_attention import (
    DeltaAttention,
    GatedLinearAttention,
    LinearAttention,
    MultiScaleRetention,
)
from omniattn.modules.recurrent.linear_variants import HGRN2, LightNet, LightningAttention, ReBased
from omniattn.modules.recurrent.mixture_of_memories import MixtureOfMemories
from omniattn.modules.recurrent.performer import Performer
from omniattn.modules.recurrent.preconditioned import PrecondGatedDeltaNet, PrecondKDA
from omniattn.modules.recurrent.rodimus import Rodimus
from omniattn.modules.recurrent.slots import (
    ABCAttention,
    CyclicFlowAttention,
    GatedSlotAttention,
    Raven,
)
from omniattn.modules.recurrent.state_mixer import StateMixer
from omniattn.modules.recurrent.titans import TitansLinear, TitansMLP
from omniattn.modules.recurrent.ttt import TTTLinear
from omniattn.modules.recurrent.xlstm import MLSTM, SLSTM
from omniattn.modules.rwkv.heads import RWKV5TimeMix, RWKV6TimeMix, RWKV7TimeMix
from omniattn.modules.rwkv.layers import RWKV4TimeMix, RWKVChannelMix
from omniattn.modules.rwkv.means import RWKVQuadratic, RWKVRecurrent
from omniattn.modules.sparse.bigbird import BigBirdAttention
from omniattn.modules.sparse.block_sparse import BlockSparseAttention
from omniattn.modules.sparse.csa import CompressedSparseAttention
from omniattn.modules.sparse.deltaformer import DeltaFormerAttention
from omniattn.modules.sparse.dsa import DeepSeekSparseAttention, DSAState
from omniattn.modules.sparse.dual_chunk import DualChunkAttention
from omniattn.modules.sparse.hub_spoke import DeterministicSparseAttention, HubSpokeAttention
from omniattn.modules.sparse.local_strided import LocalStridedAttention
from omniattn.modules.sparse.longformer import LongformerAttention
from omniattn.modules.sparse.moba import MoBA
from omniattn.modules.sparse.multi_token import MultiTokenAttention
from omniattn.modules.sparse.neighborhood import (
    NeighborhoodAttention1D,
    NeighborhoodAttention2D,
    NeighborhoodAttention3D,
)
from omniattn.modules.sparse.nsa import NSA, NSAState
from omniattn.modules.sparse.parallax import ParallaxAttention
from omniattn.modules.sparse.routed_blocks import RoutedBlockAttention
from omniattn.modules.sparse.select_attention import SelectAttention
from omniattn.modules.sparse.selective_attention import SelectiveAttention
from omniattn.modules.state_space.log_linear_mamba2 import LogLinearMamba2
from omniattn.modules.state_space.longhorn import Longhorn
from omniattn.modules.state_space.mamba import Mamba
from omniattn.modules.state_space.mamba2 import Mamba2
from omniattn.modules.state_space.mamba3 import Mamba3
from omniattn.modules.state_space.s4 import S4, S4D
from omniattn.modules.state_space.selective_ssm import SimpleSelectiveSSM
from omniattn.modules.vision.spatial_reduction import SpatialReductionAttention
from omniattn.modules.vision.swin import PatchMerging, SwinBlock, WindowAttention

__all__ = [
    "H2O",
    "HGRN",
    "HGRN2",
    "MLP",
    "MLSTM",
    "NSA",
    "S4",
    "S4D",
    "SLSTM",
    "XIELU",
    "ABCAttention",
    "ALiBi",
    "AtlasLinear",
    "Attention",
    "AttentionResiduals",
    "BigBirdAttention",
    "BitLinear",
    "BlockKeyCache",
    "BlockSparseAttention",
    "CSAState",
    "Cache",
    "ChannelMixer",
    "Comba",
    "CompressedSparseAttention",
    "CrossCache",
    "CyclicFlowAttention",
    "DSAState",
    "DecoderBlock",
    "DeepSeekSparseAttention",
    "DeltaAttention",
    "DeltaFormerAttention",
    "DeltaNet",
    "DeterministicSparseAttention",
    "DifferentialAttention",
    "DisentangledAttention",
    "DropPath",
    "Dropout",
    "DualChunkAttention",
    "DynamicTanh",
    "Engram",
    "EvictingCache",
    "Eviction",
    "ExpertParallel",
    "Experts",
    "ForgettingCache",
    "GatedAttentionUnit",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedKalmaNet",
    "GatedLinearAttention",
    "GatedMLP",
    "GatedSlotAttention",
    "GroupNorm",
    "HubSpokeAttention",
    "HyperConnections",
    "KVCache",
    "KimiDeltaAttention",
    "LargeMLSTM",
    "LatentCache",
    "LayerConfig",
    "LayerNorm",
    "LayerScale",
    "LearnedPositional",
    "LightNet",
    "LightningAttention",
    "Linear",
    "LinearAttention",
    "LocalStridedAttention",
    "LogLinearMamba2",
    "LongformerAttention",
    "Longhorn",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "ManifoldHyperConnections",
    "MesaNet",
    "Mixer",
    "MixtureOfMemories",
    "MoBA",
    "MoE",
    "MultiHeadLatentAttention",
    "MultiScaleRetention",
    "MultiTokenAttention",
    "MultiTokenPredictor",
    "MultiheadAttention",
    "NSAState",
    "NeighborhoodAttention1D",
    "NeighborhoodAttention2D",
    "NeighborhoodAttention3D",
    "Norm",
    "PaTHAttention",
    "PagePool",
    "PagedCache",
    "ParallaxAttention",
    "ParallelResidual",
    "PatchMerging",
    "PathCache",
    "Performer",
    "PeriodicKeyCache",
    "PolyNorm",
    "PrecondGatedDeltaNet",
    "PrecondKDA",
    "QuantizedCache",
    "QueryCache",
    "RMSNorm",
    "RMSNormGated",
    "RWKV4TimeMix",
    "RWKV5TimeMix",
    "RWKV6TimeMix",
    "RWKV7TimeMix",
    "RWKVChannelMix",
    "RWKVQuadratic",
    "RWKVRecurrent",
    "Raven",
    "ReBased",
    "RecurrentState",
    "Residual",
    "Rodimus",
    "RollingCache",
    "RotaryEmbedding",
    "RoutedBlockAttention",
    "Router",
    "RouterState",
    "SelectAttention",
    "SelectiveAttention",
    "SelectiveCache",
    "ShortConvolution",
    "SimpleSelectiveSSM",
    "SinCosPositional2d",
    "SinusoidalPositional",
    "SnapKV",
    "SpatialReductionAttention",
    "State",
    "StateMixer",
    "Streaming",
    "Streams",
    "SwinBlock",
    "T5RelativeBias",
    "TTTLinear",
    "Threshold",
    "TitansLinear",
    "TitansMLP",
    "TransformerXLAttention",
    "WallAttention",
    "Window",
    "WindowAttention",
]

explain_keywords(__name__, __all__)


def __getattr__(name: str) -> object:
    """Returns Liger's losses by their former path, with a warning."""
    if name.startswith("Liger") or name == "CrossEntropyOutput":
        warnings.warn(f"omniattn.modules.{name} is now omniattn.compat.liger.{name}", stacklevel=2)
        return getattr(importlib.import_module("omniattn.compat.liger"), name)
    raise AttributeError(f"module 'omniattn.modules' has no attribute {name!r}")
