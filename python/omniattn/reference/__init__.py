"""Definitions of all ops in plain torch: test oracle, specification and explicit fallback.

Signatures are those of `omniattn.functional` without `backend`. All definitions are differentiable.
Half-precision inputs are computed in fp32 and rounded once, fp32 and fp64 in their own dtype.
"""

from omniattn.reference.activation import (
    activate,
    bilinear,
    clamped_swiglu,
    gated_activation,
    geglu,
    glu,
    reglu,
    swiglu,
)
from omniattn.reference.attention import (
    attention,
    attention_cached,
    attention_varlen,
    attention_weights,
    merge_attention,
    scaled_dot_product_attention,
)
from omniattn.reference.attention_int8 import attention_int8, quantize_int8
from omniattn.reference.conv import causal_conv1d
from omniattn.reference.delta_variants import (
    comba,
    gated_delta_product,
    gated_delta_rule_2,
    gated_oja_rule,
    preconditioned_delta_rule,
)
from omniattn.reference.deltaformer import deltaformer_attention
from omniattn.reference.dual_chunk import (
    dual_chunk_attention,
    dual_chunk_mscale,
    local_strided_attention,
)
from omniattn.reference.eviction import evicting_attention
from omniattn.reference.ffn import glu_mlp, mlp
from omniattn.reference.forgetting import forgetting_attention
from omniattn.reference.gemm import linear
from omniattn.reference.indexer import dsa_indexer, dsa_indexer_loss
from omniattn.reference.lightnet import lightnet_attention
from omniattn.reference.log_linear import log_linear_attention
from omniattn.reference.loss import (
    cross_entropy,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_prob,
)
from omniattn.reference.mamba3 import mamba3
from omniattn.reference.mesa_net import mesa_net
from omniattn.reference.moe import moe_experts
from omniattn.reference.neighborhood import na1d, na2d, na3d
from omniattn.reference.norm import group_norm, layer_norm, rms_norm, rms_norm_gated
from omniattn.reference.path_attention import path_attention
from omniattn.reference.positions import (
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
from omniattn.reference.random import dropout, uniform_like
from omniattn.reference.random_features import random_feature_attention
from omniattn.reference.recurrence import (
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
from omniattn.reference.rope import (
    apply_rotary,
    axial_frequencies,
    mrope_axes,
    qk_norm_rotary,
    rope_frequencies,
    rotary_tables,
)
from omniattn.reference.rope_scaling import (
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
from omniattn.reference.routed_blocks import routed_block_attention
from omniattn.reference.scan import (
    exponential_gates,
    linear_scan,
    mlstm,
    rwkv4,
    rwkv_quadratic,
    rwkv_recurrent,
    selective_scan,
    slstm,
)
from omniattn.reference.selected_attention import select_attention, selected_attention
from omniattn.reference.selected_blocks import moba_attention, nsa_attention
from omniattn.reference.selective import selective_attention
from omniattn.reference.slots import abc_attention, gated_slot_attention
from omniattn.reference.sparse import (
    bigbird_attention,
    bigbird_random_blocks,
    detsa_attention,
    hub_spoke_attention,
    longformer_attention,
)
from omniattn.reference.state_space import ssm_kernel, ssm_recurrence
from omniattn.reference.stick_breaking import stick_breaking_attention
from omniattn.reference.structured import cauchy, vandermonde
from omniattn.reference.titans import titans_linear
from omniattn.reference.topk import top_k
from omniattn.reference.ttt import ttt_linear
from omniattn.reference.wall_attention import wall_attention

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
    "delta_rule",
    "deltaformer_attention",
    "detsa_attention",
    "dplr_delta_rule",
    "dropout",
    "dsa_indexer",
    "dsa_indexer_loss",
    "dual_chunk_attention",
    "dual_chunk_mscale",
    "evicting_attention",
    "exponential_gates",
    "forgetting_attention",
    "gated_activation",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_delta_rule_2",
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
    "mamba3",
    "masked_positions",
    "merge_attention",
    "mesa_net",
    "mlp",
    "mlstm",
    "moba_attention",
    "moe_experts",
    "mrope_axes",
    "na1d",
    "na2d",
    "na3d",
    "nsa_attention",
    "packed_positions",
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
    "ssd",
    "ssm_kernel",
    "ssm_recurrence",
    "stick_breaking_attention",
    "swiglu",
    "titans_linear",
    "top_k",
    "ttt_linear",
    "uniform_like",
    "vandermonde",
    "wall_attention",
]
