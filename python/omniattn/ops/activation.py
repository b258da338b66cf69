"""glu: the gated linear unit family, act(gate) * up."""

from __future__ import annotations

from torch import Tensor

from omniattn import reference
from omniattn.ops.dispatch import library as _library
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.names import like
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.layers.activation import ACTIVATIONS as DEFINITIONS

__all__ = ["ACTIVATIONS", "ACTIVATION_NAMES", "CLAMPED", "encode", "glu"]

#: Name of an activation -> its number in csrc/semantics/activation_rules.h.
ACTIVATIONS = {name: number for number, name in enumerate(DEFINITIONS)}

#: The gated activation that takes alpha and limit (gpt-oss).
CLAMPED = "clamped_swiglu"

ACTIVATION_NAMES = {number: name for name, number in ACTIVATIONS.items()}

for _name in ("activate_backward_", "glu_backward_"):
    _library.register_fake(_name)(lambda *_: None)
_library.register_fake("activate")(lambda x, act: like(x))


def _result(gate: Tensor, up: Tensor | None) -> Tensor:
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1)))


def encode(activation: str, alpha: float, limit: float) -> tuple[int, tuple[float, ...]]:
    """Returns the arguments act and clamp of an op."""
    if activation == CLAMPED:
        return ACTIVATIONS["silu"], (alpha, limit)
    return ACTIVATIONS[activation], ()


def _formula(gate: Tensor, up: Tensor | None, act: int, clamp: list[float]) -> Tensor:
    if clamp:
        return reference.clamped_swiglu(gate, up, alpha=clamp[0], limit=clamp[1])
    return reference.gated_activation(gate, up, ACTIVATION_NAMES[act])


#: (gate, up, act, clamp) -> y; clamp: alpha and limit of CLAMPED, or nothing
glu = DifferentiableOp(
    "glu",
    fakes={"y": _result},
    formula=_formula,
    fold=Fold(("gate", "up")),
)
