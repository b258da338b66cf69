"""cross_entropy and linear_cross_entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp, private_op, register_vmap

__all__ = ["REDUCTIONS", "cross_entropy", "linear_cross_entropy"]

#: Name of a reduction -> its number in csrc/ops/loss.h.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

_forward_op = private_op("cross_entropy_raw")
_backward_op = private_op("cross_entropy_backward")
_linear_backward_op = private_op("linear_cross_entropy_backward")


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _loss(x: Tensor, reduction: int) -> Tensor:
    return x.new_empty(() if reduction else x.shape[:-1], dtype=_compute_dtype(x))


# cross_entropy ------------------------------------------------------------------------------------


def _fake(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
) -> tuple[Tensor, Tensor]:
    loss = _loss(logits, reduction)
    return loss, logits.new_empty((target.numel(),), dtype=loss.dtype)


@_library.register_fake("cross_entropy_backward")
def _fake_backward(
    grad: Tensor, logits: Tensor, *args: Any, grad_dtype: torch.dtype | None = None
) -> Tensor:
    return logits.new_empty(logits.shape, dtype=grad_dtype)


def _backward(
    saved: Any, options: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    grad = grads[0]
    dlogits = None if grad is None else _backward_op(grad, *saved, *options)
    return dlogits, None, None, None, None, None, None


#: (logits, target, ignore_index, label_smoothing, z_loss, softcap, reduction) -> loss
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
    softcap: float,
    reduction: int,
    *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = _loss(x, reduction)
    return (loss, *_gradients_like(x, weight, wanted, loss.dtype))


@_library.register_fake("linear_cross_entropy_backward")
def _fake_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
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
    if options[4] == REDUCTIONS["none"]:
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
        return (None,) * 12
    if options[4] == REDUCTIONS["none"]:
        found = _linear_backward_op(grad, *saved, *options[:4], *needs[:3])
    else:
        found = tuple((d * grad).to(dtype) for d in saved)
    wanted = (d if need else None for d, need in zip(found, needs[:3], strict=True))
    return (*wanted, *(None,) * 9)


#: (x, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, reduction, x_grad,
#: weight_grad, bias_grad) -> loss in the compute dtype; with a reduction the last three must say
#: which gradients will be asked for, without one they are False
linear_cross_entropy = DifferentiableOp(
    "linear_cross_entropy",
    fake=_fake_linear,
    save=_save_linear,
    backward=_backward_linear,
    private_outputs=3,
)

register_vmap("cross_entropy_backward")
register_vmap("linear_cross_entropy_backward")


# linear_cross_entropy on CUDA: products of cuBLAS around the kernels of cross_entropy -------------

#: fp32 logits of one chunk of tokens, 1 GiB, beside their gradients in the dtype of x. A chunk of n
#: tokens moves the sums of dweight once through memory for n tokens' worth of products; at 2048
#: tokens (a vocabulary of 131072) that is an estimated tenth of its time on an H100.
CHUNK_LOGITS = 1 << 28


def _multiply(a: Tensor, b: Tensor, out: Tensor, beta: int = 0) -> None:
    """out = a b + beta out; sums stay in the dtype of `out` where a and b are half."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    else:  # emulated kernels: torch has no mixed product on the CPU
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)


def _run_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: tuple[int, float, float, float],
    row_weight: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, and with weights of the rows the gradients in the compute dtype.

    Gradients of logits are rounded to the dtype of x, so that their products run at its speed.
    """
    compute = _compute_dtype(x)
    vocab, width = weight.shape
    tokens = math.prod(x.shape[:-1])
    rows, targets = x.reshape(tokens, width), target.reshape(tokens)
    losses = _loss(x, REDUCTIONS["none"])
    dx, dweight, dbias = _gradients_like(x, weight, wanted, compute)
    dbias.zero_()
    x_grad, weight_grad, bias_grad = wanted
    chunk = max(1, CHUNK_LOGITS // max(1, vocab))
    for first in range(0, max(1, tokens), chunk):
        part = slice(first, first + chunk)
        inputs, kept = rows[part], (targets[part], *options, REDUCTIONS["none"])
        logits = x.new_empty((len(inputs), vocab), dtype=compute)
        _multiply(inputs, weight.mT, logits)
        if bias is not None:
            logits += bias
        losses.view(tokens)[part], lse = _forward_op(logits, *kept)
        if row_weight is None:
            continue
        label, *rest = kept
        dlogits = _backward_op(row_weight[part], logits, label, lse, *rest, grad_dtype=x.dtype)
        if x_grad:
            _multiply(dlogits, weight, dx.view(tokens, width)[part])
        if weight_grad:
            _multiply(dlogits.mT, inputs, dweight, beta=int(first > 0))
        if bias_grad:
            dbias += dlogits.sum(0, dtype=compute)
    return losses, dx, dweight, dbias


def composed_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
    *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of half logits have weight 1 until the end: over the number of tokens they could
    underflow."""
    options = (ignore_index, label_smoothing, z_loss, softcap)
    tokens = math.prod(x.shape[:-1])
    ones = x.new_ones((tokens,), dtype=_compute_dtype(x)) if any(wanted) else None
    losses, dx, dweight, dbias = _run_chunks(x, weight, bias, target, options, ones, wanted)
    if reduction == REDUCTIONS["none"]:
        return losses, dx, dweight, dbias
    loss = losses.sum(dtype=torch.float64)
    if reduction == REDUCTIONS["mean"]:
        kept = (target != ignore_index).sum().clamp(min=1)
        for result in (loss, dx, dweight, dbias):
            result /= kept
    return loss.to(losses.dtype), dx, dweight, dbias


def composed_linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    *wanted: bool,
) -> tuple[Tensor, ...]:
    options = (ignore_index, label_smoothing, z_loss, softcap)
    row_weight = grad.reshape(target.numel())
    _, *grads = _run_chunks(x, weight, bias, target, options, row_weight, wanted)
    return tuple(g.to(x.dtype) for g in grads)


for _name in ("linear_cross_entropy", "linear_cross_entropy_raw"):
    _library.compose(_name, composed_linear_cross_entropy)
_library.compose("linear_cross_entropy_backward", composed_linear_cross_entropy_backward)
