"""glu_mlp: products on this package's kernels or on torch's, the gated activation in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn.ops._backward import private_op
from omniattn.ops.activation import ACTIVATION_NAMES

__all__: list[str] = []

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
    """The arguments of the op; its backward gets them after its own arguments."""

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
    clamp: list[float]
    recompute: bool
    native: bool
    pieces: int

    def check(self) -> None:
        """Checks what the called kernels do not check themselves."""
        x, gate_weight, down_weight = self.x, self.gate_weight, self.down_weight
        _require_defined(x=x, gate_weight=gate_weight, down_weight=down_weight)
        _require(
            self.act in ACTIVATION_NAMES,
            f"act must be one of {sorted(ACTIVATION_NAMES)}, got act={self.act}",
        )
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
        _require(
            not self.clamp or self.up_weight is not None,
            f"clamp needs an up_weight, got clamp={self.clamp}",
        )
        _require(self.up_bias is None or self.up_weight is not None, "up_bias needs an up_weight")
        _require(
            self.dropout_p == 0 or self.seed is not None,
            f"dropout_p must be 0 without a seed, got dropout_p={self.dropout_p}",
        )

    def project(self) -> tuple[Tensor, Tensor | None]:
        """x gate_weight^T + gate_bias, and the same for up if it is given."""
        gate = _linear(self.x, self.gate_weight, self.gate_bias, self)
        if self.up_weight is None:
            return gate, None
        return gate, _linear(self.x, self.up_weight, self.up_bias, self)

    def hidden(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """The hidden layer."""
        y: Tensor = (
            _activate_op(gate, self.act) if up is None else _glu_op(gate, up, self.act, self.clamp)
        )
        return self.drop(y)

    def drop(self, hidden: Tensor) -> Tensor:
        """Dropout, of the hidden layer or of its gradient."""
        if self.seed is None:
            return hidden
        y: Tensor = _dropout_op(hidden, self.seed, self.dropout_p)
        return y


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: _Arguments) -> Tensor:
    if a.native:
        y: Tensor = _linear_op(x, weight, bias, a.pieces)
        return y
    return torch.nn.functional.linear(x, weight, bias)


def _linear_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    a: _Arguments,
    *needs: bool,
    onto: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x (added to `onto`), weight and bias, None where not needed."""
    if a.native:
        found = _linear_backward_op(grad_y, x, weight, a.pieces, *needs)
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


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = _Arguments(*arguments)
    a.check()
    gate, up = a.project()
    y = _linear(a.hidden(gate, up), a.down_weight, a.down_bias, a)
    kept = (None, None) if a.recompute else (gate, up)
    kept_gate, kept_up = (a.x.new_empty(0) if t is None else t for t in kept)
    return y, kept_gate, kept_up


def _backward(
    grad_y: Tensor, kept_gate: Tensor, kept_up: Tensor, needs: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    """Gradients of x, the three weights and the three biases; empty where not needed."""
    a = _Arguments(*arguments)
    _check_backward(grad_y, kept_gate, kept_up, needs, a)
    needs = [need and t is not None for need, t in zip(needs, a, strict=False)]
    x_need, gate_need, up_need, down_need, gate_bias_need, up_bias_need, down_bias_need, _ = needs
    up: Tensor | None
    if a.recompute:
        gate, up = a.project()
    else:
        gate, up = kept_gate, None if a.up_weight is None else kept_up
    hidden = a.hidden(gate, up)
    dhidden, ddown, ddown_bias = _linear_backward(
        grad_y, hidden, a.down_weight, a, True, down_need, down_bias_need
    )
    assert dhidden is not None
    dhidden = a.drop(dhidden)
    # The gradients are written over dhidden and hidden.
    dgate, dup = (dhidden, None) if up is None else (hidden, dhidden)
    del hidden
    if up is None:
        _activate_backward_op(dhidden, gate, a.act)
    else:
        _glu_backward_op(dhidden, gate, up, a.act, a.clamp, dgate)
    dx, dgate_weight, dgate_bias = _linear_backward(
        dgate, a.x, a.gate_weight, a, x_need, gate_need, gate_bias_need
    )
    dup_weight = dup_bias = None
    if a.up_weight is not None and dup is not None:
        dx, dup_weight, dup_bias = _linear_backward(
            dup, a.x, a.up_weight, a, x_need, up_need, up_bias_need, onto=dx
        )
    found = (dx, dgate_weight, dup_weight, ddown, dgate_bias, dup_bias, ddown_bias)
    return [a.x.new_empty(0) if g is None else g for g in found]


def _check_backward(
    grad_y: Tensor, gate: Tensor, up: Tensor, needs: Sequence[bool], a: _Arguments
) -> None:
    _require_defined(grad_y=grad_y, gate=gate, up=up)
    a.check()
    leading = a.x.shape[:-1]
    _require(len(needs) == 8, f"needs must have one entry per tensor, 8, got {len(needs)}")
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


# These run on any device: the ops that they call choose the kernels.
for _name, _kernel in (
    ("glu_mlp", _forward),
    ("glu_mlp_raw", _forward),
    ("glu_mlp_backward", _backward),
):
    torch.library.impl(f"omniattn::{_name}", "CompositeExplicitAutograd")(_kernel)
