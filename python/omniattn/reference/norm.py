"""RMSNorm and LayerNorm over the last dimension or groups of it.

With `residual`, h = x + residual is rounded to the residual's dtype, the statistics use the rounded
value and (norm(h), h) is returned, so that the fused form equals the unfused one.
"""

import torch

from omniattn.reference.activation import ACTIVATIONS
from omniattn.reference.precision import widen


def _add(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return x if residual is None else (widen(x) + widen(residual)).to(residual.dtype)


def _cast(y: torch.Tensor, dtype: torch.dtype, casting: str) -> torch.Tensor:
    return widen(y.to(dtype)) if casting == "llama" else y


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

    The "llama" casting rounds what is normalised to the dtype before the weight multiplies it.
    """
    h = _add(x, residual)
    hw = widen(h)
    y = _cast(hw * torch.rsqrt(hw.square().mean(-1, keepdim=True) + eps), x.dtype, casting)
    if weight is not None:
        y = y * (offset + widen(weight))
    y = y.to(x.dtype)
    return y if residual is None else (y, h)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = (h - mean) weight / sqrt(var + eps) + bias, x (..., N), weight and bias (N,)."""
    h = _add(x, residual)
    hw = widen(h)
    centred = hw - hw.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * widen(weight)
    if bias is not None:
        y = y + widen(bias)
    y = y.to(x.dtype)
    return y if residual is None else (y, h)


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    center: bool = True,
) -> torch.Tensor:
    """Each of `num_groups` parts (heads) of x (..., N) normalised alone, then weight and bias (N,).

    LayerNorm of the parts, or RMSNorm without `center`.
    """
    parts = widen(x).unflatten(-1, (num_groups, x.shape[-1] // num_groups))
    if center:
        parts = parts - parts.mean(-1, keepdim=True)
    y = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        y = y * widen(weight)
    if bias is not None:
        y = y + widen(bias)
    return y.to(x.dtype)


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
    """RMSNorm(x) weight act(gate), or RMSNorm(x act(gate)) weight; over each of `num_groups` parts
    of x, gate (..., N). The "llama" casting rounds what is normalised, and what the gate then
    multiplies, to the dtype."""
    factor = ACTIVATIONS[activation](widen(gate))
    y = widen(x) if norm_before_gate else widen(x) * factor
    y = _cast(group_norm(y, num_groups, eps=eps, center=False), x.dtype, casting)
    if weight is not None:
        y = y * widen(weight)
    if norm_before_gate:
        y = _cast(y, x.dtype, casting) * factor
    return y.to(x.dtype)
