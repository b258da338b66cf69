"""A small config of every module."""

from torch import nn

from omniattn import modules
from omniattn.modules import MLP, Attention, RMSNorm, WindowAttention
from omniattn.modules.base.layer import Layer

ATTENTION, NORM = Attention.Config(8, 2), RMSNorm.Config(8)

#: Fields of the Config of every module, and what else the module must have.
FIELDS = {
    "ALiBi": {"num_heads": 2, "trainable": True},
    "AttentionResiduals": {"dim": 8},
    "HyperConnections": {"dim": 8},
    "ManifoldHyperConnections": {"dim": 8},
    "Attention": {"dim": 8, "num_heads": 2, "causal": False},
    "DecoderBlock": {"mixer": ATTENTION, "mlp": MLP.Config(8, 16), "norm": NORM},
    "DeepSeekSparseAttention": {
        **{"dim": 8, "num_heads": 2, "q_lora_rank": None, "kv_lora_rank": 4},
        **{"qk_nope_dim": 4, "qk_rope_dim": 2, "v_dim": 4, "index_heads": 2, "index_dim": 4},
    },
    "DeltaAttention": {"dim": 8, "num_heads": 2},
    "DeltaNet": {"dim": 8, "num_heads": 2},
    "DifferentialAttention": {"dim": 8, "num_heads": 2, "depth": 1},
    "DisentangledAttention": {"dim": 8, "num_heads": 2},
    "GatedAttentionUnit": {"dim": 8, "key_dim": 4},
    "GatedDeltaNet": {"dim": 8, "num_heads": 2},
    "Comba": {"dim": 8, "num_heads": 2},
    "GatedDeltaNet2": {"dim": 8, "num_heads": 2},
    "GatedDeltaProduct": {"dim": 8, "num_heads": 2},
    "GatedLinearAttention": {"dim": 8, "num_heads": 2},
    "GatedMLP": {"dim": 8, "hidden_dim": 16},
    "GroupNorm": {"dim": 8, "num_groups": 2},
    "HGRN": {"dim": 8},
    "HGRN2": {"dim": 8, "num_heads": 2},
    "LightningAttention": {"dim": 8, "num_heads": 2},
    "ReBased": {"dim": 8, "num_heads": 2},
    "KimiDeltaAttention": {"dim": 8, "num_heads": 2},
    "LargeMLSTM": {"dim": 8, "num_heads": 2},
    "RWKVQuadratic": {"dim": 8, "num_heads": 2},
    "RWKVRecurrent": {"dim": 8, "num_heads": 2},
    "LayerNorm": {"dim": 8, "bias": False},
    "LearnedPositional": {"max_positions": 4, "dim": 8},
    "DynamicTanh": {"dim": 8},
    "PolyNorm": {"eps": 1e-3},
    "XIELU": {"alpha_p": 0.7, "beta": 0.25},
    "Experts": {"dim": 8, "hidden_dim": 4, "experts": 4},
    "LinearAttention": {"dim": 8, "num_heads": 2},
    "Mamba": {"dim": 8},
    "SimpleSelectiveSSM": {"dim": 8, "d_state": 4},
    "LogLinearMamba2": {"dim": 8, "d_state": 4, "headdim": 8},
    "Mamba2": {"dim": 8, "d_state": 4, "headdim": 8},
    "Mamba3": {"dim": 8, "d_state": 4, "headdim": 8},
    "Linear": {"in_features": 8, "out_features": 4},
    "MLSTM": {"dim": 8, "num_heads": 2},
    "MLP": {"dim": 8, "hidden_dim": 16},
    "MoE": {"dim": 8, "hidden_dim": 4, "experts": 4, "top_k": 2},
    "MultiHeadLatentAttention": {
        **{"dim": 8, "num_heads": 2, "q_lora_rank": None, "kv_lora_rank": 4},
        **{"qk_nope_dim": 4, "qk_rope_dim": 2, "v_dim": 4},
    },
    "MultiScaleRetention": {"dim": 8, "num_heads": 2},
    "MultiTokenPredictor": {"dim": 8, "depths": 2},
    "MultiheadAttention": {"embed_dim": 8, "num_heads": 2},
    "PatchMerging": {"dim": 8},
    "S4": {"dim": 8},
    "S4D": {"dim": 8},
    "SLSTM": {"dim": 8, "num_heads": 2},
    "MoBA": {"dim": 8, "num_heads": 2, "block_size": 2},
    "NSA": {"dim": 8, "num_heads": 2, "compress_dim": 4},
    "NeighborhoodAttention1D": {"dim": 8, "num_heads": 2, "kernel_size": 3, "is_causal": True},
    "NeighborhoodAttention2D": {"dim": 8, "num_heads": 2, "kernel_size": (3, 5)},
    "NeighborhoodAttention3D": {"dim": 8, "num_heads": 2, "kernel_size": 3, "stride": (1, 2, 3)},
    "Performer": {"dim": 8, "num_heads": 2},
    "SelectAttention": {"dim": 8, "num_heads": 2},
    "WallAttention": {"dim": 8, "num_heads": 2},
    "PaTHAttention": {"dim": 8, "num_heads": 2, "w_rank": 4},
    "DeltaFormerAttention": {"dim": 8, "num_heads": 2},
    "SelectiveAttention": {"dim": 8, "num_heads": 2},
    "BigBirdAttention": {"dim": 8, "num_heads": 2},
    "BlockSparseAttention": {"dim": 8, "num_heads": 2, "block_size": 4},
    "DeterministicSparseAttention": {"dim": 8, "num_heads": 2},
    "DualChunkAttention": {"dim": 8, "num_heads": 2},
    "HubSpokeAttention": {"dim": 8, "num_heads": 2},
    "LocalStridedAttention": {"dim": 8, "num_heads": 2},
    "LongformerAttention": {"dim": 8, "num_heads": 2},
    "RMSNorm": {"dim": 8, "eps": 1e-3},
    "RMSNormGated": {"dim": 8},
    "RWKV4TimeMix": {"dim": 8},
    "RWKV5TimeMix": {"dim": 8, "head_dim": 4},
    "RWKV6TimeMix": {"dim": 8, "head_dim": 4},
    "RWKV7TimeMix": {"dim": 8, "head_dim": 4},
    "RWKVChannelMix": {"dim": 8},
    "RotaryEmbedding": {"rotary_dim": 8},
    "RoutedBlockAttention": {"dim": 8, "num_heads": 2, "block_size": 2},
    "Router": {"dim": 8, "experts": 4, "top_k": 2},
    "ShortConvolution": {"dim": 8},
    "SinCosPositional2d": {"dim": 8},
    "SinusoidalPositional": {"dim": 8},
    "SpatialReductionAttention": {"dim": 8, "num_heads": 2, "sr_ratio": 2},
    "SwinBlock": {"attention": WindowAttention.Config(8, 2)},
    "T5RelativeBias": {"num_heads": 2},
    "TransformerXLAttention": {"dim": 8, "num_heads": 2},
    "WindowAttention": {"dim": 8, "num_heads": 2},
}
OTHERS = {"MultiTokenPredictor": {"block": nn.Identity}}
LAYERS = [n for n in modules.__all__ if n in Layer.layers]


def valid_config(name):
    config = getattr(modules, name).Config
    return getattr(config, "of", config)(**FIELDS[name])
