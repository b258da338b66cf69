"""transformers' experts interface implemented by `functional.moe_experts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import _default_apply_gate

from omniattn import functional

__all__ = ["experts_forward"]

#: Class of transformers' ACT2FN -> (activation of gated experts, activation without a gate).
_ACTIVATIONS = {
    "SiLUActivation": ("swiglu", "silu"),
    "SiLU": ("swiglu", "silu"),
    "GELUActivation": ("geglu", "gelu"),
    "GELU": ("geglu", "gelu"),
    "GELUTanh": ("geglu_tanh", "gelu_tanh"),
    "NewGELUActivation": ("geglu_tanh", "gelu_tanh"),
    "FastGELUActivation": ("geglu_tanh", "gelu_tanh"),
    "ReLU": ("reglu", "relu"),
}


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Computes transformers' experts, for `experts_implementation="omniattn"`.

    Supports the layouts of `use_experts_implementation`: gated and plain experts, biases,
    transposed and interleaved weights, gpt-oss's clamped activation, and the sentinel `num_experts`
    by which expert parallelism marks the slots of other ranks.

    Args:
        self: the experts module, its weights stacked (E, ...).
        hidden_states: (N, d).
        top_k_index: (N, k) int64.
        top_k_weights: (N, k).

    Returns:
        (N, d) of hidden_states' dtype.

    Raises:
        NotImplementedError: the experts have an unsupported activation or a norm after them.
    """
    if self.has_post_expert_norm:
        raise NotImplementedError(
            f"experts_forward: {type(self).__name__} has a norm after each expert; "
            'use experts_implementation="eager"'
        )
    up = self.gate_up_proj if self.has_gate else self.up_proj
    down = self.down_proj
    biased = self.has_bias
    up_bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if biased else None
    if self.is_transposed:
        up, down = up.mT, down.mT
    return functional.moe_experts(
        hidden_states,
        top_k_index.masked_fill(top_k_index >= self.num_experts, -1),
        top_k_weights,
        up,
        down,
        up_bias=up_bias,
        down_bias=self.down_proj_bias if biased else None,
        interleaved=self.has_gate and not self.is_concatenated,
        **_activation(self),
    )


def why_unsupported(experts: Any) -> str | None:
    """Returns why :func:`experts_forward` cannot replace the module's forward, or None."""
    if experts.has_post_expert_norm:
        return f"{type(experts).__name__} has a norm after each expert"
    try:
        _activation(experts)
    except NotImplementedError as error:
        return str(error)
    return None


def _activation(experts: Any) -> dict[str, Any]:
    own_gate = type(experts)._apply_gate is not _default_apply_gate
    if own_gate and _is_clamped(experts):
        return {"activation": "clamped_swiglu", "alpha": experts.alpha, "limit": experts.limit}
    name = type(getattr(experts, "act_fn", None)).__name__
    if own_gate or name not in _ACTIVATIONS:
        raise NotImplementedError(
            f"experts_forward: no kernel for the activation of {type(experts).__name__} "
            f'({"its own _apply_gate" if own_gate else name}); use experts_implementation="eager"'
        )
    return {"activation": _ACTIVATIONS[name][not experts.has_gate]}


def _is_clamped(experts: Any) -> bool:
    """Returns True if the module's gate equals gpt-oss's on a few sample values."""
    if not (hasattr(experts, "alpha") and hasattr(experts, "limit")):
        return False
    pre = torch.tensor([[0.5, -1.5, 90.0, 3.0, -3.0, 90.0, 2.0, -90.0]])
    if experts.is_concatenated:
        gate, up = pre.chunk(2, -1)
    else:
        gate, up = pre[:, ::2], pre[:, 1::2]
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    expected = gate * torch.sigmoid(experts.alpha * gate) * (up + 1)
    return bool(torch.allclose(experts._apply_gate(pre), expected))
