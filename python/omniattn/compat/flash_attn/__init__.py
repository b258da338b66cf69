"""flash-attn 2: `flash_attn`, with its padding, rotary positions, losses and norms.

`cute_flash_attn_func`, `cute_flash_attn_varlen_func` and `flash_attn_combine` are flash-attn 4's
`flash_attn.cute`, and `compat.flash_attn.hopper` has flash-attn 3's `flash_attn_interface`.
Functions of `functional` compute all of them, so they run on the CPU and in every floating dtype.
"""

from omniattn.compat._fla.linears import bias_gelu
from omniattn.compat._norms import layer_norm_linear_fn
from omniattn.compat.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from omniattn.compat.flash_attn.cute import (
    cute_flash_attn_func,
    cute_flash_attn_varlen_func,
    flash_attn_combine,
)
from omniattn.compat.flash_attn.dense import (
    FusedDense,
    FusedDenseSqreluDense,
    FusedMLP,
    fused_dense_func,
    fused_dense_sqrelu_dense_function,
    fused_mlp_func,
    swiglu,
)
from omniattn.compat.flash_attn.interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from omniattn.compat.flash_attn.kvcache import flash_attn_with_kvcache
from omniattn.compat.flash_attn.losses import CrossEntropyLoss, cross_entropy_loss
from omniattn.compat.flash_attn.norms import (
    DropoutAddLayerNorm,
    DropoutAddRMSNorm,
    RMSNorm,
    TritonRMSNorm,
    dropout_add_layer_norm,
    dropout_add_layer_norm_parallel_residual,
    dropout_add_rms_norm,
    dropout_add_rms_norm_parallel_residual,
    layer_norm,
    layer_norm_fn,
    rms_norm,
    rms_norm_fn,
)
from omniattn.compat.flash_attn.rotary import (
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)

__all__ = [
    "CrossEntropyLoss",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "FusedDense",
    "FusedDenseSqreluDense",
    "FusedMLP",
    "RMSNorm",
    "RotaryEmbedding",
    "TritonRMSNorm",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "bias_gelu",
    "cross_entropy_loss",
    "cute_flash_attn_func",
    "cute_flash_attn_varlen_func",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_parallel_residual",
    "dropout_add_rms_norm",
    "dropout_add_rms_norm_parallel_residual",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fused_dense_func",
    "fused_dense_sqrelu_dense_function",
    "fused_mlp_func",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "layer_norm",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "pad_input",
    "rms_norm",
    "rms_norm_fn",
    "rotate_half",
    "swiglu",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]
