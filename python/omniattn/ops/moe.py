"""moe: experts on routed tokens, from both products and the activation to the weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp, private_op, register_vmap
from omniattn.ops.activation import ACTIVATIONS as _ACT

__all__ = ["ACTIVATIONS", "CLAMPED", "moe"]

_NO_GATE, _HALVES, _INTERLEAVED = 0, 1, 2

#: The activation that takes alpha and limit (gpt-oss).
CLAMPED = "clamped_swiglu"

#: Name -> (number of the activation, whether there is a gate).
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

_backward_op = private_op("moe_backward")


def encode(activation: str, interleaved: bool, alpha: float, limit: float) -> tuple[Any, ...]:
    """The arguments act, gate and clamp of the op."""
    act, gated = ACTIVATIONS[activation]
    gate = _NO_GATE if not gated else _INTERLEAVED if interleaved else _HALVES
    return act, gate, [alpha, limit] if activation == CLAMPED else []


def _decode(act: int, gate: int, clamp: list[float]) -> dict[str, Any]:
    if clamp:
        options = {"activation": CLAMPED, "alpha": clamp[0], "limit": clamp[1]}
    else:
        names = {value: name for name, value in ACTIVATIONS.items() if name != CLAMPED}
        options = {"activation": names[act, gate != _NO_GATE]}
    return options | {"interleaved": gate == _INTERLEAVED}


def _like(weight: Tensor) -> Tensor:
    """A gradient in the layout of its weights."""
    if weight.stride(2) != 1 and weight.stride(1) == 1:
        transposed = weight.mT
        return transposed.new_empty(transposed.shape).mT
    return weight.new_empty(weight.shape)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fake(
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
) -> tuple[Tensor, Tensor]:
    rows = index.numel() if keep else 0
    return x.new_empty(x.shape), x.new_empty((rows, up.shape[1]))


@_library.register_fake("moe_backward")
def _fake_backward(
    grad_y: Tensor,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    pre: Tensor,
    act: int,
    gate: int,
    clamp: list[float],
    *wanted: bool,
) -> tuple[Tensor, ...]:
    none = x.new_empty((0,))
    shapes = (up.shape[:2], down.shape[:2])
    biases = (
        x.new_empty(shape) if want else none
        for shape, want in zip(shapes, wanted[3::2], strict=True)
    )
    up_bias_grad, down_bias_grad = biases
    return (
        x.new_empty(x.shape) if wanted[0] else none,
        x.new_empty(weights.shape if wanted[1] else (0,), dtype=_compute_dtype(x)),
        _like(up) if wanted[2] else none,
        up_bias_grad,
        _like(down) if wanted[4] else none,
        down_bias_grad,
    )


def _backward(
    saved: Any, options: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    (grad_y, *_) = grads
    if grad_y is None:
        return (None,) * 11
    wanted = (needs[0], *needs[2:7])
    dx, *rest = _backward_op(grad_y, *saved, *options, *wanted)
    found = (dx, None, *rest)
    return (
        tuple(g if need else None for g, need in zip(found, needs[:7], strict=True)) + (None,) * 4
    )


#: (x, index, weights, up, up_bias, down, down_bias, act, gate, clamp, keep) -> y, with x (N, d) and
#: weights in the compute dtype; keep: whether to save the pre-activations or compute them again
moe = DifferentiableOp(
    "moe",
    fake=_fake,
    save=lambda args, output: ((*args[:7], output[1]), args[7:10]),
    backward=_backward,
    private_outputs=1,
    formula=lambda x, index, weights, up, up_bias, down, down_bias, act, gate, clamp, keep: (
        reference.moe_experts(
            x,
            index,
            weights,
            up,
            down,
            up_bias=up_bias,
            down_bias=down_bias,
            **_decode(act, gate, clamp),
        )
    ),
    restore=lambda saved, options: (*saved[:7], *options, False),
)

register_vmap("moe_backward")
