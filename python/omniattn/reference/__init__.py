"""Definitions of all ops in plain torch: test oracle, specification and explicit fallback.

Signatures are those of `omniattn.functional` without `backend`. All definitions are differentiable.
Half-precision inputs are computed in fp32 and rounded once, fp32 and fp64 in their own dtype.
"""

from omniattn.reference.attention.attention import (
    attention,
    attention_cached,
    attention_varlen,
    attention_weights,
    merge_attention,
    scaled_dot_product_attention,
)
from omniattn.reference.attention.attention_int8 import attention_int8, quantize_int8
from omniattn.reference.attention.forgetting import forgetting_attention
from omniattn.reference.attention.multi_token import multi_token_attention
from omniattn.reference.attention.parallax import parallax_attention
from omniattn.reference.attention.path_attention import path_attention
from omniattn.reference.attention.softpick import softpick_attention
from omniattn.reference.attention.sparsemax_attention import sparsemax_attention
from omniattn.reference.attention.stick_breaking import stick_breaking_attention
from omniattn.reference.attention.wall_attention import wall_attention
from omniattn.reference.layers.activation import (
    activate,
    bilinear,
    clamped_swiglu,
    gated_activation,
    geglu,
    glu,
    reglu,
    swiglu,
)
from omniattn.reference.layers.ffn import glu_mlp, mlp
from omniattn.reference.layers.gemm import linear
from omniattn.reference.layers.moe import moe_experts
from omniattn.reference.layers.norm import group_norm, layer_norm, rms_norm, rms_norm_gated
from omniattn.reference.layers.random import dropout, uniform_like
from omniattn.reference.layers.topk import top_k
from omniattn.reference.losses.loss import (
    cross_entropy,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_prob,
)
from omniattn.reference.positions.positions import (
    alibi_bias,
    alibi_slopes,
    grid_positions,
    interpolate_grid,
    interpolate_positions,
    masked_positions,
    packed_positions,
    sincos_2d,
    sinusoidal,
)
from omniattn.reference.positions.rope import (
    apply_rotary,
    axial_frequencies,
    mrope_axes,
    qk_norm_rotary,
    rope_frequencies,
    rotary_tables,
)
from omniattn.reference.positions.rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    RopeScaling,
    YarnScaling,
    scaling_from_hf,
    scaling_to_hf,
)
from omniattn.reference.recurrences.atlas import atlas_linear
from omniattn.reference.recurrences.conv import causal_conv1d, dynamic_conv1d
from omniattn.reference.recurrences.delta_variants import (
    comba,
    gated_delta_product,
    gated_delta_rule_2,
    gated_oja_rule,
    preconditioned_delta_rule,
)
from omniattn.reference.recurrences.deltaformer import deltaformer_attention
from omniattn.reference.recurrences.least_squares import gated_kalmanet, mesa_net
from omniattn.reference.recurrences.lightnet import lightnet_attention
from omniattn.reference.recurrences.log_linear import log_linear_attention
from omniattn.reference.recurrences.random_features import random_feature_attention
from omniattn.reference.recurrences.recurrence import (
    delta_rule,
    dplr_delta_rule,
    gated_delta_rule,
    gated_linear_attention,
    kimi_delta_attention,
    linear_attention,
    recurrence,
    retention,
    rwkv6,
    rwkv7,
    ssd,
)
from omniattn.reference.recurrences.scan import (
    exponential_gates,
    linear_scan,
    longhorn_scan,
    mlstm,
    rwkv4,
    rwkv_quadratic,
    rwkv_recurrent,
    selective_scan,
    slstm,
)
from omniattn.reference.recurrences.slots import (
    abc_attention,
    cyclic_flow_attention,
    gated_slot_attention,
)
from omniattn.reference.recurrences.titans import titans_linear, titans_mlp
from omniattn.reference.recurrences.ttt import ttt_linear
from omniattn.reference.sparse.dual_chunk import (
    dual_chunk_attention,
    dual_chunk_mscale,
    local_strided_attention,
)
from omniattn.reference.sparse.eviction import evicting_attention
from omniattn.reference.sparse.indexer import dsa_indexer, dsa_indexer_loss
from omniattn.reference.sparse.neighborhood import na1d, na2d, na3d
from omniattn.reference.sparse.routed_blocks import routed_block_attention
from omniattn.reference.sparse.selected_attention import select_attention, selected_attention
from omniattn.reference.sparse.selected_blocks import moba_attention, nsa_attention
from omniattn.reference.sparse.selective import selective_attention
from omniattn.reference.sparse.sparse import (
    bigbird_attention,
    bigbird_random_blocks,
    detsa_attention,
    hub_spoke_attention,
    longformer_attention,
)
from omniattn.reference.state_space.mamba3 import mamba3
from omniattn.reference.state_space.state_space import ssm_kernel, ssm_recurrence
from omniattn.reference.state_space.structured import cauchy, vandermonde

__all__ = [
    "DynamicNTKScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NTKScaling",
    "RopeScaling",
    "YarnScaling",
    "abc_attention",
    "activate",
    "alibi_bias",
    "alibi_slopes",
    "apply_rotary",
    "atlas_linear",
    "attention",
    "attention_cached",
    "attention_int8",
    "attention_varlen",
    "attention_weights",
    "axial_frequencies",
    "bigbird_attention",
    "bigbird_random_blocks",
    "bilinear",
    "cauchy",
    "causal_conv1d",
    "clamped_swiglu",
    "comba",
    "cross_entropy",
    "cyclic_flow_attention",
    "delta_rule",
    "deltaformer_attention",
    "detsa_attention",
    "dplr_delta_rule",
    "dropout",
    "dsa_indexer",
    "dsa_indexer_loss",
    "dual_chunk_attention",
    "dual_chunk_mscale",
    "dynamic_conv1d",
    "evicting_attention",
    "exponential_gates",
    "forgetting_attention",
    "gated_activation",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_delta_rule_2",
    "gated_kalmanet",
    "gated_linear_attention",
    "gated_oja_rule",
    "gated_slot_attention",
    "geglu",
    "glu",
    "glu_mlp",
    "grid_positions",
    "group_norm",
    "hub_spoke_attention",
    "interpolate_grid",
    "interpolate_positions",
    "jsd",
    "kimi_delta_attention",
    "layer_norm",
    "lightnet_attention",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_log_prob",
    "linear_scan",
    "local_strided_attention",
    "log_linear_attention",
    "longformer_attention",
    "longhorn_scan",
    "mamba3",
    "masked_positions",
    "merge_attention",
    "mesa_net",
    "mlp",
    "mlstm",
    "moba_attention",
    "moe_experts",
    "mrope_axes",
    "multi_token_attention",
    "na1d",
    "na2d",
    "na3d",
    "nsa_attention",
    "packed_positions",
    "parallax_attention",
    "path_attention",
    "preconditioned_delta_rule",
    "qk_norm_rotary",
    "quantize_int8",
    "random_feature_attention",
    "recurrence",
    "reglu",
    "retention",
    "rms_norm",
    "rms_norm_gated",
    "rope_frequencies",
    "rotary_tables",
    "routed_block_attention",
    "rwkv4",
    "rwkv6",
    "rwkv7",
    "rwkv_quadratic",
    "rwkv_recurrent",
    "scaled_dot_product_attention",
    "scaling_from_hf",
    "scaling_to_hf",
    "select_attention",
    "selected_attention",
    "selective_attention",
    "selective_scan",
    "sincos_2d",
    "sinusoidal",
    "slstm",
    "softpick_attention",
    "sparsemax_attention",
    "ssd",
    "ssm_kernel",
    "ssm_recurrence",
    "stick_breaking_attention",
    "swiglu",
    "titans_linear",
    "titans_mlp",
    "top_k",
    "ttt_linear",
    "uniform_like",
    "vandermonde",
    "wall_attention",
]
