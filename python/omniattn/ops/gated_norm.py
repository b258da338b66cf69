"""gated_norm: RMSNorm or LayerNorm of groups of the last dimension, with an optional gate."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from omniattn.ops.activation import ACTIVATION_NAMES
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.layers import norm as definitions
from omniattn.reference.precision import compute_dtype

__all__ = ["GATE_PLACES", "gated_norm"]

#: Position of the gate -> its number in csrc/kernels/norm/gated_norm.h.
GATE_PLACES = {"none": 0, "before": 1, "after": 2}

_PLACE_NAMES = {number: name for name, number in GATE_PLACES.items()}


def _stats(x: Tensor, groups: int) -> Tensor:
    return x.new_empty((math.prod(x.shape[:-1]), groups, 2), dtype=compute_dtype(x))


def _vector(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[-1:])


def _formula(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    gate: int,
    act: int,
    *options: Any,
) -> Tensor:
    names = _PLACE_NAMES[gate], ACTIVATION_NAMES[act]
    return definitions.gated_norm(x, z, weight, bias, groups, *names, *options)


#: (x, z, weight, bias, groups, gate, act, center, eps, cast_first) -> y
gated_norm = DifferentiableOp(
    "gated_norm",
    fakes={"stats": _stats, "dweight": _vector, "dbias": _vector},
    private=("stats",),
    formula=_formula,
    fold=Fold(("x", "z")),
)
