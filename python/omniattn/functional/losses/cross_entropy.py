"""Cross entropy of logits, and fused with a linear layer, without storing all logits."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import autocast_linear, implementation, require_float
from omniattn.checks.jagged import token_wise
from omniattn.compositions.losses.loss import soft_cross_entropy
from omniattn.encoding.losses import CrossEntropy, CrossEntropyOptions
from omniattn.encoding.records import packed, spelled_out
from omniattn.functional.layers.gemm import linear
from omniattn.functional.losses._common import (
    check_class_weight,
    check_cross_entropy,
    check_linear,
    check_probabilities,
    check_target,
    wanted_gradients,
)
from omniattn.ops import loss as ops
from omniattn.reference.precision import compute_dtype

__all__ = ["cross_entropy", "linear_cross_entropy", "linear_log_prob"]


@token_wise(numbers=("target",))
@spelled_out(CrossEntropyOptions, CrossEntropy, last=("backend",))
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    backend: str | None = None,
    **options: Unpack[CrossEntropyOptions],
) -> Tensor:
    """Cross entropy over the last dimension.

    ``(1 - e) w_y (lse - x_y) + e/V sum_v w_v (lse - x_v) + z_loss w_y lse^2`` with
    e = label_smoothing, w = class_weight or 1, x = logits / temperature and
    ``lse = logsumexp_v(x_v)``. With probabilities p as targets
    ``sum_v w_v ((1 - e) p_v + e/V) (lse - x_v) + z_loss (sum_v w_v p_v) lse^2``.

    Args:
        logits: (..., V), float64, float32, bfloat16 or float16, any strides; or nested (B, j, V),
            with a target (B, j) or (B, j, V) of its boundaries.
        target: (...) of any integer dtype: classes in [0, V), or `ignore_index`. Or (..., V) of any
            floating dtype: probabilities, which may get a gradient.
        class_weight: (V,) of any floating dtype, how much a class counts, or None for 1. It gets no
            gradient.
        ignore_index: rows with this target give 0 and are not counted by the mean; -100 with
            probabilities.
        label_smoothing: e in [0, 1].
        z_loss: weight of lse^2, at least 0.
        softcap: c > 0 replaces the logits by ``c tanh(logit / c)`` (Gemma 2); 0 is off.
        temperature: divisor of the logits, after the cap; above 0.
        reduction: "mean", which divides the sum by the w_y of the kept targets, without class
            weights and with probabilities by their number (0 if there are none, where torch gives
            NaN), "sum" or "none".
        backend: None for the native kernel of the tensors' device, "cpu" or "cuda" to insist on
            it, "reference" for the eager definition.

    Returns:
        float32 (float64 for float64 logits): a scalar, or (...) without reduction.

    Raises:
        TypeError: an unsupported dtype.
        ValueError: a shape, device or option is invalid; class weights that need a gradient.
        RuntimeError: a target out of range; the message names it. On CUDA the kernel finds it and
            stops: torch raises at its next call that waits for the GPU.
        NotImplementedError: no native kernel for the device; a second derivative.

    Note:
        The forward reads the logits once and keeps two numbers per row; the backward reads them
        once more and writes the gradient, rounded once. Loss and gradient are accurate for large
        equal logits too: lse is kept as the maximum and lse minus the maximum. With probabilities
        torch sums the rows outside the kernel, with some (..., V) tensors in fp32.

    Reference:
        Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv:1805.02867.

    Example:
        >>> cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor(0.6931)
    """
    op = "cross_entropy"
    record = packed(op, CrossEntropy, options)
    require_float(op, "logits", logits)
    if logits.dim() == 0:
        raise ValueError(f"{op}: logits must have at least 1 dimension, got logits.shape=()")
    class_weight = check_class_weight(op, record.class_weight, logits, logits.shape[-1])
    number, numbers = check_cross_entropy(op, record), record[1:-1]
    run = implementation(op, backend, logits, ops.cross_entropy)
    if isinstance(target, Tensor) and target.is_floating_point() and target.dim() == logits.dim():
        check_probabilities(op, target, logits, record.ignore_index)
        return soft_cross_entropy(run, logits, target, class_weight, *numbers[1:], number)
    target = check_target(op, target, logits)
    loss: Tensor = run(logits, target, class_weight, *numbers, number)
    return loss


@token_wise(numbers=("target",))
@spelled_out(CrossEntropyOptions, CrossEntropy, last=("backend",))
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[CrossEntropyOptions],
) -> Tensor:
    """Cross entropy of ``x weight^T + bias``, computed in chunks of tokens.

    Args:
        x: (..., K), float64, float32, bfloat16 or float16; or nested. Under autocast x, weight and
            bias are cast to its dtype.
        weight: (V, K) of x's dtype.
        target: (...), see :func:`cross_entropy`.
        bias: (V,) of x's dtype, or None.
        class_weight, ignore_index, label_smoothing, z_loss, softcap: see :func:`cross_entropy`.
        temperature, reduction, backend: see :func:`cross_entropy`.

    Returns:
        float32 (float64 for float64): a scalar, or (...) without reduction.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: see :func:`cross_entropy`.

    Note:
        Logits and their gradients are in fp32, at most 64 MiB at a time. On CUDA the products are
        torch's (cuBLAS), with at most 1 GiB of fp32 logits and gradients in x's dtype. With "mean"
        and "sum" the gradients are computed with the loss, three matrix products in all; without
        reduction the backward recomputes the logits. The saved memory is that of the gradients of x
        and weight.

    Reference:
        Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv:1805.02867.

    Example:
        >>> linear_cross_entropy(torch.ones(1, 2), torch.zeros(4, 2), torch.tensor([1]))
        tensor(1.3863)
    """
    op = "linear_cross_entropy"
    record = packed(op, CrossEntropy, options)
    x, weight, bias = autocast_linear(x, weight, bias)
    check_linear(op, x, weight, bias)
    target = check_target(op, target, x)
    class_weight = check_class_weight(op, record.class_weight, x, weight.shape[0])
    number, numbers = check_cross_entropy(op, record), record[1:-1]
    wanted = wanted_gradients(record.reduction, x, weight, bias)
    run = implementation(op, backend, x, ops.linear_cross_entropy)
    loss: Tensor = run(x, weight, bias, target, class_weight, *numbers, number, *wanted)
    return loss


@token_wise(numbers=("target",))
def linear_log_prob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
    temperature: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """Log-probability of each target under ``softmax((x weight^T + bias) / temperature)``.

    This is the basis of preference and policy losses (:mod:`omniattn.functional.preference`). The
    logits of all tokens are never stored at once.

    Args:
        x: (..., K), float64, float32, bfloat16 or float16, cast by autocast as in
            :func:`linear_cross_entropy`; or nested.
        weight: (V, K) of x's dtype.
        target: (...) of any integer dtype: classes in [0, V), or `ignore_index`.
        bias: (V,) of x's dtype, or None.
        ignore_index: tokens with this target give 0.
        softcap, temperature, backend: see :func:`cross_entropy`.

    Returns:
        (...), float32 (float64 for float64).

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: see :func:`cross_entropy`.

    Note:
        Up to 64 MiB of logits of float32 or float64 tensors are saved for the backward, which
        recomputes all others: four matrix products in all, and the memory of
        :func:`linear_cross_entropy`.

    Reference:
        Rafailov et al., Direct Preference Optimization, 2023, arXiv:2305.18290.

    Example:
        >>> linear_log_prob(torch.ones(1, 2), torch.zeros(4, 2), torch.tensor([1]))
        tensor([-1.3863])
    """
    op = "linear_log_prob"
    x, weight, bias = autocast_linear(x, weight, bias)
    check_linear(op, x, weight, bias)
    target = check_target(op, target, x)
    record = CrossEntropy(None, ignore_index, 0.0, 0.0, softcap, temperature, "none")
    number, numbers = check_cross_entropy(op, record), record[1:-1]
    if backend is None and _keeps_logits(x, weight, bias):
        run = implementation(op, backend, x, ops.cross_entropy)
        # Not torch's product, whose bits depend on the number of threads on some processors.
        logits = linear(x, weight, bias, backend="cpu" if x.is_cpu else None)
        kept: Tensor = run(logits, target, None, *numbers, number)
        return -kept
    run = implementation(op, backend, x, ops.linear_cross_entropy)
    wanted = (False, False, False)
    loss: Tensor = run(x, weight, bias, target, None, *numbers, number, *wanted)
    return -loss


def _keeps_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns True if a backward is expected and all logits, unrounded, fit in one chunk."""
    chunk = (1 << 26) // x.element_size()
    return (
        x.dtype == compute_dtype(x)
        and any(wanted_gradients("sum", x, weight, bias))
        and x.shape[:-1].numel() * weight.shape[0] <= chunk
    )
