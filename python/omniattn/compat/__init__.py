"""Functions with the names, arguments and results of other libraries.

``from omniattn.compat import chunk_gla`` replaces ``from fla.ops.gla import chunk_gla``. The
functions call `omniattn.functional`, so they run on the CPU, too, and are differentiable. An
unsupported option raises an error that names it; an option that affects only speed, such as a chunk
size, is accepted and has no effect. The `*_update` functions update states in place and are for
inference. `flash_attn`, `fla`, `mamba_ssm`, `causal_conv1d`, `liger`, `natten`, `xformers` and
`torch` have a module each, and `install` lets imports of libraries that are not installed find
them.
"""

from omniattn.compat._install import install, uninstall
from omniattn.compat.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)
from omniattn.compat.fla import (
    chunk_abc,
    chunk_delta_rule,
    chunk_dplr_delta_rule,
    chunk_gated_delta_rule,
    chunk_gated_oja_rule,
    chunk_gla,
    chunk_gsa,
    chunk_iplr_delta_rule,
    chunk_kda,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_rwkv6,
    chunk_rwkv7,
    chunk_simple_gla,
    fused_chunk_based,
    fused_chunk_delta_rule,
    fused_chunk_gla,
    fused_chunk_linear_attn,
    fused_chunk_retention,
    fused_chunk_simple_gla,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_delta_rule,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gated_oja_rule,
    fused_recurrent_gla,
    fused_recurrent_gsa,
    fused_recurrent_iplr_delta_rule,
    fused_recurrent_kda,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_rwkv4,
    fused_recurrent_rwkv6,
    fused_recurrent_rwkv7,
    fused_recurrent_simple_gla,
    parallel_based,
    parallel_retention,
    parallel_simple_gla,
)
from omniattn.compat.mamba_ssm import (
    mamba_chunk_scan_combined,
    mamba_inner_fn,
    mamba_split_conv1d_scan_combined,
    selective_scan_fn,
    selective_scan_ref,
    selective_state_update,
)
from omniattn.functional._keywords import explain_keywords

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "chunk_abc",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gated_oja_rule",
    "chunk_gla",
    "chunk_gsa",
    "chunk_iplr_delta_rule",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "fused_chunk_based",
    "fused_chunk_delta_rule",
    "fused_chunk_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_oja_rule",
    "fused_recurrent_gla",
    "fused_recurrent_gsa",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv4",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
    "install",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "parallel_based",
    "parallel_retention",
    "parallel_simple_gla",
    "selective_scan_fn",
    "selective_scan_ref",
    "selective_state_update",
    "uninstall",
]

explain_keywords(__name__, __all__)
