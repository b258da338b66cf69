"""NATTEN 0.21: `natten`, with tensors (B, ..., H, D) whose middle dimensions are the grid.

`functional.na1d` to `na3d` compute neighborhood attention on the CPU and in every floating dtype.
Names of backends, sizes of tiles, kernel schedules, `torch_compile` and the settings of
`natten.context` affect only the kernels of NATTEN: they are accepted and have no effect.
"""

from omniattn.compat.natten.context import (
    MemoryUsagePreference,
    NattenContext,
    allow_flex_compile,
    allow_flex_compile_backprop,
    are_deterministic_algorithms_enabled,
    disable_flex_compile,
    disable_flex_compile_backprop,
    get_memory_usage_preference,
    is_flex_compile_allowed,
    is_flex_compile_backprop_allowed,
    is_kv_parallelism_in_fused_na_enabled,
    is_memory_usage_default,
    is_memory_usage_strict,
    is_memory_usage_unrestricted,
    set_memory_usage_preference,
    use_deterministic_algorithms,
    use_kv_parallelism_in_fused_na,
)
from omniattn.compat.natten.functional import (
    attention,
    generate_varlen_parameters,
    merge_attentions,
)
from omniattn.compat.natten.modules import (
    NeighborhoodAttention1D,
    NeighborhoodAttention2D,
    NeighborhoodAttention3D,
    NeighborhoodAttentionGeneric,
)
from omniattn.compat.natten.neighborhood import na1d, na2d, na3d, neighborhood_attention_generic

#: True, as in NATTEN with its compiled kernels: all functions are available.
HAS_LIBNATTEN = True

__all__ = [
    "HAS_LIBNATTEN",
    "MemoryUsagePreference",
    "NattenContext",
    "NeighborhoodAttention1D",
    "NeighborhoodAttention2D",
    "NeighborhoodAttention3D",
    "NeighborhoodAttentionGeneric",
    "allow_flex_compile",
    "allow_flex_compile_backprop",
    "are_deterministic_algorithms_enabled",
    "attention",
    "disable_flex_compile",
    "disable_flex_compile_backprop",
    "generate_varlen_parameters",
    "get_memory_usage_preference",
    "is_flex_compile_allowed",
    "is_flex_compile_backprop_allowed",
    "is_kv_parallelism_in_fused_na_enabled",
    "is_memory_usage_default",
    "is_memory_usage_strict",
    "is_memory_usage_unrestricted",
    "merge_attentions",
    "na1d",
    "na2d",
    "na3d",
    "neighborhood_attention_generic",
    "set_memory_usage_preference",
    "use_deterministic_algorithms",
    "use_kv_parallelism_in_fused_na",
]
