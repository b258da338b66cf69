"""glu_mlp: the projections and the activation of a feed-forward layer as one op.

The op keeps the projections but not the activated hidden layer, or only its inputs with
`recompute`. It is made of other kernels: the products run on this package's or on torch's, see
gemm_choice.py; the gated activation is `glu`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp, private_op, register_vmap
from omniattn.ops.activation import ACTIVATIONS

__all__ = ["glu_mlp"]

_NAMES = {number: name for name, number in ACTIVATIONS.items()}
_linear_op = private_op("linear_raw")
_linear_backward_op = private_op("linear_backward")
_glu_op = private_op("glu_raw")
_glu_backward_op = private_op("glu_backward_")
_activate_op = private_op("activate")
_activate_backward_op = private_op("activate_backward_")
_dropout_op = private_op("dropout_raw")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"glu_mlp: {what}")


def _require_defined(**tensors: Tensor | None) -> None:
    """An undefined tensor reaches Python as None, whatever the schema says."""
    for name, t in tensors.items():
        _require(t is not None, f"{name} must be a tensor, got None")


class _Arguments(NamedTuple):
    """What all implementations of the op get, the backward behind arguments of its own."""

    x: Tensor
    gate_weight: Tensor
    up_weight: Tensor | None
    down_weight: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    seed: Tensor | None
    dropout_p: float
    act: int
    recompute: bool
    native: bool

    def check(self) -> None:
        """What the kernels that are called do not check for themselves."""
        x, gate_weight, down_weight = self.x, self.gate_weight, self.down_weight
        _require_defined(x=x, gate_weight=gate_weight, down_weight=down_weight)
        _require(self.act in _NAMES, f"act must be one of {sorted(_NAMES)}, got act={self.act}")
        _require(
            x.dim() >= 1 and gate_weight.dim() == 2, "x and gate_weight must be at least 1-d, 2-d"
        )
        hidden, width = gate_weight.shape
        _require(x.shape[-1] == width, f"x must have {width} columns, got {x.shape[-1]}")
        wanted: list[tuple[str, tuple[int, ...]]] = [
            ("up_weight", (hidden, width)),
            ("down_weight", (*down_weight.shape[:1], hidden)),
            ("gate_bias", (hidden,)),
            ("up_bias", (hidden,)),
            ("down_bias", tuple(down_weight.shape[:1])),
        ]
        for name, shape in wanted:
            t = getattr(self, name)
            if t is not None:
                _require(t.shape == shape, f"{name} must have shape {shape}, got {tuple(t.shape)}")
                _require(t.dtype == x.dtype, f"{name} must have dtype {x.dtype}, got {t.dtype}")
        _require(self.up_bias is None or self.up_weight is not None, "up_bias needs an up_weight")
        _require(
            self.dropout_p == 0 or self.seed is not None,
            f"dropout_p must be 0 without a seed, got dropout_p={self.dropout_p}",
        )

    def project(self) -> tuple[Tensor, Tensor | None]:
        """x gate_weight^T + gate_bias, and the same of up where there is one."""
        gate = _linear(self.x, self.gate_weight, self.gate_bias, self.native)
        if self.up_weight is None:
            return gate, None
        return gate, _linear(self.x, self.up_weight, self.up_bias, self.native)

    def hidden(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """The hidden layer."""
        return self.drop(_activate(gate, up, self.act))

    def drop(self, hidden: Tensor) -> Tensor:
        """Dropout, of the hidden layer or of its gradient."""
        if self.seed is None:
            return hidden
        y: Tensor = _dropout_op(hidden, self.seed, self.dropout_p)
        return y


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, native: bool) -> Tensor:
    if native:
        y: Tensor = _linear_op(x, weight, bias)
        return y
    return torch.nn.functional.linear(x, weight, bias)


def _linear_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    native: bool,
    *needs: bool,
    onto: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x (added to `onto`), weight and bias, None where not needed."""
    if native:
        found = _linear_backward_op(grad_y, x, weight, *needs)
        dx, dweight, dbias = (g if need else None for g, need in zip(found, needs, strict=True))
        return dx if dx is None or onto is None else onto.add_(dx), dweight, dbias
    count = math.prod(x.shape[:-1])  # not -1, which is ambiguous where there are no columns
    rows = grad_y.reshape(count, weight.shape[0])
    if not needs[0]:
        dx = None
    elif onto is None:
        dx = torch.mm(rows, weight).view(x.shape)
    else:
        onto.view(count, weight.shape[1]).addmm_(rows, weight)
        dx = onto
    dweight = torch.mm(rows.T, x.reshape(count, weight.shape[1])) if needs[1] else None
    return dx, dweight, rows.sum(0) if needs[2] else None


def _activate(gate: Tensor, up: Tensor | None, act: int) -> Tensor:
    y: Tensor = _activate_op(gate, act) if up is None else _glu_op(gate, up, act)
    return y


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = _Arguments(*arguments)
    a.check()
    gate, up = a.project()
    y = _linear(a.hidden(gate, up), a.down_weight, a.down_bias, a.native)
    kept = (None, None) if a.recompute else (gate, up)
    kept_gate, kept_up = (a.x.new_empty(0) if t is None else t for t in kept)
    return y, kept_gate, kept_up


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = _Arguments(*arguments)
    a.check()
    projected = (0,) if a.recompute else (*a.x.shape[:-1], a.gate_weight.shape[0])
    return (
        a.x.new_empty((*a.x.shape[:-1], a.down_weight.shape[0])),
        a.x.new_empty(projected),
        a.x.new_empty((0,) if a.up_weight is None else projected),
    )


def _backward_op(
    grad_y: Tensor, kept_gate: Tensor, kept_up: Tensor, needs: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    """Gradients of x, the three weights and the three biases; empty where not needed."""
    a = _Arguments(*arguments)
    _check_backward(grad_y, kept_gate, kept_up, needs, a)
    x_need, gate_need, up_need, down_need, gate_bias_need, up_bias_need, down_bias_need = needs
    up: Tensor | None
    if a.recompute:
        gate, up = a.project()
    else:
        gate, up = kept_gate, None if a.up_weight is None else kept_up
    hidden = a.hidden(gate, up)
    dhidden, ddown, ddown_bias = _linear_backward(
        grad_y, hidden, a.down_weight, a.native, True, down_need, down_bias_need
    )
    assert dhidden is not None
    dhidden = a.drop(dhidden)
    # The gradients are written over dhidden and hidden.
    dgate, dup = (dhidden, None) if up is None else (hidden, dhidden)
    del hidden
    if up is None:
        _activate_backward_op(dhidden, gate, a.act)
    else:
        _glu_backward_op(dhidden, gate, up, a.act, dgate)
    dx, dgate_weight, dgate_bias = _linear_backward(
        dgate, a.x, a.gate_weight, a.native, x_need, gate_need, gate_bias_need
    )
    dup_weight = dup_bias = None
    if a.up_weight is not None and dup is not None:
        dx, dup_weight, dup_bias = _linear_backward(
            dup, a.x, a.up_weight, a.native, x_need, up_need, up_bias_need, onto=dx
        )
    found = (dx, dgate_weight, dup_weight, ddown, dgate_bias, dup_bias, ddown_bias)
    return [a.x.new_empty(0) if g is None else g for g in found]


def _check_backward(
    grad_y: Tensor, gate: Tensor, up: Tensor, needs: Sequence[bool], a: _Arguments
) -> None:
    _require_defined(grad_y=grad_y, gate=gate, up=up)
    a.check()
    leading = a.x.shape[:-1]
    _require(len(needs) == 7, f"needs must have 7 entries, got {len(needs)}")
    _require(
        grad_y.shape == (*leading, *a.down_weight.shape[:1]) and grad_y.dtype == a.x.dtype,
        f"grad_y must have the shape and dtype of y, got {tuple(grad_y.shape)}, {grad_y.dtype}",
    )
    if a.recompute:
        return
    kept = [("gate", gate)] if a.up_weight is None else [("gate", gate), ("up", up)]
    shape = (*leading, *a.gate_weight.shape[:1])
    for name, t in kept:
        _require(
            t.shape == shape and t.dtype == a.x.dtype,
            f"{name} must have shape {tuple(shape)} and dtype {a.x.dtype}, "
            f"got {tuple(t.shape)}, {t.dtype}",
        )


def _fake_backward(
    grad_y: Tensor, gate: Tensor, up: Tensor, needs: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    a = _Arguments(*arguments)
    hidden = tuple(a.gate_weight.shape[:1])
    shapes = (
        a.x.shape,
        a.gate_weight.shape,
        (0,) if a.up_weight is None else a.up_weight.shape,
        a.down_weight.shape,
        hidden,
        (0,) if a.up_weight is None else hidden,
        a.down_weight.shape[:1],
    )
    return [
        a.x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs, strict=True)
    ]


# The kernels below pick their own device.
_ANY_DEVICE = "CompositeExplicitAutograd"
for _name, _implementation in (
    ("glu_mlp", _forward),
    ("glu_mlp_raw", _forward),
    ("glu_mlp_backward", _backward_op),
):
    torch.library.impl(f"omniattn::{_name}", _ANY_DEVICE)(_implementation)
_library.register_fake("glu_mlp_backward")(_fake_backward)
register_vmap("glu_mlp_backward")


def _save(args: Any, output: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    tensors, kept = args[:8], args[8:]
    return (*tensors, output[1], output[2]), kept


def _backward(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    if grads[0] is None:
        return (None,) * 12
    *inputs, gate, up = saved
    found = torch.ops.omniattn.glu_mlp_backward(grads[0], gate, up, list(needs[:7]), *inputs, *kept)
    return (*(g if n else None for g, n in zip(found, needs[:7], strict=True)), *(None,) * 5)


def _formula(*arguments: Any) -> Tensor:
    a = _Arguments(*arguments)
    gate = reference.linear(a.x, a.gate_weight, a.gate_bias)
    if a.up_weight is None:
        hidden = reference.activate(gate, _NAMES[a.act])
    else:
        up = reference.linear(a.x, a.up_weight, a.up_bias)
        hidden = reference.gated_activation(gate, up, _NAMES[a.act])
    if a.seed is not None:
        hidden = reference.dropout(hidden, a.dropout_p, seed=a.seed)
    return reference.linear(hidden, a.down_weight, a.down_bias)


#: (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, seed, dropout_p, act,
#: recompute, native) -> y
glu_mlp = DifferentiableOp(
    "glu_mlp",
    fake=_fake,
    save=_save,
    backward=_backward,
    private_outputs=2,
    formula=_formula,
    restore=lambda saved, kept: (*saved[:8], *kept),
    fold=lambda *args: () if args[7] is not None else (0,),
)
