"""Norms: `flash_attn.ops.rms_norm`, `.layer_norm` and `.triton.layer_norm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn.checks.arguments import require_number
from omniattn.compat._norms import norm_fn

Normed = Tensor | tuple[Tensor, ...]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Computes the root mean square norm of x (..., N)."""
    return _alone("rms_norm", x, (weight, None), epsilon, is_rms_norm=True)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Computes the layer norm of x (..., N)."""
    return _alone("layer_norm", x, (weight, bias), epsilon, is_rms_norm=False)


def dropout_add_rms_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Normed:
    """Computes h = residual + dropout(rowscale * layerscale * x0) and its root mean square norm.

    Args:
        x0: (..., N).
        residual: of the shape of x0, or None for 0.
        weight, bias: (N,); the bias may be None.
        dropout_p: probability of dropping an element of x0.
        epsilon: added to the mean square.
        rowscale: (...), a factor of each row.
        layerscale: (N,), a factor of each channel.
        prenorm: if True, returns (y, h) instead of y.
        residual_in_fp32: if True, h is fp32 even if there is no residual.
        return_dropout_mask: not supported.

    Returns:
        y of the dtype of x0; h has the dtype of the residual.
    """
    op = "dropout_add_rms_norm"
    rest = dropout_p, epsilon, rowscale, layerscale, prenorm, residual_in_fp32, return_dropout_mask
    return _summed(op, x0, residual, (weight, bias), *rest, is_rms_norm=True)


def dropout_add_layer_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Normed:
    """Computes :func:`dropout_add_rms_norm` with a layer norm."""
    op = "dropout_add_layer_norm"
    rest = dropout_p, epsilon, rowscale, layerscale, prenorm, residual_in_fp32, return_dropout_mask
    return _summed(op, x0, residual, (weight, bias), *rest, is_rms_norm=False)


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Normed:
    """Computes the norm of h = dropout(rowscale * x) + dropout(x1) + residual.

    Args:
        x: (..., N).
        weight, bias: (N,); the bias may be None.
        residual, x1: of the shape of x, or None.
        weight1, bias1: (N,) of a second norm of h, or None.
        eps: added to the variance.
        dropout_p: probability of dropping an element of x or x1.
        rowscale: (...), a factor of each row.
        prenorm: if True, also returns h.
        residual_in_fp32: if True, h is fp32 even if there is no residual.
        zero_centered_weight: if True, the factor is weight + 1.
        is_rms_norm: if True, computes a root mean square norm.
        return_dropout_mask, out, residual_out: not supported.
        out_dtype: dtype of y; None for that of x.

    Returns:
        y, or (y, h), or with `weight1` (y, y1) or (y, y1, h).
    """
    return norm_fn(
        "layer_norm_fn",
        x,
        (weight, bias),
        residual,
        x1,
        (weight1, bias1),
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        is_rms_norm=is_rms_norm,
        zero_centered=zero_centered_weight,
        return_dropout_mask=return_dropout_mask,
        out_dtype=out_dtype,
        out=out,
        residual_out=residual_out,
    )


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Normed:
    """Computes :func:`layer_norm_fn` with ``is_rms_norm=True``."""
    return norm_fn(
        "rms_norm_fn",
        x,
        (weight, bias),
        residual,
        x1,
        (weight1, bias1),
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        is_rms_norm=True,
        zero_centered=zero_centered_weight,
        return_dropout_mask=return_dropout_mask,
        out_dtype=out_dtype,
        out=out,
        residual_out=residual_out,
    )


def dropout_add_layer_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[Tensor | None, ...]:
    """Computes two norms of h = residual + dropout(x0) + dropout(x1), see :func:`layer_norm_fn`.

    Returns (y0, y1), or with `prenorm` (y0, y1, h); y1 is None where `weight1` is.
    """
    op = "dropout_add_layer_norm_parallel_residual"
    rest = dropout_p, epsilon, prenorm, residual_in_fp32, return_dropout_mask
    return _parallel(op, x0, x1, residual, (weight0, bias0), (weight1, bias1), *rest, False)


def dropout_add_rms_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[Tensor | None, ...]:
    """Computes :func:`dropout_add_layer_norm_parallel_residual` with root mean square norms."""
    op = "dropout_add_rms_norm_parallel_residual"
    rest = dropout_p, epsilon, prenorm, residual_in_fp32, return_dropout_mask
    return _parallel(op, x0, x1, residual, (weight0, bias0), (weight1, bias1), *rest, True)


class RMSNorm(nn.Module):
    """Root mean square norm of `flash_attn.ops.rms_norm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class TritonRMSNorm(nn.Module):
    """Root mean square norm of a sum: `flash_attn.ops.triton.layer_norm.RMSNorm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_number("RMSNorm", "dropout_p", dropout_p, 0.0, below=1.0)
        self.eps, self.zero_centered_weight = eps, zero_centered_weight
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        drops = self.drop is not None and self.training
        return rms_norm_fn(
            x,
            self.weight,
            None,
            residual,
            eps=self.eps,
            dropout_p=self.drop.p if drops and self.drop is not None else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


class DropoutAddRMSNorm(nn.Module):
    """Root mean square norm of residual + dropout(x0), see :func:`dropout_add_rms_norm`."""

    _norm = staticmethod(dropout_add_rms_norm)
    _has_bias = False
    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prenorm, self.p, self.eps = prenorm, p, eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        bias = torch.zeros(hidden_size, device=device, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(bias) if self._has_bias else None)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Normed:
        return self._norm(
            x0,
            residual,
            self.weight,
            self.bias,
            self.p if self.training else 0.0,
            self.eps,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
        )


class DropoutAddLayerNorm(DropoutAddRMSNorm):
    """Layer norm of residual + dropout(x0), see :func:`dropout_add_layer_norm`."""

    _norm = staticmethod(dropout_add_layer_norm)
    _has_bias = True


def _alone(
    op: str,
    x: Tensor,
    weights: tuple[Tensor, Tensor | None],
    eps: float,
    *,
    is_rms_norm: bool,
) -> Tensor:
    none = None, None
    y = norm_fn(
        op, x, weights, None, None, none, eps, 0.0, None, False, False, is_rms_norm=is_rms_norm
    )
    assert isinstance(y, Tensor)
    return y


def _summed(
    op: str,
    x0: Tensor,
    residual: Tensor | None,
    weights: tuple[Tensor, Tensor | None],
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None,
    layerscale: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
    *,
    is_rms_norm: bool,
) -> Any:
    if layerscale is not None:
        x0 = x0 * layerscale.to(x0.dtype)
    rest = epsilon, dropout_p, rowscale, prenorm, residual_in_fp32
    return norm_fn(
        op,
        x0,
        weights,
        residual,
        None,
        (None, None),
        *rest,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=return_dropout_mask,
    )


def _parallel(
    op: str,
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weights0: tuple[Tensor, Tensor | None],
    weights1: tuple[Tensor | None, Tensor | None],
    dropout_p: float,
    epsilon: float,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
    is_rms_norm: bool,
) -> tuple[Tensor | None, ...]:
    found = norm_fn(
        *(op, x0, weights0, residual, x1, weights1, epsilon, dropout_p, None, prenorm),
        residual_in_fp32,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=return_dropout_mask,
    )
    results = found if isinstance(found, tuple) else (found,)
    return results if weights1[0] is not None else (results[0], None, *results[1:])
