"""Layers with parameters, built from a frozen `Config` or its fields and named as in the field."""

from omniattn.functional._keywords import explain_keywords
from omniattn.modules.attention import Attention
from omniattn.modules.bigbird import BigBirdAttention
from omniattn.modules.block_sparse import BlockSparseAttention
from omniattn.modules.cache import Cache
from omniattn.modules.decoder_block import DecoderBlock
from omniattn.modules.delta_net import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from omniattn.modules.differential import DifferentialAttention
from omniattn.modules.dropout import Dropout
from omniattn.modules.dsa import DeepSeekSparseAttention, DSAState
from omniattn.modules.dual_chunk import DualChunkAttention
from omniattn.modules.evicting_cache import EvictingCache
from omniattn.modules.eviction import H2O, Eviction, SnapKV, Streaming, Threshold, Window
from omniattn.modules.expert_parallel import ExpertParallel
from omniattn.modules.experts import Experts
from omniattn.modules.gau import GatedAttentionUnit
from omniattn.modules.hub_spoke import DeterministicSparseAttention, HubSpokeAttention
from omniattn.modules.kv_cache import (
    BlockKeyCache,
    CrossCache,
    KVCache,
    LatentCache,
    PeriodicKeyCache,
)
from omniattn.modules.layer import LayerConfig
from omniattn.modules.liger_cross_entropy import (
    CrossEntropyOutput,
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
)
from omniattn.modules.liger_losses import (
    LigerFusedLinearJSD,
    LigerFusedLinearJSDLoss,
    LigerJSD,
    LigerKLDIVLoss,
)
from omniattn.modules.liger_preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from omniattn.modules.liger_unpaired import LigerFusedLinearGRPOLoss, LigerFusedLinearKTOLoss
from omniattn.modules.linear import Linear
from omniattn.modules.linear_attention import (
    DeltaAttention,
    GatedLinearAttention,
    LinearAttention,
    MultiScaleRetention,
)
from omniattn.modules.local_strided import LocalStridedAttention
from omniattn.modules.longformer import LongformerAttention
from omniattn.modules.mamba import Mamba
from omniattn.modules.mamba2 import Mamba2
from omniattn.modules.mixer import ChannelMixer, Mixer, Norm
from omniattn.modules.mla import MultiHeadLatentAttention
from omniattn.modules.mlp import MLP, GatedMLP
from omniattn.modules.moba import MoBA
from omniattn.modules.moe import MoE
from omniattn.modules.mtp import MultiTokenPredictor
from omniattn.modules.multihead import MultiheadAttention
from omniattn.modules.neighborhood import (
    NeighborhoodAttention1D,
    NeighborhoodAttention2D,
    NeighborhoodAttention3D,
)
from omniattn.modules.norm import GroupNorm, LayerNorm, RMSNorm, RMSNormGated
from omniattn.modules.nsa import NSA, NSAState
from omniattn.modules.paged_cache import PagedCache, PagePool
from omniattn.modules.performer import Performer
from omniattn.modules.positions import (
    ALiBi,
    LearnedPositional,
    SinCosPositional2d,
    SinusoidalPositional,
)
from omniattn.modules.relative_attention import (
    DisentangledAttention,
    T5RelativeBias,
)
from omniattn.modules.residual import DropPath, ParallelResidual, Residual
from omniattn.modules.rolling_cache import RollingCache
from omniattn.modules.rope import RotaryEmbedding
from omniattn.modules.routed_blocks import RoutedBlockAttention
from omniattn.modules.router import Router
from omniattn.modules.router_state import RouterState
from omniattn.modules.rwkv import RWKV4TimeMix, RWKVChannelMix
from omniattn.modules.rwkv_heads import RWKV5TimeMix, RWKV6TimeMix, RWKV7TimeMix
from omniattn.modules.s4 import S4, S4D
from omniattn.modules.selective_attention import SelectiveAttention, SelectiveCache
from omniattn.modules.selective_ssm import SimpleSelectiveSSM
from omniattn.modules.short_conv import ShortConvolution
from omniattn.modules.spatial_reduction import SpatialReductionAttention
from omniattn.modules.state import RecurrentState, State
from omniattn.modules.state_mixer import StateMixer
from omniattn.modules.swin import PatchMerging, SwinBlock, WindowAttention
from omniattn.modules.transformer_xl import TransformerXLAttention
from omniattn.modules.xlstm import MLSTM, SLSTM

__all__ = [
    "H2O",
    "MLP",
    "MLSTM",
    "NSA",
    "S4",
    "S4D",
    "SLSTM",
    "ALiBi",
    "Attention",
    "BigBirdAttention",
    "BlockKeyCache",
    "BlockSparseAttention",
    "Cache",
    "ChannelMixer",
    "CrossCache",
    "CrossEntropyOutput",
    "DSAState",
    "DecoderBlock",
    "DeepSeekSparseAttention",
    "DeltaAttention",
    "DeltaNet",
    "DeterministicSparseAttention",
    "DifferentialAttention",
    "DisentangledAttention",
    "DropPath",
    "Dropout",
    "DualChunkAttention",
    "EvictingCache",
    "Eviction",
    "ExpertParallel",
    "Experts",
    "GatedAttentionUnit",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedMLP",
    "GroupNorm",
    "HubSpokeAttention",
    "KVCache",
    "KimiDeltaAttention",
    "LatentCache",
    "LayerConfig",
    "LayerNorm",
    "LearnedPositional",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
    "LigerJSD",
    "LigerKLDIVLoss",
    "Linear",
    "LinearAttention",
    "LocalStridedAttention",
    "LongformerAttention",
    "Mamba",
    "Mamba2",
    "Mixer",
    "MoBA",
    "MoE",
    "MultiHeadLatentAttention",
    "MultiScaleRetention",
    "MultiTokenPredictor",
    "MultiheadAttention",
    "NSAState",
    "NeighborhoodAttention1D",
    "NeighborhoodAttention2D",
    "NeighborhoodAttention3D",
    "Norm",
    "PagePool",
    "PagedCache",
    "ParallelResidual",
    "PatchMerging",
    "Performer",
    "PeriodicKeyCache",
    "RMSNorm",
    "RMSNormGated",
    "RWKV4TimeMix",
    "RWKV5TimeMix",
    "RWKV6TimeMix",
    "RWKV7TimeMix",
    "RWKVChannelMix",
    "RecurrentState",
    "Residual",
    "RollingCache",
    "RotaryEmbedding",
    "RoutedBlockAttention",
    "Router",
    "RouterState",
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
    "SwinBlock",
    "T5RelativeBias",
    "Threshold",
    "TransformerXLAttention",
    "Window",
    "WindowAttention",
]

explain_keywords(__name__, __all__)
