"""Public functions: they check arguments and call the native ops, or on request the reference."""

from omniattn.functional import masks as masks
from omniattn.functional import scores as scores
from omniattn.functional._keywords import explain_keywords
from omniattn.functional.attention.attention import attention
from omniattn.functional.attention.forgetting import forgetting_attention
from omniattn.functional.attention.int8 import attention_int8, quantize_int8
from omniattn.functional.attention.lse import attention_weights, merge_attention
from omniattn.functional.attention.multi_token import multi_token_attention
from omniattn.functional.attention.parallax import parallax_attention
from omniattn.functional.attention.path_attention import path_attention
from omniattn.functional.attention.sdpa import scaled_dot_product_attention
from omniattn.functional.attention.selection import select_attention
from omniattn.functional.attention.softpick import softpick_attention
from omniattn.functional.attention.sparsemax_attention import sparsemax_attention
from omniattn.functional.attention.stick_breaking import stick_breaking_attention
from omniattn.functional.attention.varlen import attention_cached, attention_varlen
from omniattn.functional.attention.wall_attention import wall_attention
from omniattn.functional.layers.activation import (
    bilinear,
    clamped_swiglu,
    geglu,
    glu,
    reglu,
    swiglu,
)
from omniattn.functional.layers.bit_linear import bit_linear
from omniattn.functional.layers.ffn import glu_mlp, mlp
from omniattn.functional.layers.gated_norm import group_norm, rms_norm_gated
from omniattn.functional.layers.gemm import linear
from omniattn.functional.layers.moe import moe_experts
from omniattn.functional.layers.ngrams import ngram_hashes
from omniattn.functional.layers.norm import layer_norm, rms_norm
from omniattn.functional.layers.random import dropout, normal_like, uniform_like
from omniattn.functional.layers.topk import top_k
from omniattn.functional.losses.cross_entropy import (
    cross_entropy,
    linear_cross_entropy,
    linear_log_prob,
)
from omniattn.functional.losses.divergence import jsd, linear_jsd
from omniattn.functional.losses.policy import PolicyLoss, grpo_loss
from omniattn.functional.losses.preference import (
    cpo_loss,
    dpo_loss,
    kto_loss,
    orpo_loss,
    sequence_log_prob,
    simpo_loss,
)
from omniattn.functional.positions.encodings import (
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
from omniattn.functional.positions.rope import apply_rotary, qk_norm_rotary
from omniattn.functional.positions.rope_tables import (
    axial_frequencies,
    mrope_axes,
    rope_frequencies,
    rotary_tables,
)
from omniattn.functional.recurrences.conv import causal_conv1d
from omniattn.functional.recurrences.delta_rule import (
    delta_rule,
    dplr_delta_rule,
    gated_delta_rule,
    kimi_delta_attention,
)
from omniattn.functional.recurrences.delta_variants import (
    comba,
    gated_delta_product,
    gated_delta_rule_2,
    gated_oja_rule,
    preconditioned_delta_rule,
)
from omniattn.functional.recurrences.deltaformer import deltaformer_attention
from omniattn.functional.recurrences.dynamic_conv import dynamic_conv1d
from omniattn.functional.recurrences.least_squares import gated_kalmanet, mesa_net
from omniattn.functional.recurrences.lightnet import lightnet_attention
from omniattn.functional.recurrences.linear_attention import (
    gated_linear_attention,
    linear_attention,
    retention,
)
from omniattn.functional.recurrences.log_linear import log_linear_attention
from omniattn.functional.recurrences.mlstm import mlstm
from omniattn.functional.recurrences.random_features import (
    orthogonal_gaussian,
    random_feature_attention,
    random_features,
)
from omniattn.functional.recurrences.rwkv import rwkv6, rwkv7, rwkv_quadratic, rwkv_recurrent
from omniattn.functional.recurrences.scan import linear_scan, rwkv4, slstm
from omniattn.functional.recurrences.slots import (
    abc_attention,
    cyclic_flow_attention,
    gated_slot_attention,
)
from omniattn.functional.recurrences.titans import atlas_linear, titans_linear, titans_mlp
from omniattn.functional.recurrences.ttt import ttt_linear
from omniattn.functional.routing import (
    Routing,
    cv_squared,
    default_vector_gradient,
    drop_over_capacity,
    drop_second_at_random,
    expert_capacity,
    expert_choice,
    expert_counts,
    expert_importance,
    llama4_top_k,
    load_balance_loss,
    noisy_top_k,
    router_jitter,
    router_z_loss,
    sigmoid_top_k,
    softmax_top_k,
    top_k_softmax,
    update_default_vectors,
    update_router_bias,
)
from omniattn.functional.sparse.bigbird import bigbird_attention, bigbird_random_blocks
from omniattn.functional.sparse.detsa import detsa_attention
from omniattn.functional.sparse.dual_chunk import (
    dual_chunk_attention,
    dual_chunk_mscale,
    local_strided_attention,
)
from omniattn.functional.sparse.hub_spoke import hub_spoke_attention
from omniattn.functional.sparse.indexer import dsa_indexer, dsa_indexer_loss
from omniattn.functional.sparse.longformer import longformer_attention
from omniattn.functional.sparse.neighborhood import na1d, na2d, na3d
from omniattn.functional.sparse.routed_blocks import routed_block_attention
from omniattn.functional.sparse.selected_attention import selected_attention
from omniattn.functional.sparse.selected_blocks import moba_attention, nsa_attention
from omniattn.functional.sparse.selective import selective_attention
from omniattn.functional.state_space.linear_system import ssm_kernel, ssm_recurrence
from omniattn.functional.state_space.longhorn import longhorn_scan
from omniattn.functional.state_space.mamba3 import mamba3
from omniattn.functional.state_space.parameters import discretize, hippo, hippo_legs, nplr, ssm_init
from omniattn.functional.state_space.s4 import fft_conv, s4, s4_kernel, s4d, s4d_kernel
from omniattn.functional.state_space.selective_scan import selective_scan
from omniattn.functional.state_space.ssd import ssd
from omniattn.functional.state_space.structured import cauchy, vandermonde
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

__all__ = [
    "DynamicNTKScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NTKScaling",
    "PolicyLoss",
    "RopeScaling",
    "Routing",
    "YarnScaling",
    "abc_attention",
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
    "bit_linear",
    "cauchy",
    "causal_conv1d",
    "clamped_swiglu",
    "comba",
    "cpo_loss",
    "cross_entropy",
    "cv_squared",
    "cyclic_flow_attention",
    "default_vector_gradient",
    "delta_rule",
    "deltaformer_attention",
    "detsa_attention",
    "discretize",
    "dplr_delta_rule",
    "dpo_loss",
    "drop_over_capacity",
    "drop_second_at_random",
    "dropout",
    "dsa_indexer",
    "dsa_indexer_loss",
    "dual_chunk_attention",
    "dual_chunk_mscale",
    "dynamic_conv1d",
    "expert_capacity",
    "expert_choice",
    "expert_counts",
    "expert_importance",
    "fft_conv",
    "forgetting_attention",
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
    "grpo_loss",
    "hippo",
    "hippo_legs",
    "hub_spoke_attention",
    "interpolate_grid",
    "interpolate_positions",
    "jsd",
    "kimi_delta_attention",
    "kto_loss",
    "layer_norm",
    "lightnet_attention",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_log_prob",
    "linear_scan",
    "llama4_top_k",
    "load_balance_loss",
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
    "ngram_hashes",
    "noisy_top_k",
    "normal_like",
    "nplr",
    "nsa_attention",
    "orpo_loss",
    "orthogonal_gaussian",
    "packed_positions",
    "parallax_attention",
    "path_attention",
    "preconditioned_delta_rule",
    "qk_norm_rotary",
    "quantize_int8",
    "random_feature_attention",
    "random_features",
    "reglu",
    "retention",
    "rms_norm",
    "rms_norm_gated",
    "rope_frequencies",
    "rotary_tables",
    "routed_block_attention",
    "router_jitter",
    "router_z_loss",
    "rwkv4",
    "rwkv6",
    "rwkv7",
    "rwkv_quadratic",
    "rwkv_recurrent",
    "s4",
    "s4_kernel",
    "s4d",
    "s4d_kernel",
    "scaled_dot_product_attention",
    "scaling_from_hf",
    "scaling_to_hf",
    "select_attention",
    "selected_attention",
    "selective_attention",
    "selective_scan",
    "sequence_log_prob",
    "sigmoid_top_k",
    "simpo_loss",
    "sincos_2d",
    "sinusoidal",
    "slstm",
    "softmax_top_k",
    "softpick_attention",
    "sparsemax_attention",
    "ssd",
    "ssm_init",
    "ssm_kernel",
    "ssm_recurrence",
    "stick_breaking_attention",
    "swiglu",
    "titans_linear",
    "titans_mlp",
    "top_k",
    "top_k_softmax",
    "ttt_linear",
    "uniform_like",
    "update_default_vectors",
    "update_router_bias",
    "vandermonde",
    "wall_attention",
]

explain_keywords(__name__, __all__)
explain_keywords(masks.__name__, masks.__all__)
explain_keywords(scores.__name__, scores.__all__)
