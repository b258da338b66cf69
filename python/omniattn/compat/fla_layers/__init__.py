"""Layers of `fla.layers`, with fla's arguments, names of weights, results and caches.

A layer returns (y, None, past_key_values). `mode` is checked and has no effect, since one algorithm
serves all lengths, and neither have `output_attentions` and unknown keywords of a forward, as in
fla. Padding is left out of sequences by `attention_mask` (B, T), 0 for padding.
"""

from omniattn.compat.fla_layers.attention import Attention, Parallax
from omniattn.compat.fla_layers.base import (
    ACT2FN,
    Cache,
    FLACache,
    get_layer_cache,
    get_unpad_data,
    repad_hidden_states,
    require_cache_layer_idx,
    unpad_hidden_states,
    unpad_input,
    update_layer_cache,
)
from omniattn.compat.fla_layers.delta import (
    DeltaNet,
    GatedDeltaNet,
    KimiDeltaAttention,
    elu_p1,
    sum_norm,
)
from omniattn.compat.fla_layers.delta_variants import Comba, GatedDeltaNet2, GatedDeltaProduct
from omniattn.compat.fla_layers.feature_maps import (
    DPFPFeatureMap,
    GELUFeatureMap,
    HadamardFeatureMap,
    HedgehogFeatureMap,
    LearnableOuterProductFeatureMap,
    LearnablePolySketchNonNegativeFeatureMap,
    RebasedFeatureMap,
    ReLUFeatureMap,
    SigmoidFeatureMap,
    SquaredReLUFeatureMap,
    SwishFeatureMap,
    T2RFeatureMap,
    TaylorFeatureMap,
    flatten_diag_outer_product,
    flatten_diag_outer_product_off1,
    is_power_of_2,
)
from omniattn.compat.fla_layers.gated import (
    GatedLinearAttention,
    HGRN2Attention,
    HGRNAttention,
    LightNetAttention,
    MultiScaleRetention,
    SimpleGatedLinearAttention,
)
from omniattn.compat.fla_layers.gated_attention import (
    DeltaFormerAttention,
    ForgettingAttention,
    PaTHAttention,
    WallAttention,
)
from omniattn.compat.fla_layers.linear import (
    BasedLinearAttention,
    LinearAttention,
    ReBasedLinearAttention,
)
from omniattn.compat.fla_layers.mesa import GatedKalmaNet, MesaNet
from omniattn.compat.fla_layers.mom import MomAttention
from omniattn.compat.fla_layers.precond import PrecondGatedDeltaNet, PrecondKDA
from omniattn.compat.fla_layers.rodimus import RodimusAttention
from omniattn.compat.fla_layers.rwkv import (
    DDLerpLinear,
    LerpLinear,
    LoRA,
    RWKV6Attention,
    RWKV7Attention,
)
from omniattn.compat.fla_layers.slots import (
    ABCAttention,
    CyclicFlowAttention,
    GatedSlotAttention,
    Raven,
)
from omniattn.compat.fla_layers.sparse import (
    MoBA,
    MultiheadLatentAttention,
    NativeSparseAttention,
    yarn_get_mscale,
)
from omniattn.compat.fla_layers.state_space import LogLinearMamba2, Mamba, Mamba2, Mamba3

__all__ = [
    "ACT2FN",
    "ABCAttention",
    "Attention",
    "BasedLinearAttention",
    "Cache",
    "Comba",
    "CyclicFlowAttention",
    "DDLerpLinear",
    "DPFPFeatureMap",
    "DeltaFormerAttention",
    "DeltaNet",
    "FLACache",
    "ForgettingAttention",
    "GELUFeatureMap",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedKalmaNet",
    "GatedLinearAttention",
    "GatedSlotAttention",
    "HGRN2Attention",
    "HGRNAttention",
    "HadamardFeatureMap",
    "HedgehogFeatureMap",
    "KimiDeltaAttention",
    "LearnableOuterProductFeatureMap",
    "LearnablePolySketchNonNegativeFeatureMap",
    "LerpLinear",
    "LightNetAttention",
    "LinearAttention",
    "LoRA",
    "LogLinearMamba2",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MesaNet",
    "MoBA",
    "MomAttention",
    "MultiScaleRetention",
    "MultiheadLatentAttention",
    "NativeSparseAttention",
    "PaTHAttention",
    "Parallax",
    "PrecondGatedDeltaNet",
    "PrecondKDA",
    "RWKV6Attention",
    "RWKV7Attention",
    "Raven",
    "ReBasedLinearAttention",
    "ReLUFeatureMap",
    "RebasedFeatureMap",
    "RodimusAttention",
    "SigmoidFeatureMap",
    "SimpleGatedLinearAttention",
    "SquaredReLUFeatureMap",
    "SwishFeatureMap",
    "T2RFeatureMap",
    "TaylorFeatureMap",
    "WallAttention",
    "elu_p1",
    "flatten_diag_outer_product",
    "flatten_diag_outer_product_off1",
    "get_layer_cache",
    "get_unpad_data",
    "is_power_of_2",
    "repad_hidden_states",
    "require_cache_layer_idx",
    "sum_norm",
    "unpad_hidden_states",
    "unpad_input",
    "update_layer_cache",
    "yarn_get_mscale",
]
