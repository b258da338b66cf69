"""Forwards for transformers' layers, computed by this package's kernels.

Each expects a module with transformers' parameter names. `patch` chooses among NORMS and MLPS by
probing, `kernel_mapping` by layer name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from omniattn import functional
from omniattn.hf.patching.experts import experts_forward

__all__ = [
    "MLPS",
    "NORMS",
    "WIDENING_NORMS",
    "eps",
    "glu_mlp",
    "gpt_oss_moe",
    "layer_norm",
    "linear",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_gemma",
    "rms_norm_llama",
    "rms_norm_once",
    "rms_norm_t5",
    "softmax_top_k",
]


def linear(self: Any, x: Tensor) -> Tensor:
    return functional.linear(x, self.weight, self.bias)


def eps(module: Any) -> float:
    """Returns the eps of a norm, or NaN if it has none."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(getattr(module, name, None), float):
            return float(getattr(module, name))
    return math.nan


def rms_norm(self: Any, x: Tensor) -> Any:
    return functional.rms_norm(x, self.weight, eps=eps(self))


def rms_norm_llama(self: Any, hidden_states: Tensor) -> Any:
    """Rounds rows to their own dtype, then multiplies by the weight, possibly of a wider dtype."""
    if hidden_states.dtype != self.weight.dtype:
        return self.weight * functional.rms_norm(hidden_states, eps=eps(self))
    return functional.rms_norm(hidden_states, self.weight, eps=eps(self), casting="llama")


def rms_norm_t5(self: Any, hidden_states: Tensor) -> Any:
    """Rounds rows to the weight's dtype before multiplying by the weight."""
    x = hidden_states.to(self.weight.dtype)
    return functional.rms_norm(x, self.weight, eps=eps(self), casting="llama")


def rms_norm_once(self: Any, x: Tensor) -> Any:
    """Rounds rows once, at the end, even if their dtype is narrower than the weight's."""
    return functional.rms_norm(x.to(self.weight.dtype), self.weight, eps=eps(self)).to(x.dtype)


def rms_norm_gemma(self: Any, x: Tensor) -> Any:
    wide = x.to(self.weight.dtype)
    return functional.rms_norm(wide, self.weight, eps=eps(self), offset=1.0).to(x.dtype)


def layer_norm(self: Any, x: Tensor) -> Any:
    return functional.layer_norm(x, self.weight, getattr(self, "bias", None), eps=eps(self))


#: Norms that accept a weight of a wider dtype than x, as under autocast, without casting it to x's.
WIDENING_NORMS = (rms_norm_llama, rms_norm_t5, rms_norm_once, rms_norm_gemma)
NORMS = (rms_norm, rms_norm_llama, rms_norm_t5, rms_norm_gemma, layer_norm)


def _mlp(self: Any, x: Tensor, glu: Callable[..., Tensor]) -> Any:
    """Computes a gated MLP whose projections have one of three sets of names."""
    if hasattr(self, "gate_proj"):
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x)))
    if hasattr(self, "gate_up_proj"):
        return self.down_proj(glu(self.gate_up_proj(x)))
    hidden = self.dropout(glu(self.wi_0(x), self.wi_1(x)))
    weight = self.wo.weight  # may be fp32 in T5; a method or int8 when quantised
    if isinstance(weight, Tensor) and weight.is_floating_point():
        hidden = hidden.to(weight.dtype)
    return self.wo(hidden)


def swiglu_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functional.swiglu)


def geglu_tanh_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functools.partial(functional.geglu, approximate="tanh"))


def geglu_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functional.geglu)


def reglu_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functional.reglu)


MLPS = (swiglu_mlp, geglu_tanh_mlp, geglu_mlp, reglu_mlp)


def rms_norm_gated(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """Computes a norm gated by SiLU, rounded as in Qwen3-Next, or by sigmoid (Kimi Linear)."""
    return functional.rms_norm_gated(
        hidden_states,
        gate,
        self.weight,
        eps=eps(self),
        activation=self.activation,
        casting="fp32" if self.activation == "sigmoid" else "llama",
    )


def glu_mlp(self: Any, x: Tensor) -> Any:
    """Computes Llama's MLP in one op; calls the projections if they are not plain linears."""
    projections = (self.gate_proj, self.up_proj, self.down_proj)
    if not all(map(_is_plain, projections)):
        return swiglu_mlp(self, x)
    return functional.glu_mlp(
        x,
        self.gate_proj.weight,
        self.up_proj.weight,
        self.down_proj.weight,
        gate_bias=self.gate_proj.bias,
        up_bias=self.up_proj.bias,
        down_bias=self.down_proj.bias,
    )


def _is_plain(linear: nn.Module) -> bool:
    """Returns True if a linear is determined by its weight and bias.

    Adapters (PEFT), hooks, and quantised or sharded weights need a call of the layer.
    """
    return (
        type(linear) is nn.Linear
        and "forward" not in linear.__dict__
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        and not linear._backward_hooks
        and not linear._backward_pre_hooks
        and not hasattr(type(linear.weight), "__tensor_flatten__")
    )


def gpt_oss_moe(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Computes gpt-oss's router and experts: (B, T, d) -> (B, T, d) and router weights (B T, k).

    The experts have biases, interleaved weights and a clamped activation.
    """
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights, index = self.router(flat)
    y = experts_forward(self.experts, flat, index, weights)
    return y.view(hidden_states.shape), weights


def softmax_top_k(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a softmax router with renormalised top-k weights: (..., d) -> logits (N, E), weights
    and experts (N, k). Ties go to the lower expert index."""
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = nn.functional.linear(flat, self.weight)
    routing = functional.softmax_top_k(logits, self.top_k, renormalize=True)
    return logits, routing.weights.to(logits.dtype), routing.experts
