"""Layers of `fla.layers`, with fla's arguments, names of weights, results and caches.

A layer returns (y, None, past_key_values). `mode` is checked and has no effect, since one algorithm
serves all lengths, and neither have `output_attentions` and unknown keywords of a forward, as in
fla. Padding is left out of sequences by `attention_mask` (B, T), 0 for padding.
"""

from omniattn.compat.fla_layers.attention import Attention
from omniattn.compat.fla_layers.base import (
    Cache,
    FLACache,
    get_layer_cache,
    get_unpad_data,
    repad_hidden_states,
    require_cache_layer_idx,
    unpad_hidden_states,
    update_layer_cache,
)
from omniattn.compat.fla_layers.delta import (
    DeltaNet,
    GatedDeltaNet,
    KimiDeltaAttention,
    elu_p1,
    sum_norm,
)
from omniattn.compat.fla_layers.gated import (
    GatedLinearAttention,
    HGRN2Attention,
    LightNetAttention,
    MultiScaleRetention,
    SimpleGatedLinearAttention,
)
from omniattn.compat.fla_layers.linear import (
    DPFPFeatureMap,
    HadamardFeatureMap,
    HedgehogFeatureMap,
    LinearAttention,
    T2RFeatureMap,
)
from omniattn.compat.fla_layers.mom import MomAttention
from omniattn.compat.fla_layers.rodimus import RodimusAttention
from omniattn.compat.fla_layers.slots import ABCAttention, GatedSlotAttention, Raven

__all__ = [
    "ABCAttention",
    "Attention",
    "Cache",
    "DPFPFeatureMap",
    "DeltaNet",
    "FLACache",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedSlotAttention",
    "HGRN2Attention",
    "HadamardFeatureMap",
    "HedgehogFeatureMap",
    "KimiDeltaAttention",
    "LightNetAttention",
    "LinearAttention",
    "MomAttention",
    "MultiScaleRetention",
    "Raven",
    "RodimusAttention",
    "SimpleGatedLinearAttention",
    "T2RFeatureMap",
    "elu_p1",
    "get_layer_cache",
    "get_unpad_data",
    "repad_hidden_states",
    "require_cache_layer_idx",
    "sum_norm",
    "unpad_hidden_states",
    "update_layer_cache",
]
