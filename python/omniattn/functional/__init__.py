"""Public functions: they check arguments and call the native ops, or on request the reference."""

from omniattn.functional import masks as masks
from omniattn.functional.activation import bilinear, geglu, reglu, swiglu
from omniattn.functional.attention import attention, scaled_dot_product_attention
from omniattn.functional.gemm import linear
from omniattn.functional.loss import cross_entropy, linear_cross_entropy
from omniattn.functional.norm import layer_norm, rms_norm
from omniattn.functional.rope import apply_rotary, rope_frequencies, rotary_tables

__all__ = [
    "apply_rotary",
    "attention",
    "bilinear",
    "cross_entropy",
    "geglu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "reglu",
    "rms_norm",
    "rope_frequencies",
    "rotary_tables",
    "scaled_dot_product_attention",
    "swiglu",
]
