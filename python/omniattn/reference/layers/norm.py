"""RMSNorm and LayerNorm over the last dimension or groups of it.

With `residual`, h = x + residual is rounded to the residual's dtype, statistics are taken from the
rounded h, and (norm(h), h) is returned. So the fused form equals the unfused one.
"""

import torch

from omniattn.reference.layers.activation import ACTIVATIONS
from omniattn.reference.precision import widen


def _add(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return x if residual is None else (widen(x) + widen(residual)).to(residual.dtype)


def _cast(y: torch.Tensor, dtype: torch.dtype, cast_first: bool) -> torch.Tensor:
    return widen(y.to(dtype)) if cast_first else y


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    center: bool,
    eps: float,
    offset: float,
    cast_first: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = (h - mean) (offset + weight) / sqrt(mean((h - mean)^2) + eps) + bias.

    x (..., N), weight and bias (N,). Without `center` the mean is taken as 0. With `cast_first` the
    normalised value is rounded to x's dtype before the multiplication by the weight.
    """
    h = _add(x, residual)
    hw = widen(h)
    if center:
        hw = hw - hw.mean(-1, keepdim=True)
    y = _cast(hw * torch.rsqrt(hw.square().mean(-1, keepdim=True) + eps), x.dtype, cast_first)
    if weight is not None:
        y = y * (offset + widen(weight))
    if bias is not None:
        y = y + widen(bias)
    y = y.to(x.dtype)
    return y if residual is None else (y, h)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = h (offset + weight) / sqrt(mean(h^2) + eps), x (..., N), weight (N,).

    Casting "llama" rounds the normalised value to x's dtype before the multiplication by the
    weight.
    """
    return norm(x, residual, weight, None, False, eps, offset, casting == "llama")


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = (h - mean) weight / sqrt(var + eps) + bias, x (..., N), weight and bias (N,)."""
    return norm(x, residual, weight, bias, True, eps, 0.0, False)


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    place: str,
    activation: str,
    center: bool,
    eps: float,
    cast_first: bool,
) -> torch.Tensor:
    """Normalises each of `num_groups` groups (heads) of x (..., N), then applies weight and bias.

    weight and bias are (N,). A gate multiplies by act(gate), "before" or "after" this. With
    `cast_first` the normalised value is rounded to x's dtype, and again before a gate "after".
    """
    y = widen(x)
    factor = None if gate is None else ACTIVATIONS[activation](widen(gate))
    if factor is not None and place == "before":
        y = y * factor
    parts = y.unflatten(-1, (num_groups, x.shape[-1] // num_groups))
    if center:
        parts = parts - parts.mean(-1, keepdim=True)
    y = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    y = _cast(y, x.dtype, cast_first)
    if weight is not None:
        y = y * widen(weight)
    if bias is not None:
        y = y + widen(bias)
    if factor is not None and place == "after":
        y = _cast(y, x.dtype, cast_first) * factor
    return y.to(x.dtype)


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    center: bool = True,
) -> torch.Tensor:
    """Normalises each of `num_groups` groups (heads) of x (..., N), then applies weight and bias.

    weight and bias are (N,). Groups get LayerNorm, or RMSNorm without `center`.
    """
    return gated_norm(
        x, None, weight, bias, num_groups, "none", "identity", center, eps, cast_first=False
    )


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    activation: str = "silu",
    num_groups: int = 1,
    casting: str = "fp32",
) -> torch.Tensor:
    """RMSNorm(x) weight act(gate), or RMSNorm(x act(gate)) weight; x, gate (..., N).

    Each of `num_groups` groups is normalised separately. Casting "llama" rounds the normalised
    value to x's dtype, and again before a later gate.
    """
    place, cast_first = "after" if norm_before_gate else "before", casting == "llama"
    return gated_norm(x, gate, weight, None, num_groups, place, activation, False, eps, cast_first)
