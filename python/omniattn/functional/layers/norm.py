"""RMSNorm and LayerNorm over the last dimension, with a fused residual."""

from __future__ import annotations

import math
from typing import Any, overload

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    autocast_dtype,
    cast_like,
    implementation,
    require_choice,
    require_device,
    require_float,
    require_number,
    require_shape,
)
from omniattn.checks.jagged import token_wise
from omniattn.ops import norm as ops
from omniattn.ops.dispatch.plain import is_plain

CASTINGS = ("fp32", "llama")

__all__ = ["layer_norm", "rms_norm"]


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    residual: None = None,
    backend: str | None = None,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    residual: Tensor,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    residual: Tensor | None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@token_wise("residual")
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root mean square normalisation over the last dimension.

    ``y = h / sqrt(mean(h^2) + eps) * (weight + offset)`` with ``h = x`` or, fused, ``h = x +
    residual``.

    Args:
        x: (..., N), float64, float32, bfloat16 or float16; or a jagged nested tensor (B, j, ..., N)
            with a residual of its boundaries. Any strides; copied only where the leading dimensions
            cannot be walked with one stride or the last stride is not 1.
        weight: (N,) of x's dtype, or None for no scale. Under autocast it is cast to x's dtype.
        eps: added to the mean square, inside the root.
        offset: added to the weight: 1.0 for the Gemma form, whose weights start at 0.
        casting: where half inputs are rounded: "fp32" once, at the end (Gemma, OLMo 2, gpt-oss);
            "llama" before the weight multiplies, too (Llama, Mistral, Qwen, DeepSeek). It has no
            effect in fp32 and fp64, or on gradients, which ignore the rounding.
        residual: of x's shape, and of x's dtype or, with bfloat16 or float16, float32: the stream
            of a pre-norm model in full precision (flash-attn's and Mamba's residual_in_fp32; in
            front of the first layer it is ``x.float()``). ``h`` is rounded to the residual's dtype
            before it is normalised, so that the fused call equals ``h = x + residual`` followed by
            the plain one. Under autocast other pairs are promoted to the wider dtype.
        backend: None for the native kernel of x's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        y of x's shape and dtype; with a residual the pair (y, h), h of the residual's dtype.

    Raises:
        TypeError: a dtype is unsupported or differs from x's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Statistics and gradients are accumulated in fp32 (fp64 for fp64) and rounded once. Gradients
        flow to x, weight and residual; they do not depend on the number of threads. Second
        and forward-mode derivatives go through the eager definition.

    Reference:
        Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, arXiv:1910.07467.

    Example:
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> rms_norm(x, eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    require_number("rms_norm", "offset", offset)
    cast_first = casts_first("rms_norm", casting)
    return _norm("rms_norm", backend, x, residual, weight, None, False, eps, offset, cast_first)


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: None = None,
    backend: str | None = None,
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@token_wise("residual")
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer normalisation over the last dimension.

    ``y = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias`` with the biased variance and ``h =
    x`` or, fused, ``h = x + residual``.

    Args:
        x: (..., N), float64, float32, bfloat16 or float16, any strides; or nested.
        weight: (N,) of x's dtype, or None for no scale. Under autocast it is cast to x's dtype.
        bias: (N,) of x's dtype, or None.
        eps: added to the variance, inside the root.
        residual: of x's shape, added first, of x's dtype or float32; see :func:`rms_norm`.
        backend: see :func:`rms_norm`.

    Returns:
        y of x's shape and dtype; with a residual the pair (y, h).

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`rms_norm`.

    Note:
        The variance is computed in a second pass over the row, not as E[x^2] - E[x]^2. Precision,
        determinism and gradients as for :func:`rms_norm`.

    Reference:
        Ba, Kiros and Hinton, Layer Normalization, 2016, arXiv:1607.06450.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
        tensor([[-1.,  1.]])
    """
    return _norm("layer_norm", backend, x, residual, weight, bias, True, eps, 0.0, False)


def casts_first(op: str, casting: str) -> bool:
    if casting == "fp32":
        return False
    require_choice(op, "casting", casting, CASTINGS)
    return True


def _norm(
    op: str,
    backend: str | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    center: bool,
    eps: float,
    *options: Any,
) -> Any:
    if backend is None and type(eps) is float and 0 <= eps < math.inf:
        found: Any = None
        if residual is None and is_plain(x, weight, bias):
            found = ops.norm.attempt(x, weight, bias, center, eps, *options)
        elif residual is not None and is_plain(x, residual, weight, bias):
            found = ops.add_norm.attempt(x, residual, weight, bias, center, eps, *options)
        if found is not None:
            return found
    if residual is not None:
        x, residual = _promote(op, x, residual)
    cols = check_row(op, x, eps)
    if weight is not None:
        weight = vector_of_row(op, "weight", weight, x, cols)
    if bias is not None:
        bias = vector_of_row(op, "bias", bias, x, cols)
    if residual is None:
        return implementation(op, backend, x, ops.norm)(x, weight, bias, center, eps, *options)
    if not (residual.is_cpu and x.is_cpu):
        require_device(op, "residual", residual, x)
    require_shape(op, "residual", residual, x.shape)
    run = implementation(op, backend, x, ops.add_norm)
    return run(x, residual, weight, bias, center, eps, *options)


def _promote(op: str, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x and residual in one dtype, or a 16-bit x with an fp32 residual.

    Promotes other combinations under autocast and refuses them elsewhere."""
    require_float(op, "x", x)
    require_float(op, "residual", residual)
    if x.dtype == residual.dtype or (x.dtype.itemsize == 2 and residual.dtype == torch.float32):
        return x, residual
    if autocast_dtype(x) is None:
        raise TypeError(
            f"{op}: residual must have the dtype of x, or be float32 with a 16-bit x, "
            f"got residual.dtype={residual.dtype}, x.dtype={x.dtype}"
        )
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.to(dtype), residual.to(dtype)


def check_row(op: str, x: Tensor, eps: float) -> int:
    """Checks x and eps; returns the size of x's last dimension."""
    require_float(op, "x", x)
    shape = x.shape
    if not shape:
        raise ValueError(f"{op}: x must have at least 1 dimension, got x.shape=()")
    require_number(op, "eps", eps, 0)
    return shape[-1]


def vector_of_row(op: str, name: str, v: Tensor, x: Tensor, cols: int) -> Tensor:
    """Checks a vector with one value per column; under autocast, casts it to x's dtype."""
    v = cast_like(op, name, v, x)
    if v.ndim != 1 or v.numel() != cols:
        require_shape(op, name, v, (cols,))
    return v
