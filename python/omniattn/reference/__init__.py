"""The definition of every op in plain torch: test oracle, text to read, and explicit fallback.

Same signatures as `omniattn.functional` without `backend`; differentiable; half inputs compute in
fp32 and are rounded once, fp32 and fp64 compute in their own dtype.
"""

from omniattn.reference.activation import bilinear, geglu, reglu, swiglu
from omniattn.reference.attention import attention, scaled_dot_product_attention
from omniattn.reference.gemm import linear
from omniattn.reference.loss import cross_entropy, linear_cross_entropy
from omniattn.reference.norm import layer_norm, rms_norm
from omniattn.reference.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    apply_rotary,
    rope_frequencies,
    rotary_tables,
)

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "RopeScaling",
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
