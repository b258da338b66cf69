"""Mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): experts applied to routed tokens."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from omniattn.reference.empty import nothing_of
from omniattn.reference.layers.activation import clamped_swiglu
from omniattn.reference.precision import widen
from omniattn.reference.values import require_values
from omniattn.reference.vmap import require_not_mapped

_GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "reglu": F.relu,
    "bilinear": lambda x: x,
}
_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def _hidden(
    pre: torch.Tensor, activation: str, interleaved: bool, alpha: float, limit: float
) -> torch.Tensor:
    if activation in _PLAIN:
        return _PLAIN[activation](pre)
    gate, up = (pre[..., ::2], pre[..., 1::2]) if interleaved else pre.chunk(2, -1)
    if activation == "clamped_swiglu":
        return clamped_swiglu(gate, up, alpha=alpha, limit=limit)
    return _GATED[activation](gate) * up


def moe_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    weigh_inputs: bool = False,
    recompute: bool = False,
) -> torch.Tensor:
    """y = sum_s weights[..., s] * expert_{index[..., s]}(x); index -1 adds nothing.

    x (..., d), index and weights (..., k), down (E, d, F). up is (E, 2F, d) with the gate in the
    first F rows, or in the even rows if `interleaved`; (E, F, d) for activations without a gate.
    With `weigh_inputs` the weights multiply x instead of the experts' outputs.
    """
    require_not_mapped("moe_experts", "index", index)
    outside = (index < -1) | (index >= up.shape[0])
    error = f"moe_experts: index must be in [0, {up.shape[0]}) or -1 for none"
    if torch.compiler.is_compiling():
        require_values(error, ~outside)
    elif outside.any():
        raise RuntimeError(f"{error}, got index={int(index[outside][0])}")
    y = experts_in_dtype(
        widen(x),
        index,
        widen(weights),
        widen(up),
        widen(down),
        up_bias=None if up_bias is None else widen(up_bias),
        down_bias=None if down_bias is None else widen(down_bias),
        activation=activation,
        interleaved=interleaved,
        alpha=alpha,
        limit=limit,
        weigh_inputs=weigh_inputs,
    )
    return y.to(x.dtype)


def experts_in_dtype(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    weigh_inputs: bool = False,
    recompute: bool = False,
) -> torch.Tensor:
    """Computes `moe_experts` with every step in x's dtype."""
    *leading, dim = x.shape
    tokens, k = math.prod(leading), index.shape[-1]
    flat, chosen = x.reshape(tokens, dim), index.reshape(tokens, k)
    biases = (bias for bias in (up_bias, down_bias) if bias is not None)
    slots = flat.new_zeros(tokens, k, dim) + nothing_of(x, weights, up, down, *biases)
    factors = weights.to(slots.dtype).reshape(tokens, k).masked_fill(chosen < 0, 0.0)[..., None]
    for e in range(up.shape[0]):
        token, slot = torch.where(chosen == e)
        rows = flat[token] * factors[token, slot] if weigh_inputs else flat[token]
        pre = F.linear(rows, up[e], None if up_bias is None else up_bias[e])
        hidden = _hidden(pre, activation, interleaved, alpha, limit)
        rows = F.linear(hidden, down[e], None if down_bias is None else down_bias[e])
        slots = slots.index_put((token, slot), rows.to(slots.dtype))  # autocast yields half dtypes
    return (slots if weigh_inputs else factors * slots).sum(1).reshape(x.shape)
