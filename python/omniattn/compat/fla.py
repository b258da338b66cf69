"""flash-linear-attention 0.5: `fla.ops`, tensors (B, T, H, D).

All return (o, final_state), the latter None without `output_final_state`. `cu_seqlens_cpu`,
`chunk_indices`, `chunk_size` and `disable_recompute` only affect the speed of fla; they are
accepted and ignored. Formulas, shapes and dtypes are those of the functions that the docstrings
name.
"""

from omniattn.compat._fla_delta import (
    chunk_delta_rule,
    chunk_dplr_delta_rule,
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_delta_rule,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
from omniattn.compat._fla_linear import (
    chunk_gla,
    chunk_linear_attn,
    chunk_retention,
    chunk_rwkv6,
    chunk_rwkv7,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_gla,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_rwkv4,
    fused_recurrent_rwkv6,
    fused_recurrent_rwkv7,
)

__all__ = [
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
]
