"""Baselines of experts: a loop, and torch's grouped product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines._common import lacks


def swiglu_only(
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    weigh_inputs: bool = False,
    recompute: bool = False,
) -> None:
    lacks(biases=up_bias is not None, layout=interleaved, recomputation=recompute)
    lacks(weighed_inputs=weigh_inputs)
    lacks(activation=activation != "swiglu")


def experts_loop(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, **options: Any
) -> Tensor:
    """Loops over experts with tokens; gathers tokens and adds results back by index."""
    swiglu_only(**options)
    y = torch.zeros_like(x)
    for expert in index.unique().tolist():
        token, slot = torch.where(index == expert)
        gate, linear = F.linear(x[token], up[expert]).chunk(2, -1)
        out = F.linear(F.silu(gate) * linear, down[expert])
        y.index_add_(0, token, out * weights[token, slot, None])
    return y


def experts_grouped(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, **options: Any
) -> Tensor:
    """Sorts tokens by expert and uses torch's grouped product."""
    swiglu_only(**options)
    order = index.flatten().argsort(stable=True)
    ends = index.flatten().bincount(minlength=len(up)).cumsum(0).int()
    gate, linear = F.grouped_mm(x[order // index.shape[1]], up.mT, offs=ends).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * linear, down.mT, offs=ends)
    weighted = rows * weights.flatten()[order, None]
    return weighted[order.argsort()].unflatten(0, index.shape).sum(1)


BASELINES = {"moe_experts": {"loop": experts_loop, "grouped": experts_grouped}}
