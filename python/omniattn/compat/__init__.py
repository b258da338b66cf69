"""Functions of other libraries under their names, with their arguments and results, by ours.

``from omniattn.compat import chunk_gla`` takes the place of ``from fla.ops.gla import chunk_gla``.
They run wherever ours run, on the CPU too, and are differentiable. An option that ours cannot
honour raises, and names itself; one that changes speed alone, such as a chunk size, changes
nothing. The `*_update` functions write states in place and are for inference. The losses of Liger
are in `omniattn.modules` under their names.
"""

from omniattn.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from omniattn.compat.fla import (
    chunk_delta_rule,
    chunk_dplr_delta_rule,
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_linear_attn,
    chunk_retention,
    chunk_rwkv6,
    chunk_rwkv7,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_delta_rule,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_rwkv4,
    fused_recurrent_rwkv6,
    fused_recurrent_rwkv7,
)
from omniattn.compat.mamba_ssm import (
    mamba_chunk_scan_combined,
    selective_scan_fn,
    selective_scan_ref,
    selective_state_update,
)

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv4",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
    "mamba_chunk_scan_combined",
    "selective_scan_fn",
    "selective_scan_ref",
    "selective_state_update",
]
