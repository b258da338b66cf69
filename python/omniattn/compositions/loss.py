"""linear_cross_entropy and linear_jsd where no library has a kernel: products of torch (cuBLAS)
around the kernels of cross_entropy and jsd, a chunk of tokens at a time; cross_entropy of
probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn.ops import _library
from omniattn.ops._backward import private_op
from omniattn.ops.loss import REDUCTIONS, loss_like
from omniattn.reference.precision import compute_dtype

__all__ = [
    "CHUNK_LOGITS",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_jsd",
    "linear_jsd_backward",
    "soft_cross_entropy",
]

_forward_op = private_op("cross_entropy_raw")
_backward_op = private_op("cross_entropy_backward")
_jsd_op = private_op("jsd_raw")
_jsd_backward_op = private_op("jsd_backward")

#: fp32 logits of one chunk of tokens, 1 GiB, and their gradients in the dtype of x. Each chunk
#: reads and writes the sums of dweight once; with 2048 tokens (a vocabulary of 131072) that takes
#: an estimated tenth of its time on an H100.
CHUNK_LOGITS = 1 << 28


def _multiply(a: Tensor, b: Tensor, out: Tensor, beta: int = 0) -> None:
    """out = a b + beta out; sums stay in the dtype of `out` where a and b are half."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    else:  # emulated kernels: torch has no mixed product on the CPU
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)


#: Maps a slice of the tokens and their logits to losses, and to a function that maps weights of the
#: rows to gradients of the logits in the dtype of x.
_Rows = Callable[[slice, Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = x.new_empty((len(x), len(weight)), dtype=compute_dtype(x))
    _multiply(x, weight.mT, logits)
    if bias is not None:
        logits += bias
    return logits


def _flat(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _cross_entropies(
    x: Tensor, target: Tensor, class_weight: Tensor | None, *options: Any
) -> _Rows:
    targets = target.flatten()

    def run(part: slice, logits: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        labels, rest = targets[part], (*options, REDUCTIONS["none"])
        losses, *statistics = _forward_op(logits, labels, class_weight, *rest)

        def gradients(weights: Tensor) -> Tensor:
            found: Tensor = _backward_op(
                *(weights, logits, labels, class_weight, *statistics, *rest), grad_dtype=x.dtype
            )
            return found

        return losses, gradients

    return run


def _divergences(
    teacher_x: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    target: Tensor | None,
    *options: Any,
) -> _Rows:
    tokens = _flat(teacher_x)
    targets = None if target is None else target.flatten()

    def run(part: slice, logits: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        teacher = _logits(tokens[part], teacher_weight, teacher_bias)
        labels = None if targets is None else targets[part]
        rest = (*options, False, REDUCTIONS["none"])
        losses, statistics = _jsd_op(logits, teacher, labels, *rest)

        def gradients(weights: Tensor) -> Tensor:
            found: Tensor = _jsd_backward_op(
                *(weights, logits, teacher, labels, statistics, *rest), grad_dtype=tokens.dtype
            )
            return found

        return losses, gradients

    return run


def _run_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: _Rows,
    row_weight: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, and with weights of the rows the gradients in the compute dtype.

    Gradients of logits are rounded to the dtype of x, so that their products run at its speed.
    """
    compute = compute_dtype(x)
    (vocab, width), inputs = weight.shape, _flat(x)
    tokens = len(inputs)
    losses = loss_like(x, REDUCTIONS["none"])
    x_grad, weight_grad, bias_grad = wanted
    dx = x.new_empty(x.shape if x_grad else 0, dtype=compute)
    dweight = x.new_empty(weight.shape if weight_grad else 0, dtype=compute)
    dbias = x.new_zeros(vocab if bias_grad else 0, dtype=compute)
    chunk = max(1, CHUNK_LOGITS // max(1, vocab))
    for first in range(0, max(1, tokens), chunk):
        part = slice(first, first + chunk)
        losses.view(tokens)[part], gradients = rows(part, _logits(inputs[part], weight, bias))
        if row_weight is None:
            continue
        dlogits = gradients(row_weight[part])
        if x_grad:
            _multiply(dlogits, weight, dx.view(tokens, width)[part])
        if weight_grad:
            _multiply(dlogits.mT, inputs[part], dweight, beta=int(first > 0))
        if bias_grad:
            dbias += dlogits.sum(0, dtype=compute)
    return losses, dx, dweight, dbias


def _with_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: _Rows,
    kept: Tensor,
    reduction: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the reduced loss and its gradients; `kept` is the divisor of the mean.

    Gradients of half logits are divided by the number of tokens only at the end: they could
    underflow earlier.
    """
    ones = x.new_ones((len(_flat(x)),), dtype=compute_dtype(x)) if any(wanted) else None
    losses, dx, dweight, dbias = _run_chunks(x, weight, bias, rows, ones, wanted)
    if reduction == REDUCTIONS["none"]:
        return losses, dx, dweight, dbias
    loss = losses.sum(dtype=torch.float64)
    if reduction == REDUCTIONS["mean"]:
        for result in (loss, dx, dweight, dbias):
            result /= torch.where(kept != 0, kept, 1)
    return loss.to(losses.dtype), dx, dweight, dbias


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    temperature: float,
    reduction: int,
    *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = (ignore_index, label_smoothing, z_loss, softcap, temperature)
    rows = _cross_entropies(x, target, class_weight, *options)
    kept = target != ignore_index
    if class_weight is not None:
        kept = class_weight[target.where(kept, 0)] * kept
    return _with_gradients(x, weight, bias, rows, kept.sum(), reduction, wanted)


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    temperature: float,
    *wanted: bool,
) -> tuple[Tensor, ...]:
    options = (ignore_index, label_smoothing, z_loss, softcap, temperature)
    rows = _cross_entropies(x, target, class_weight, *options)
    _, *grads = _run_chunks(x, weight, bias, rows, grad.flatten(), wanted)
    return tuple(g.to(x.dtype) for g in grads)


def linear_jsd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    target: Tensor | None,
    ignore_index: int,
    beta: float,
    temperature: float,
    reduction: int,
    *wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = (ignore_index, beta, temperature)
    rows = _divergences(teacher_x, teacher_weight, teacher_bias, target, *options)
    kept = x.new_ones(x.shape[:-1], dtype=torch.bool) if target is None else target != ignore_index
    return _with_gradients(x, weight, bias, rows, kept.sum(), reduction, wanted)


def linear_jsd_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    target: Tensor | None,
    ignore_index: int,
    beta: float,
    temperature: float,
    *wanted: bool,
) -> tuple[Tensor, ...]:
    options = (ignore_index, beta, temperature)
    rows = _divergences(teacher_x, teacher_weight, teacher_bias, target, *options)
    _, *grads = _run_chunks(x, weight, bias, rows, grad.flatten(), wanted)
    return tuple(g.to(x.dtype) for g in grads)


def soft_cross_entropy(
    cross_entropy: Callable[..., Tensor],
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    temperature: float,
    reduction: int,
) -> Tensor:
    """With probabilities p as targets: sum_v w_v ((1 - e) p_v + e / V) (lse - x_v) of a row.

    lse is the largest logit and the cross entropy of its class, so that large equal logits lose no
    digits.
    """
    x = logits.to(compute_dtype(logits))
    if softcap > 0:
        x = softcap * torch.tanh(x / softcap)
    x, p = x / temperature, target.to(x.dtype)
    q = (1 - label_smoothing) * p + label_smoothing / max(1, x.shape[-1])
    if class_weight is not None:
        p, q = class_weight * p, class_weight * q
    top, index = x.max(-1, keepdim=True)
    options = (-1, 0.0, 0.0, 0.0, 1.0, REDUCTIONS["none"])
    nearest = cross_entropy(x, index.squeeze(-1), None, *options)
    gap = top - x
    gap = gap.masked_fill(gap.isinf() & (q == 0), 0)  # impossible classes with q = 0
    loss = nearest * q.sum(-1) + (q * gap).sum(-1)
    if z_loss > 0:
        loss = loss + z_loss * p.sum(-1) * (nearest + top.squeeze(-1)).square()
    if reduction == REDUCTIONS["none"]:
        return loss
    return loss.sum() / (max(1, loss.numel()) if reduction == REDUCTIONS["mean"] else 1)


def _register(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    name = forward.__name__
    for suffix in ("", "_raw"):
        _library.compose(name + suffix, forward)
    _library.compose(f"{name}_backward", backward)


_register(linear_cross_entropy, linear_cross_entropy_backward)
_register(linear_jsd, linear_jsd_backward)
