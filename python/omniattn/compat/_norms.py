"""Norms of sums, as flash-attn and mamba-ssm have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_number, require_shape
from omniattn.compat._errors import errors_of, require_flags, require_optional, require_real


def added(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    in_fp32: bool,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    x1: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns x after its factors and dropout plus x1, and the residual that is to be added."""
    require_real(op, x=x)
    require_optional(op, residual=residual, rowscale=rowscale, x1=x1)
    require_flags(op, residual_in_fp32=in_fp32)
    require_number(op, "dropout_p", dropout_p, 0.0, below=1.0)
    for name, t in (("residual", residual), ("x1", x1)):
        if t is not None:
            require_shape(op, name, t, tuple(x.shape))
    if rowscale is not None:
        if x1 is not None:
            raise ValueError(f"{op}: rowscale must be None with x1")
        require_shape(op, "rowscale", rowscale, tuple(x.shape[:-1]))
        x = x * rowscale[..., None].to(x.dtype)
    if dropout_p > 0.0:
        x = functional.dropout(x, dropout_p)
        x1 = None if x1 is None else functional.dropout(x1, dropout_p)
    if x1 is not None:
        x = x + x1.to(x.dtype)
    if residual is None and in_fp32 and x.itemsize < 4:
        residual = torch.zeros_like(x, dtype=torch.float32)
    return x, residual


def normed(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    *,
    is_rms_norm: bool,
    zero_centered: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the norm of h = x + residual in the dtype of x, or in `out_dtype`, and h.

    Tensors may have different dtypes; the norm is then computed in their wider one.
    """
    require_optional(op, weight=weight, bias=bias)
    wide = x.dtype
    for t in (weight, bias):
        wide = wide if t is None else torch.promote_types(wide, t.dtype)
    if is_rms_norm and bias is not None:
        wide = torch.promote_types(wide, torch.float32)  # one rounding, after the bias
    if out_dtype is not None:
        wide = torch.promote_types(wide, out_dtype)
    h = x
    kinds = x.dtype, torch.float32
    if residual is not None and (wide != x.dtype or residual.dtype not in kinds):
        h, residual = (x + residual).to(residual.dtype), None
        wide = torch.promote_types(wide, h.dtype)
    weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
    with errors_of(op):
        if is_rms_norm:
            offset = 1.0 if zero_centered else 0.0
            y = functional.rms_norm(h.to(wide), weight, eps=eps, offset=offset, residual=residual)
        else:
            weight = weight + 1.0 if zero_centered and weight is not None else weight
            y = functional.layer_norm(h.to(wide), weight, bias, eps=eps, residual=residual)
    if isinstance(y, tuple):
        y, h = y
    if is_rms_norm and bias is not None:
        y = y + bias
    return y.to(x.dtype if out_dtype is None else out_dtype), h


def norm_fn(
    op: str,
    x: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    residual: Tensor | None,
    x1: Tensor | None,
    weights1: tuple[Tensor | None, Tensor | None],
    eps: float,
    dropout_p: float,
    rowscale: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    *,
    is_rms_norm: bool,
    zero_centered: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Computes the norm functions that flash-attn and mamba-ssm share; weights are with biases."""
    flags = {"prenorm": prenorm, "is_rms_norm": is_rms_norm, "zero_centered_weight": zero_centered}
    require_flags(op, **flags)
    given = {"return_dropout_mask": return_dropout_mask, "out": out, "residual_out": residual_out}
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{op}: {name} is not supported, got a {type(value)}")
    x, residual = added(op, x, residual, residual_in_fp32, dropout_p, rowscale, x1)
    options: dict[str, Any] = {
        "is_rms_norm": is_rms_norm,
        "zero_centered": zero_centered,
        "out_dtype": out_dtype,
    }
    y, h = normed(op, x, *weights, residual, eps, **options)
    results: tuple[Tensor, ...] = (y,)
    if weights1[0] is not None:
        results += (normed(op, h, *weights1, None, eps, **options)[0].to(y.dtype),)
    if prenorm:
        results += (h,)
    return results if len(results) > 1 else y


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes ``norm(h) linear_weight^T + linear_bias`` of h = x + residual.

    Args:
        x: (..., N).
        norm_weight, norm_bias: (N,); the bias may be None.
        linear_weight, linear_bias: (M, N) and (M,), used in the dtype of x; the bias may be None.
        residual: of the shape of x, or None.
        eps: added to the variance.
        prenorm: if True, also returns h.
        residual_in_fp32: if True, h is fp32 even if there is no residual.
        is_rms_norm: if True, computes a root mean square norm.
    """
    op = "layer_norm_linear_fn"
    require_flags(op, prenorm=prenorm, is_rms_norm=is_rms_norm)
    x, residual = added(op, x, residual, residual_in_fp32)
    y, h = normed(op, x, norm_weight, norm_bias, residual, eps, is_rms_norm=is_rms_norm)
    bias = None if linear_bias is None else linear_bias.to(y.dtype)
    with errors_of(op, weight="linear_weight", bias="linear_bias"):
        out = functional.linear(y, linear_weight.to(y.dtype), bias)
    return (out, h) if prenorm else out
