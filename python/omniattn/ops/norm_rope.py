"""norm_rope: RMSNorm of heads and rotary embedding in one pass."""

from __future__ import annotations

from functools import partial

from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.vmap import Fold
from omniattn.ops.rope import is_shared, refuse_table_gradients
from omniattn.reference.positions import rope as definitions
from omniattn.reference.precision import compute_dtype

__all__ = ["norm_rope"]

#: (x, weight, cos, sin, positions, start, interleaved, eps, offset, cast_first) -> y
norm_rope = DifferentiableOp(
    "norm_rope",
    fakes={
        "rstd": lambda x: x.new_empty(x.shape[:3], dtype=compute_dtype(x)),
        "dweight": lambda x: x.new_empty(x.shape[3], dtype=compute_dtype(x)),
    },
    private=("rstd",),
    formula=definitions.norm_rotary,
    refuse=partial(refuse_table_gradients, "qk_norm_rotary"),
    fold=Fold(("x",), when=is_shared),
)
