"""glu: the gated linear unit family, act(gate) * up."""

from __future__ import annotations

from torch import Tensor

from omniattn import reference
from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp
from omniattn.ops._names import like
from omniattn.ops._vmap import Fold

__all__ = ["ACTIVATIONS", "ACTIVATION_NAMES", "glu"]

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

ACTIVATION_NAMES = {number: name for name, number in ACTIVATIONS.items()}

for _name in ("activate_backward_", "glu_backward_"):
    _library.register_fake(_name)(lambda *_: None)
_library.register_fake("activate")(lambda x, act: like(x))


def _result(gate: Tensor, up: Tensor | None) -> Tensor:
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1)))


#: (gate, up, act) -> y
glu = DifferentiableOp(
    "glu",
    fakes={"y": _result},
    formula=lambda gate, up, act: reference.gated_activation(gate, up, ACTIVATION_NAMES[act]),
    fold=Fold(("gate", "up")),
)
