"""A router's decisions, and the load of each expert."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    require_float,
    require_int,
    require_integers,
    require_shape,
    shown,
)
from omniattn.functional.routing._checks import (
    require_float_on,
    require_integers_on,
)


class Routing(NamedTuple):
    """Decisions of a router.

    Attributes:
        experts: (..., k) int64, the expert of each slot, -1 for none.
        weights: (..., k) in the compute dtype.
        scores: (..., E) in the compute dtype, softmax or sigmoid, averaged by the losses.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor


def require_routing(op: str, routing: Routing) -> None:
    if not isinstance(routing, Routing):
        raise TypeError(f"{op}: routing must be a Routing, got routing={shown(routing)}")
    experts, weights, scores = routing
    require_float(op, "routing.scores", scores)
    require_float_on(op, "routing.weights", weights, scores, "routing.scores")
    require_integers_on(op, "routing.experts", experts, scores, "routing.scores")
    require_shape(op, "routing.weights", weights, experts.shape)
    if 0 in (experts.dim(), scores.dim()) or experts.shape[:-1] != scores.shape[:-1]:
        raise ValueError(
            f"{op}: routing must have experts (..., k) and scores (..., E), got "
            f"experts.shape={tuple(experts.shape)}, scores.shape={tuple(scores.shape)}"
        )


def expert_counts(index: Tensor, experts: int) -> Tensor:
    """Counts the assignments of each expert, (E,) int64; negative indices are ignored.

    Raises:
        TypeError: an index that is not integers.
        ValueError: less than one expert.
        RuntimeError: an index of E or more.

    Example:
        >>> expert_counts(torch.tensor([[0, 2], [2, -1]]), 3)
        tensor([1, 0, 2])
    """
    require_integers("expert_counts", "index", index)
    require_int("expert_counts", "experts", experts, 1)
    return count_rows(index.reshape(1, index.numel()).long(), experts)[0]


def count_rows(index: Tensor, experts: int) -> Tensor:
    """Counts (rows, E) of index (rows, n)."""
    counts = index.new_zeros(index.shape[0], experts)
    return counts.scatter_add(1, index.clamp(min=0), (index >= 0).long())


def widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
