"""Linear layers of ternary weights and 8-bit inputs, for training."""

from __future__ import annotations

from torch import Tensor

from omniattn.checks.arguments import require_float, widen
from omniattn.checks.jagged import token_wise
from omniattn.functional.layers.gemm import linear
from omniattn.functional.layers.norm import rms_norm

__all__ = ["bit_linear"]

#: Least size by which values are divided before they are rounded.
_LEAST = 1e-5


@token_wise()
def bit_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    eps: float = 1e-8,
    backend: str | None = None,
) -> Tensor:
    """Linear layer with weights -1, 0 and 1 and inputs of 8 bits (BitNet b1.58).

    ``y = Q_x(rms_norm(x)) Q_w(weight)^T + bias`` with ``Q_x(u) = s round(u / s)``,
    ``s = max |u| / 127`` of each row, and ``Q_w(w) = m clamp(round(w / m), -1, 1)``,
    ``m = mean |w|`` of all weights.

    Args:
        x: (..., K), float64, float32, bfloat16 or float16; or jagged nested (B, j, ..., K).
        weight: (N, K) of x's dtype, the weights that training changes.
        bias: (N,) of x's dtype, or None.
        norm_weight: (K,), weight of the norm, or None for 1.
        eps: added to the mean square.
        backend: backend of the norm and the product.

    Returns:
        y (..., N) of x's dtype.

    Raises:
        TypeError: a dtype is unsupported or differs from x's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Gradients go straight through Q_x and Q_w, as if these changed nothing. The product is that
        of `linear` in x's dtype, so this is for training and for tests of quantised weights, not
        for speed.

    Reference:
        Ma et al., The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits, 2024,
        arXiv:2402.17764. Verified against `BitLinear` in `modules/fused_bitlinear.py` of
        fla-org/flash-linear-attention, commit bc3b101d, which leaves out its bias.

    Example:
        >>> bit_linear(torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5, 0.1]]))
        tensor([[0.3000]])
    """
    op = "bit_linear"
    require_float(op, "x", x)
    require_float(op, "weight", weight)
    rows = rms_norm(x, norm_weight, eps=eps, backend=backend)
    return linear(_in_8_bits(rows), _ternary(weight), bias, backend=backend)


def _in_8_bits(x: Tensor) -> Tensor:
    """Rounds each row to 255 levels, with the gradient of x."""
    if x.shape[-1] == 0:
        return x
    wide = widen(x.detach())
    step = wide.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / 127
    return _straight_through(x, step * (wide / step).round())


def _ternary(weight: Tensor) -> Tensor:
    """Rounds to -m, 0 and m, with the gradient of the weight."""
    if weight.numel() == 0:
        return weight
    wide = widen(weight.detach())
    mean = wide.abs().mean().clamp(min=_LEAST)
    return _straight_through(weight, mean * (wide / mean).round().clamp(-1, 1))


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Returns the rounded values with the gradient of x."""
    return x + (rounded.to(x.dtype) - x).detach()
