"""linear_cross_entropy where no library has a kernel: products of torch (cuBLAS) around the kernels
of cross_entropy, a chunk of tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from omniattn.ops import _library
from omniattn.ops._backward import private_op
from omniattn.ops.loss import REDUCTIONS, loss_like
from omniattn.reference.precision import compute_dtype

__all__ = ["CHUNK_LOGITS", "linear_cross_entropy", "linear_cross_entropy_backward"]

_forward_op = private_op("cross_entropy_raw")
_backward_op = private_op("cross_entropy_backward")

#: fp32 logits of one chunk of tokens, 1 GiB, and their gradients in the dtype of x. A chunk of n
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
    compute = compute_dtype(x)
    vocab, width = weight.shape
    tokens = math.prod(x.shape[:-1])
    rows, targets = x.reshape(tokens, width), target.reshape(tokens)
    losses = loss_like(x, REDUCTIONS["none"])
    x_grad, weight_grad, bias_grad = wanted
    dx = x.new_empty(x.shape if x_grad else 0, dtype=compute)
    dweight = x.new_empty(weight.shape if weight_grad else 0, dtype=compute)
    dbias = x.new_zeros(vocab if bias_grad else 0, dtype=compute)
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


def linear_cross_entropy(
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
    ones = x.new_ones((tokens,), dtype=compute_dtype(x)) if any(wanted) else None
    losses, dx, dweight, dbias = _run_chunks(x, weight, bias, target, options, ones, wanted)
    if reduction == REDUCTIONS["none"]:
        return losses, dx, dweight, dbias
    loss = losses.sum(dtype=torch.float64)
    if reduction == REDUCTIONS["mean"]:
        kept = (target != ignore_index).sum().clamp(min=1)
        for result in (loss, dx, dweight, dbias):
            result /= kept
    return loss.to(losses.dtype), dx, dweight, dbias


def linear_cross_entropy_backward(
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
    _library.compose(_name, linear_cross_entropy)
_library.compose("linear_cross_entropy_backward", linear_cross_entropy_backward)
