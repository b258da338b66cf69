"""moe: experts on routed tokens: both projections, the activation and the weighted sum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn import reference
from omniattn.ops.activation import ACTIVATIONS as _ACT
from omniattn.ops.activation import CLAMPED as CLAMPED
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.names import like

__all__ = ["ACTIVATIONS", "CLAMPED", "moe"]

_NO_GATE, _HALVES, _INTERLEAVED = 0, 1, 2

#: Name -> (number of the activation, True if gated).
ACTIVATIONS = {
    "swiglu": (_ACT["silu"], True),
    "geglu": (_ACT["gelu"], True),
    "geglu_tanh": (_ACT["gelu_tanh"], True),
    "reglu": (_ACT["relu"], True),
    "bilinear": (_ACT["identity"], True),
    CLAMPED: (_ACT["silu"], True),
    "silu": (_ACT["silu"], False),
    "gelu": (_ACT["gelu"], False),
    "gelu_tanh": (_ACT["gelu_tanh"], False),
    "relu": (_ACT["relu"], False),
}


def encode(activation: str, interleaved: bool, alpha: float, limit: float) -> tuple[Any, ...]:
    """Returns the arguments act, gate and clamp of the op."""
    act, gated = ACTIVATIONS[activation]
    gate = _NO_GATE if not gated else _INTERLEAVED if interleaved else _HALVES
    return act, gate, [alpha, limit] if activation == CLAMPED else []


def _decode(act: int, gate: int, clamp: list[float]) -> dict[str, Any]:
    if clamp:
        options = {"activation": CLAMPED, "alpha": clamp[0], "limit": clamp[1]}
    else:
        names = {value: name for name, value in ACTIVATIONS.items() if name != CLAMPED}
        # Not names[act, gate != _NO_GATE]: torch.compile of torch 2.14 has no guard for such keys.
        options = {"activation": names[act, True] if gate != _NO_GATE else names[act, False]}
    return options | {"interleaved": gate == _INTERLEAVED}


def _in_layout_of(weight: Tensor) -> Tensor:
    if weight.stride(2) != 1 and weight.stride(1) == 1:
        return like(weight.mT).mT
    return like(weight)


def _kept(x: Tensor, index: Tensor, up: Tensor, keep: bool) -> Tensor:
    return x.new_empty((index.numel() if keep else 0, up.shape[1]))


def formula(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    act: int,
    gate: int,
    clamp: list[float],
    keep: bool,
    split_bf16: int,
    own_kernels: bool,
    weigh_inputs: bool = False,
) -> Tensor:
    """Computes the op in plain torch from its own arguments."""
    return reference.moe_experts(
        x,
        index,
        weights,
        up,
        down,
        up_bias=up_bias,
        down_bias=down_bias,
        weigh_inputs=weigh_inputs,
        **_decode(act, gate, clamp),
    )


#: (x, index, weights, up, up_bias, down, down_bias, act, gate, clamp, keep, split_bf16,
#: own_kernels) -> y, with x (N, d) and weights in the compute dtype; keep: True to save the
#: pre-activations, False to recompute them; split_bf16: see dispatch/precision.py; own_kernels:
#: True to take no kernel of torch
moe = DifferentiableOp(
    "moe",
    fakes={
        "pre": _kept,
        "dup": lambda up: _in_layout_of(up),
        "dup_bias": lambda up: up.new_empty(up.shape[:2]),
        "ddown": lambda down: _in_layout_of(down),
        "ddown_bias": lambda down: down.new_empty(down.shape[:2]),
    },
    private=("pre",),
    formula=formula,
)
