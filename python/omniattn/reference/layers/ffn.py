"""Feed-forward layers (Vaswani et al. 2017, arXiv 1706.03762; Shazeer 2020, arXiv 2002.05202)."""

import torch

from omniattn.reference.layers.activation import activate, clamped_swiglu, gated_activation
from omniattn.reference.layers.gemm import linear
from omniattn.reference.layers.random import dropout


def mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """y = dropout(act(x W_up^T + b_up)) W_down^T + b_down; x (..., d), W_up (F, d)."""
    hidden = activate(linear(x, up_weight, up_bias), activation)
    return linear(dropout(hidden, dropout_p, seed=seed), down_weight, down_bias)


def glu_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """y = dropout(act(x W_gate^T) * x W_up^T) W_down^T, with biases; x (..., d), W_up (F, d).

    "clamped_swiglu" takes alpha and limit, and is a function of both projections.
    """
    gate, up = linear(x, gate_weight, gate_bias), linear(x, up_weight, up_bias)
    if activation == "clamped_swiglu":
        hidden = clamped_swiglu(gate, up, alpha=alpha, limit=limit)
    else:
        hidden = gated_activation(gate, up, activation)
    return linear(dropout(hidden, dropout_p, seed=seed), down_weight, down_bias)
