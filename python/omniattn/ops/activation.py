"""glu: the gated linear unit family, act(gate) * up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from omniattn import reference
from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp, private_op, register_vmap

__all__ = ["ACTIVATIONS", "glu"]

#: Name of an activation -> its number in csrc/kernels/activation/activation.h.
ACTIVATIONS = {
    "identity": 0,
    "relu": 1,
    "silu": 2,
    "gelu": 3,
    "gelu_tanh": 4,
    "sigmoid": 5,
    "quick_gelu": 6,
    "relu_squared": 7,
}

_NAMES = {number: name for name, number in ACTIVATIONS.items()}

_backward_op = private_op("glu_backward")


def _fake(gate: Tensor, up: Tensor | None, act: int) -> Tensor:
    cols = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    return gate.new_empty((*gate.shape[:-1], cols))


@_library.register_fake("glu_backward")
def _fake_backward(
    grad_y: Tensor, gate: Tensor, up: Tensor | None, act: int
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty((0,) if up is None else up.shape)


@_library.register_fake("glu_backward_")
@_library.register_fake("activate_backward_")
def _fake_inplace(*args: Any) -> None:
    return None


@_library.register_fake("activate")
def _fake_activate(x: Tensor, act: int) -> Tensor:
    return x.new_empty(x.shape)


def _backward(
    saved: Any, act: int, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    (grad_y,) = grads
    if grad_y is None:
        return None, None, None
    gate, up = saved
    dgate, dup = _backward_op(grad_y, gate, up, act)
    return dgate, None if up is None else dup, None


#: (gate, up, act) -> y
glu = DifferentiableOp(
    "glu",
    fake=_fake,
    save=lambda args, output: (args[:2], args[2]),
    backward=_backward,
    formula=lambda gate, up, act: reference.gated_activation(gate, up, _NAMES[act]),
    restore=lambda saved, act: (*saved, act),
    fold=lambda *_: (0, 1),
)

register_vmap("glu_backward", lambda *_: (0, 1, 2))
