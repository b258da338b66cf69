"""glu_mlp: the projections and the activation of a feed-forward layer as one op.

The op keeps the projections but not the activated hidden layer, or only its inputs with
`recompute`. It is made of other kernels: the products run on this package's or on torch's, see
gemm_choice.py; the gated activation is `glu`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops._autograd import DifferentiableOp, loop_over_vmap
from omniattn.ops.activation import ACTIVATIONS
from omniattn.reference.precision import widen

__all__ = ["glu_mlp"]

_NAMES = {number: name for name, number in ACTIVATIONS.items()}
_linear_op = torch.ops.omniattn.linear_raw.default
_linear_backward_op = torch.ops.omniattn.linear_backward.default
_dropout_op = torch.ops.omniattn.dropout_raw.default
_glu_op = torch.ops.omniattn.glu_raw.default
_glu_backward_op = torch.ops.omniattn.glu_backward.default


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * x)
    return grad * (s + 1.702 * x * s * (1 - s))


# Autograd does not record inside of an op, so the derivatives are called by name.
_aten = torch.ops.aten
_ACTIVATION_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda grad, x: grad,
    "relu": lambda grad, x: grad * (x > 0),
    "silu": _aten.silu_backward.default,
    "gelu": _aten.gelu_backward.default,
    "gelu_tanh": lambda grad, x: _aten.gelu_backward.default(grad, x, approximate="tanh"),
    "sigmoid": lambda grad, x: _aten.sigmoid_backward.default(grad, torch.sigmoid(x)),
    "quick_gelu": _quick_gelu_backward,
    "relu_squared": lambda grad, x: grad * 2 * x.clamp(min=0),
}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"glu_mlp: {what}")


def _require_defined(**tensors: Tensor | None) -> None:
    """An undefined tensor reaches Python as None, whatever the schema says."""
    for name, t in tensors.items():
        _require(t is not None, f"{name} must be a tensor, got None")


def _check(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    act: int,
) -> None:
    """What the kernels that are called do not check for themselves."""
    _require_defined(x=x, gate_weight=gate_weight, down_weight=down_weight)
    _require(act in _NAMES, f"act must be one of {sorted(_NAMES)}, got act={act}")
    _require(x.dim() >= 1 and gate_weight.dim() == 2, "x and gate_weight must be at least 1-d, 2-d")
    hidden, width = gate_weight.shape
    _require(x.shape[-1] == width, f"x must have {width} columns, got {x.shape[-1]}")
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("up_weight", up_weight, (hidden, width)),
        ("down_weight", down_weight, (*down_weight.shape[:1], hidden)),
        ("gate_bias", gate_bias, (hidden,)),
        ("up_bias", up_bias, (hidden,)),
        ("down_bias", down_bias, tuple(down_weight.shape[:1])),
    ]
    for name, t, shape in wanted:
        if t is not None:
            _require(t.shape == shape, f"{name} must have shape {shape}, got {tuple(t.shape)}")
            _require(t.dtype == x.dtype, f"{name} must have dtype {x.dtype}, got {t.dtype}")
    _require(up_bias is None or up_weight is not None, "up_bias needs an up_weight")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, native: bool) -> Tensor:
    if native:
        y: Tensor = _linear_op(x, weight, bias)
        return y
    return torch.nn.functional.linear(x, weight, bias)


def _linear_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, native: bool, *needs: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias, None where not needed."""
    if native:
        found = _linear_backward_op(grad_y, x, weight, *needs)
        return tuple(g if need else None for g, need in zip(found, needs, strict=True))  # type: ignore[return-value]
    rows = grad_y.reshape(-1, weight.shape[0])
    dx = torch.mm(rows, weight).view(x.shape) if needs[0] else None
    dweight = torch.mm(rows.T, x.reshape(-1, weight.shape[1])) if needs[1] else None
    return dx, dweight, rows.sum(0) if needs[2] else None


def _activate(gate: Tensor, up: Tensor | None, act: int) -> Tensor:
    if up is not None:
        y: Tensor = _glu_op(gate, up, act)
        return y
    return reference.activate(gate, _NAMES[act])


def _activate_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, act: int
) -> tuple[Tensor, Tensor | None]:
    if up is not None:
        dgate, dup = _glu_backward_op(grad, gate, up, act)
        return dgate, dup
    dgate = _ACTIVATION_BACKWARD[_NAMES[act]](widen(grad), widen(gate))
    return dgate.to(gate.dtype), None


def _drop(hidden: Tensor, seed: Tensor | None, dropout_p: float) -> Tensor:
    if seed is None:
        return hidden
    y: Tensor = _dropout_op(hidden, seed, dropout_p)
    return y


def _forward(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    act: int,
    recompute: bool,
    native: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, act)
    gate = _linear(x, gate_weight, gate_bias, native)
    up = None if up_weight is None else _linear(x, up_weight, up_bias, native)
    hidden = _drop(_activate(gate, up, act), seed, dropout_p)
    y = _linear(hidden, down_weight, down_bias, native)
    kept = (None, None) if recompute else (gate, up)
    kept_gate, kept_up = (x.new_empty(0) if t is None else t for t in kept)
    return y, kept_gate, kept_up


def _fake(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    act: int,
    recompute: bool,
    native: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, act)
    projected = (0,) if recompute else (*x.shape[:-1], gate_weight.shape[0])
    return (
        x.new_empty((*x.shape[:-1], down_weight.shape[0])),
        x.new_empty(projected),
        x.new_empty((0,) if up_weight is None else projected),
    )


def _backward_op(
    grad_y: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    seed: Tensor | None,
    gate: Tensor,
    up: Tensor,
    dropout_p: float,
    act: int,
    recompute: bool,
    native: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, the three weights and the three biases; empty where not needed."""
    _check_backward(grad_y, x, gate_weight, up_weight, down_weight, gate, up, recompute, needs)
    _check(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, None, act)
    x_need, gate_need, up_need, down_need, gate_bias_need, up_bias_need, down_bias_need = needs
    projected_up: Tensor | None = None if up_weight is None else up
    if recompute:
        gate = _linear(x, gate_weight, gate_bias, native)
        if up_weight is not None:
            projected_up = _linear(x, up_weight, up_bias, native)
    hidden = _drop(_activate(gate, projected_up, act), seed, dropout_p)
    dhidden, ddown, ddown_bias = _linear_backward(
        grad_y, hidden, down_weight, native, True, down_need, down_bias_need
    )
    del hidden
    assert dhidden is not None
    dgate, dup = _activate_backward(_drop(dhidden, seed, dropout_p), gate, projected_up, act)
    del dhidden
    dx, dgate_weight, dgate_bias = _linear_backward(
        dgate, x, gate_weight, native, x_need, gate_need, gate_bias_need
    )
    dup_weight = dup_bias = None
    if up_weight is not None and dup is not None:
        dx_up, dup_weight, dup_bias = _linear_backward(
            dup, x, up_weight, native, x_need, up_need, up_bias_need
        )
        dx = None if dx is None or dx_up is None else dx.add_(dx_up)
    found = (dx, dgate_weight, dup_weight, ddown, dgate_bias, dup_bias, ddown_bias)
    return [x.new_empty(0) if g is None else g for g in found]


def _check_backward(
    grad_y: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate: Tensor,
    up: Tensor,
    recompute: bool,
    needs: Sequence[bool],
) -> None:
    _require_defined(grad_y=grad_y, x=x, gate_weight=gate_weight, down_weight=down_weight)
    _require_defined(gate=gate, up=up)
    leading = x.shape[:-1]
    _require(len(needs) == 7, f"needs must have 7 entries, got {len(needs)}")
    _require(
        grad_y.shape == (*leading, *down_weight.shape[:1]) and grad_y.dtype == x.dtype,
        f"grad_y must have the shape and dtype of y, got {tuple(grad_y.shape)}, {grad_y.dtype}",
    )
    if recompute:
        return
    kept = [("gate", gate)] if up_weight is None else [("gate", gate), ("up", up)]
    shape = (*leading, *gate_weight.shape[:1])
    for name, t in kept:
        _require(
            t.shape == shape and t.dtype == x.dtype,
            f"{name} must have shape {tuple(shape)} and dtype {x.dtype}, "
            f"got {tuple(t.shape)}, {t.dtype}",
        )


def _fake_backward(
    grad_y: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    seed: Tensor | None,
    gate: Tensor,
    up: Tensor,
    dropout_p: float,
    act: int,
    recompute: bool,
    native: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    hidden = tuple(gate_weight.shape[:1])
    shapes = (
        x.shape,
        gate_weight.shape,
        (0,) if up_weight is None else up_weight.shape,
        down_weight.shape,
        hidden,
        (0,) if up_weight is None else hidden,
        down_weight.shape[:1],
    )
    return [x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs, strict=True)]


# The kernels below pick their own device.
_ANY_DEVICE = "CompositeExplicitAutograd"
for _name, _implementation in (
    ("glu_mlp", _forward),
    ("glu_mlp_raw", _forward),
    ("glu_mlp_backward", _backward_op),
):
    torch.library.impl(f"omniattn::{_name}", _ANY_DEVICE)(_implementation)
torch.library.register_fake("omniattn::glu_mlp_backward")(_fake_backward)
loop_over_vmap("glu_mlp_backward")


def _save(args: Any, output: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    tensors, kept = args[:8], args[8:]
    return (*tensors, output[1], output[2]), kept


def _backward(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    if grads[0] is None:
        return (None,) * 12
    *inputs, _, seed, gate, up = saved  # without down_bias
    found = torch.ops.omniattn.glu_mlp_backward(
        grads[0], *inputs, seed, gate, up, *kept, list(needs[:7])
    )
    return (*(g if n else None for g, n in zip(found, needs[:7], strict=True)), *(None,) * 5)


def _formula(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    act: int,
    recompute: bool,
    native: bool,
) -> Tensor:
    gate = reference.linear(x, gate_weight, gate_bias)
    if up_weight is None:
        hidden = reference.activate(gate, _NAMES[act])
    else:
        up = reference.linear(x, up_weight, up_bias)
        hidden = reference.gated_activation(gate, up, _NAMES[act])
    if seed is not None:
        hidden = reference.dropout(hidden, dropout_p, seed=seed)
    return reference.linear(hidden, down_weight, down_bias)


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
)
