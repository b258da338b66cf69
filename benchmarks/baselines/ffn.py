"""Baselines of activations, feed-forward layers and the linear layer in torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines._common import Function, compiled, lacks


def gated(activation: Function) -> dict[str, Function]:
    def glu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Any:
        if up is None:
            gate, up = gate.chunk(2, -1)
        act = (
            activation(gate, approximate=approximate) if activation is F.gelu else activation(gate)
        )
        return act * up

    return {"aten": glu, "compiled": compiled(glu)}


def clamped_swiglu(
    gate: Tensor, up: Tensor | None = None, *, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    """Computes the activation of transformers' GptOssExperts."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def activation_of(name: str) -> Function:
    table: dict[str, Function] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "sigmoid": torch.sigmoid,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu_squared": lambda x: F.relu(x).square(),
    }
    return table[name]


def glu_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    recompute: bool = False,
    **options: Any,
) -> Tensor:
    lacks(seeded_dropout=dropout_p, recompute=recompute, **options)
    gate = activation_of(activation)(F.linear(x, gate_weight, gate_bias))
    return F.linear(gate * F.linear(x, up_weight, up_bias), down_weight, down_bias)


def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    lacks(seeded_dropout=dropout_p, recompute=recompute)
    return F.linear(
        activation_of(activation)(F.linear(x, up_weight, up_bias)), down_weight, down_bias
    )


BASELINES = {
    "swiglu": gated(F.silu),
    "geglu": gated(F.gelu),
    "reglu": gated(F.relu),
    "glu": gated(torch.sigmoid),
    "bilinear": gated(lambda gate: gate),
    "clamped_swiglu": {"aten": clamped_swiglu, "compiled": compiled(clamped_swiglu)},
    "glu_mlp": {"aten": glu_mlp, "compiled": compiled(glu_mlp)},
    "mlp": {"aten": mlp, "compiled": compiled(mlp)},
    "linear": {"aten": F.linear},
}
