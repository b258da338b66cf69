"""cross_entropy and linear_cross_entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn.ops._autograd import DifferentiableOp, loop_over_vmap

__all__ = ["REDUCTIONS", "cross_entropy", "linear_cross_entropy"]

#: Name of a reduction -> its number in csrc/ops/loss_cpu.cpp.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

_backward_op = torch.ops.omniattn.cross_entropy_backward.default
_linear_backward_op = torch.ops.omniattn.linear_cross_entropy_backward.default


def _loss(x: Tensor, reduction: int) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(() if reduction else x.shape[:-1], dtype=dtype)


# cross_entropy ------------------------------------------------------------------------------------


def _fake(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
) -> tuple[Tensor, Tensor]:
    loss = _loss(logits, reduction)
    return loss, logits.new_empty((target.numel(),), dtype=loss.dtype)


@torch.library.register_fake("omniattn::cross_entropy_backward")
def _fake_backward(grad: Tensor, logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _backward(
    saved: Any, options: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    grad = grads[0]
    dlogits = None if grad is None else _backward_op(grad, *saved, *options)
    return dlogits, None, None, None, None, None


#: (logits, target, ignore_index, label_smoothing, z_loss, reduction) -> loss
cross_entropy = DifferentiableOp(
    "cross_entropy",
    fake=_fake,
    save=lambda args, output: ((*args[:2], output[1]), args[2:]),
    backward=_backward,
    private_outputs=1,
)


# linear_cross_entropy -----------------------------------------------------------------------------


def _fake_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = _loss(x, reduction)
    return (loss, *_gradients_like(x, weight, wanted, loss.dtype))


@torch.library.register_fake("omniattn::linear_cross_entropy_backward")
def _fake_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients_like(x, weight, wanted, x.dtype)


def _gradients_like(
    x: Tensor, weight: Tensor, wanted: Sequence[bool], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x_grad, weight_grad, bias_grad = wanted
    return (
        x.new_empty(x.shape if x_grad else (0,), dtype=dtype),
        x.new_empty(weight.shape if weight_grad else (0,), dtype=dtype),
        x.new_empty((weight.shape[0] if bias_grad else 0,), dtype=dtype),
    )


def _save_linear(args: Any, output: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    options = args[4:]
    if options[3] == REDUCTIONS["none"]:
        return args[:4], (args[0].dtype, options)
    return output[1:], (args[0].dtype, options)


def _backward_linear(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """A reduced loss scales the gradients found with it, and rounds them here; an unreduced one
    computes them for the weights of its rows."""
    dtype, options = kept
    grad = grads[0]
    if grad is None:
        return (None,) * 11
    if options[3] == REDUCTIONS["none"]:
        found = _linear_backward_op(grad, *saved, *options[:3], *needs[:3])
    else:
        found = tuple((d * grad).to(dtype) for d in saved)
    wanted = (d if need else None for d, need in zip(found, needs[:3], strict=True))
    return (*wanted, *(None,) * 8)


#: (x, weight, bias, target, ignore_index, label_smoothing, z_loss, reduction, x_grad, weight_grad,
#: bias_grad) -> loss in the compute dtype; with a reduction the last three must say which gradients
#: will be asked for, without one they are False
linear_cross_entropy = DifferentiableOp(
    "linear_cross_entropy",
    fake=_fake_linear,
    save=_save_linear,
    backward=_backward_linear,
    private_outputs=3,
)

loop_over_vmap("cross_entropy_backward")
loop_over_vmap("linear_cross_entropy_backward")
