"""moe_experts with weights that multiply the inputs of the experts, not the outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.ops.moe import moe

__all__ = ["moe_of_weighed_inputs"]


def moe_of_weighed_inputs(x: Tensor, index: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    """Takes the arguments of the op `moe`: x (N, d), index and weights (N, k) -> (N, d).

    Each slot becomes a separate token, whose input is multiplied by the weight.
    """
    tokens, slots = index.shape
    weights = weights.masked_fill(index < 0, 0.0)[..., None]
    weighed = (x.to(weights.dtype)[:, None] * weights).to(x.dtype)
    y: Tensor = moe(
        weighed.flatten(0, 1),
        index.reshape(tokens * slots, 1),
        torch.ones_like(weights).flatten(0, 1),
        *rest,
    )
    return y.unflatten(0, (tokens, slots)).sum(1)
