"""gated_norm: RMSNorm or LayerNorm of groups of the last dimension, with an optional gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp, private_op, register_vmap
from omniattn.ops.activation import ACTIVATIONS

__all__ = ["GATE_PLACES", "gated_norm"]

#: Where the gate multiplies -> its number in csrc/kernels/norm/gated_norm.h.
GATE_PLACES = {"none": 0, "before": 1, "after": 2}

_ACTIVATION_NAMES = {number: name for name, number in ACTIVATIONS.items()}
_backward_op = private_op("gated_norm_backward")


def _fake(
    x: Tensor, z: Tensor | None, weight: Tensor | None, bias: Tensor | None, groups: int, *_: Any
) -> tuple[Tensor, Tensor]:
    rows = math.prod(x.shape[:-1])
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty((rows, groups, 2), dtype=dtype)


@_library.register_fake("gated_norm_backward")
def _fake_backward(
    grad_y: Tensor,
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    groups: int,
    gate: int,
    act: int,
    center: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cols = x.shape[-1]
    dweight, dbias = (x.new_empty((cols if wanted else 0,)) for wanted in (weight_grad, bias_grad))
    return x.new_empty(x.shape), x.new_empty((0,) if z is None else x.shape), dweight, dbias


def _save(args: Any, output: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    return (*args[:4], output[1]), args[4:]


def _backward(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    if grads[0] is None:
        return (None,) * 10
    *inputs, stats = saved
    groups, gate, act, center, *_ = kept
    wanted = needs[2], needs[3]
    found = _backward_op(grads[0], *inputs, stats, groups, gate, act, center, *wanted)
    # The op leaves what nobody asked for empty; z's gradient exists where z does.
    used = (True, inputs[1] is not None, *wanted)
    return (*(g if use else None for g, use in zip(found, used, strict=True)), *(None,) * 6)


def _formula(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    gate: int,
    act: int,
    center: bool,
    eps: float,
    cast_first: bool,
) -> Tensor:
    if z is None:
        return reference.group_norm(x, groups, weight, bias, eps=eps, center=center)
    return reference.rms_norm_gated(
        x,
        z,
        weight,
        eps=eps,
        norm_before_gate=gate == GATE_PLACES["after"],
        activation=_ACTIVATION_NAMES[act],
        num_groups=groups,
        casting="llama" if cast_first else "fp32",
    )


#: (x, z, weight, bias, groups, gate, act, center, eps, cast_first) -> y
gated_norm = DifferentiableOp(
    "gated_norm",
    fake=_fake,
    save=_save,
    backward=_backward,
    private_outputs=1,
    inference="gated_norm_only",
    formula=_formula,
    restore=lambda saved, kept: (*saved[:4], *kept),
    fold=lambda *_: (0, 1),
)

# The gradients of weight and bias are one per element.
register_vmap("gated_norm_backward", lambda *args: () if args[-2] or args[-1] else (0, 1, 2, 5))
