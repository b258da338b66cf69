"""fla's norms and gates with a linear map after them, and its power-gated unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import require_number, require_shape
from omniattn.compat._errors import errors_of, require_real
from omniattn.compat._fla.mlp import sigmoidglu
from omniattn.compat._fla.norms import (
    FusedLayerNormGated,
    FusedRMSNormGated,
    GroupNorm,
    LayerNorm,
    RMSNorm,
    group_norm,
    layer_norm_gated,
    rms_norm_gated,
)
from omniattn.reference.precision import widen

#: y, or y and the sum of x and the residual.
Results = Tensor | tuple[Tensor, Tensor]


def _linear(op: str, normed: Any, weight: Tensor, bias: Tensor | None) -> Results:
    """Maps the normed tokens, and keeps a sum that comes with them."""
    y, *rest = normed if isinstance(normed, tuple) else (normed,)
    with errors_of(op):
        y = functional.linear(y.to(weight.dtype), weight, bias)
    return (y, *rest) if rest else y


def group_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Results:
    """Computes ``group_norm(x) linear_weight^T + linear_bias``, see :func:`group_norm`."""
    rest = residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups
    normed = group_norm(x, norm_weight, norm_bias, *rest)
    return _linear("group_norm_linear", normed, linear_weight, linear_bias)


layer_norm_linear = group_norm_linear


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Results:
    """Computes :func:`group_norm_linear` with an RMS norm of all channels."""
    given = x, norm_weight, norm_bias, linear_weight, linear_bias
    return group_norm_linear(*given, residual, eps, prenorm, residual_in_fp32, True)


def layer_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Results:
    """Computes ``(layer_norm(x) silu(g)) linear_weight^T + linear_bias``."""
    normed = layer_norm_gated(
        x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps
    )
    return _linear("layer_norm_swish_gate_linear", normed, linear_weight, linear_bias)


def rms_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Results:
    """Computes ``(rms_norm(x) silu(g)) linear_weight^T + linear_bias``."""
    normed = rms_norm_gated(
        x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps
    )
    return _linear("rms_norm_swish_gate_linear", normed, linear_weight, linear_bias)


class _Linear:
    """Forward of a norm whose tokens are mapped by a weight and a bias of the caller."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Results:
        normed = super().forward(x, residual, prenorm, residual_in_fp32)  # type: ignore[misc]
        return _linear(type(self).__name__, normed, weight, bias)


class LayerNormLinear(_Linear, LayerNorm):  # type: ignore[misc]
    """:class:`LayerNorm` of x, mapped by a weight and a bias."""


class RMSNormLinear(_Linear, RMSNorm):  # type: ignore[misc]
    """:class:`RMSNorm` of x, mapped by a weight and a bias."""


class GroupNormLinear(_Linear, GroupNorm):  # type: ignore[misc]
    """:class:`GroupNorm` of x, mapped by a weight and a bias."""


class _GatedLinear:
    def forward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Results:
        normed = super().forward(x, g, residual, prenorm, residual_in_fp32)  # type: ignore[misc]
        return _linear(type(self).__name__, normed, weight, bias)


class FusedLayerNormGatedLinear(_GatedLinear, FusedLayerNormGated):  # type: ignore[misc]
    """:class:`FusedLayerNormGated` of x and g, mapped by a weight and a bias."""


class FusedRMSNormGatedLinear(_GatedLinear, FusedRMSNormGated):  # type: ignore[misc]
    """:class:`FusedRMSNormGated` of x and g, mapped by a weight and a bias."""


FusedLayerNormSwishGateLinear = FusedLayerNormGatedLinear
FusedRMSNormSwishGateLinear = FusedRMSNormGatedLinear


def sigmoidglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``sigmoidglu(x, y) weight^T + bias``."""
    with errors_of("sigmoidglu_linear"):
        return functional.linear(sigmoidglu(x, y), weight, bias)


def powglu(x: Tensor, y: Tensor, power: float = 3.0) -> Tensor:
    """Computes ``g(x) y`` with ``g(x) = x^(power / (sqrt(x) + 1)) sigmoid(x)``, x sigmoid(x) up to
    0."""
    require_real("powglu", x=x, y=y)
    require_shape("powglu", "y", y, tuple(x.shape))
    require_number("powglu", "power", power)
    wide = widen(x)
    above = torch.where(wide > 0, wide, 1.0)
    grown = torch.where(wide > 0, above ** (power / (above.sqrt() + 1)), wide)
    return (grown * wide.sigmoid() * widen(y)).to(x.dtype)


def powglu_linear(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, power: float = 3.0
) -> Tensor:
    """Computes ``powglu(x, y, power) weight^T + bias``."""
    with errors_of("powglu_linear"):
        return functional.linear(powglu(x, y, power), weight, bias)


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """Computes GELU of y + bias in its tanh form."""
    require_real("bias_gelu", y=y, bias=bias)
    return nnf.gelu(y + bias, approximate="tanh").to(y.dtype)


def l2_warp(loss: Tensor, logits: Tensor, l2_penalty_factor: float = 1e-4) -> Tensor:
    """Returns the loss with the gradient of ``c / 2 mean(max logit^2)`` added (RWKV).

    Args:
        loss: a scalar.
        logits: (B, T, V).
        l2_penalty_factor: c.
    """
    require_real("l2_warp", loss=loss, logits=logits)
    require_number("l2_warp", "l2_penalty_factor", l2_penalty_factor)
    penalty = l2_penalty_factor / 2 * logits.amax(-1).square().mean()
    return loss + (penalty - penalty.detach()).to(loss.dtype)
