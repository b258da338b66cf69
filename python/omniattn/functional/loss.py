"""Cross entropy of logits, and of a linear layer's logits that are never held as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.functional._checks import (
    autocast_linear,
    implementation,
    require_choice,
    require_float,
    require_int,
    require_like,
    require_number,
    require_shape,
)
from omniattn.ops import loss as ops
from omniattn.ops._autograd import may_need_gradient

__all__ = ["cross_entropy", "linear_cross_entropy"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Cross entropy over the last dimension.

    ``(1 - e) (lse - logit_y) + e mean_v(lse - logit_v) + z_loss lse^2`` with e = label_smoothing
    and ``lse = logsumexp_v(logit_v)``.

    Args:
        logits: (..., V), float64, float32, bfloat16 or float16, any strides.
        target: (...), int64 or int32: classes in [0, V), or `ignore_index`.
        ignore_index: rows with this target give 0 and are not counted by the mean.
        label_smoothing: e in [0, 1].
        z_loss: weight of lse^2, at least 0.
        softcap: c > 0 takes ``c tanh(logit / c)`` for the logits (Gemma 2), 0 the logits.
        reduction: "mean" over the kept targets (0 if there are none, where torch gives NaN), "sum"
            or "none".
        backend: None for the native kernel of the tensors' device, "cpu" or "cuda" to insist on
            it, "reference" for the eager definition.

    Returns:
        float32 (float64 for float64 logits): a scalar, or (...) without reduction.

    Raises:
        TypeError: an unsupported dtype.
        ValueError: a shape, device or option that does not fit.
        RuntimeError: a target out of range; the message names it. On CUDA the kernel finds it and
            stops: torch raises at its next call that waits for the GPU.
        NotImplementedError: no native kernel for the device; a second derivative.

    Note:
        The forward reads the logits once and keeps one number per row; the backward reads them
        once more and writes the gradient, rounded once.

    Reference:
        Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv:1805.02867.

    Example:
        >>> cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor(0.6931)
    """
    op = "cross_entropy"
    require_float(op, "logits", logits)
    if logits.dim() == 0:
        raise ValueError(f"{op}: logits must have at least 1 dimension, got logits.shape=()")
    target = _check_target(op, target, logits)
    number = _check_options(op, ignore_index, label_smoothing, z_loss, softcap, reduction)
    run = implementation(op, backend, logits, ops.cross_entropy)
    loss: Tensor = run(logits, target, ignore_index, label_smoothing, z_loss, softcap, number)
    return loss


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Cross entropy of ``x weight^T + bias``, whose logits exist for a chunk of tokens at a time.

    Args:
        x: (..., K), float64, float32, bfloat16 or float16. Under autocast x, weight and bias are
            cast to its dtype.
        weight: (V, K) of x's dtype.
        target: (...), see :func:`cross_entropy`.
        bias: (V,) of x's dtype, or None.
        ignore_index, label_smoothing, z_loss, softcap, reduction, backend: see
            :func:`cross_entropy`.

    Returns:
        float32 (float64 for float64): a scalar, or (...) without reduction.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: see :func:`cross_entropy`.

    Note:
        Logits and their gradients stay in fp32, at most 64 MiB of them. On CUDA the products are
        torch's (cuBLAS), at most 1 GiB of logits are in fp32 and their gradients in x's dtype. With
        "mean" and "sum" the gradients are computed with the loss, three matrix products in all;
        without reduction the backward computes the logits again. Memory: the gradients of x and
        weight.

    Reference:
        Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv:1805.02867.

    Example:
        >>> linear_cross_entropy(torch.ones(1, 2), torch.zeros(4, 2), torch.tensor([1]))
        tensor(1.3863)
    """
    op = "linear_cross_entropy"
    x, weight, bias = autocast_linear(x, weight, bias)
    require_float(op, "x", x)
    require_like(op, "weight", weight, x)
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: x must have shape (..., K) and weight (V, K), "
            f"got x.shape={tuple(x.shape)}, weight.shape={tuple(weight.shape)}"
        )
    if bias is not None:
        require_like(op, "bias", bias, x)
        require_shape(op, "bias", bias, weight.shape[:1])
    target = _check_target(op, target, x)
    number = _check_options(op, ignore_index, label_smoothing, z_loss, softcap, reduction)
    now = reduction != "none" and torch.is_grad_enabled()
    wanted = [now and t is not None and may_need_gradient(t) for t in (x, weight, bias)]
    run = implementation(op, backend, x, ops.linear_cross_entropy)
    loss: Tensor = run(
        x, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, number, *wanted
    )
    return loss


def _check_target(op: str, target: Tensor, x: Tensor) -> Tensor:
    """The target as int64; its range is checked where it is read."""
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
        got = getattr(target, "dtype", type(target).__name__)
        raise TypeError(f"{op}: target must be an int64 or int32 tensor, got {got}")
    if target.device != x.device:
        raise ValueError(
            f"{op}: target must be on the device of the logits, got target.device={target.device}, "
            f"device={x.device}"
        )
    require_shape(op, "target", target, x.shape[:-1])
    return target.long()


def _check_options(
    op: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
) -> int:
    require_int(op, "ignore_index", ignore_index)
    require_number(op, "label_smoothing", label_smoothing, 0, 1)
    require_number(op, "z_loss", z_loss, 0)
    require_number(op, "softcap", softcap, 0)
    require_choice(op, "reduction", reduction, ops.REDUCTIONS)
    return ops.REDUCTIONS[reduction]
