"""Capacity: how many assignments an expert accepts, and which are dropped."""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    require_float,
    require_int,
    require_integers,
    require_number,
    require_seed,
    require_shape,
)
from omniattn.functional.layers.random import uniform_like
from omniattn.functional.routing._checks import require_integers_on
from omniattn.functional.routing.routing import Routing, require_routing


@overload
def expert_capacity(tokens: int, experts: int, k: int, factor: float, least: int = ...) -> int: ...
@overload
def expert_capacity(
    tokens: Tensor, experts: int, k: int, factor: float, least: int = ...
) -> Tensor: ...
def expert_capacity(
    tokens: int | Tensor, experts: int, k: int, factor: float, least: int = 1
) -> int | Tensor:
    """Returns the slots per expert: ``ceil(factor k tokens / experts)``, in [`least`, `tokens`].

    `tokens` may be an integer tensor, for several groups or to avoid a device synchronisation; the
    result is then an int64 tensor.

    Example:
        >>> expert_capacity(100, 8, 2, 1.25)
        32
    """
    op = "expert_capacity"
    require_int(op, "experts", experts, 1)
    require_int(op, "k", k, 1)
    require_number(op, "factor", factor, 0)
    require_int(op, "least", least, 0)
    if isinstance(tokens, Tensor):
        require_integers(op, "tokens", tokens)
        share = min(factor * k, experts)
        slots = (share * tokens.double() / experts).ceil().clamp(min=least)
        return slots.minimum(tokens.double()).long()
    require_int(op, "tokens", tokens, 0)
    if factor * k >= experts:
        return tokens
    return min(tokens, max(least, math.ceil(factor * k * tokens / experts)))


def drop_over_capacity(
    routing: Routing, capacity: int | Tensor, *, priority: Tensor | None = None
) -> tuple[Routing, Tensor]:
    """Drops assignments beyond the capacity of their expert; other weights do not change.

    Args:
        routing: of (..., n, k); each leading element (a sequence) has its own capacity.
        capacity: >= 0, assignments that an expert accepts per group of n tokens, or an integer
            tensor (...) with one per group. All first choices come before all second choices, and
            earlier tokens before later ones.
        priority: (..., n): tokens with larger values come first instead (V-MoE: the largest
            probability); ties are in order of tokens.

    Returns:
        The routing with index -1 and weight 0 for dropped assignments, and their number, () int64.

    Raises:
        TypeError: a capacity that is not integers.
        ValueError: a negative capacity, a capacity or priority of another shape.

    Reference:
        Lepikhin et al., GShard, 2020, arXiv:2006.16668; Riquelme et al., Scaling Vision with Sparse
        Mixture of Experts, 2021, arXiv:2106.05974.

    Example:
        >>> from omniattn.functional import softmax_top_k
        >>> routing = softmax_top_k(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), 1)
        >>> drop_over_capacity(routing, 1)[0].experts.flatten()
        tensor([ 0, -1,  1])
    """
    op = "drop_over_capacity"
    require_routing(op, routing)
    if routing.experts.dim() < 2:
        raise ValueError(
            f"{op}: routing must have experts (..., n, k), "
            f"got experts.shape={tuple(routing.experts.shape)}"
        )
    *leading, n, k = routing.experts.shape
    experts = routing.scores.shape[-1]
    groups = math.prod(leading)
    limit = capacity
    if isinstance(capacity, Tensor):
        require_integers_on(op, "capacity", capacity, routing.experts, "routing.experts")
        require_shape(op, "capacity", capacity, tuple(leading))
        limit = capacity.reshape(groups, 1)
    else:
        require_int(op, "capacity", capacity, 0)
    index = routing.experts.reshape(groups, n, k)
    if priority is None:
        order = torch.arange(n, device=index.device).expand(groups, n)
    else:
        require_float(op, "priority", priority)
        require_shape(op, "priority", priority, (*leading, n))
        order = priority.reshape(groups, n).argsort(dim=-1, descending=True, stable=True)
    # In order of priority; a stable sort by expert then gives each assignment its rank.
    by_priority = index.gather(1, order[..., None].expand(-1, -1, k)).mT.reshape(groups, k * n)
    bins = by_priority.masked_fill(by_priority < 0, experts)
    sorted_bins, places = bins.sort(dim=-1, stable=True)
    first = torch.searchsorted(sorted_bins, sorted_bins)
    rank = torch.arange(k * n, device=index.device) - first
    over = torch.zeros_like(bins, dtype=torch.bool).scatter(1, places, rank >= limit)
    over = torch.zeros_like(index, dtype=torch.bool).scatter(
        1, order[..., None].expand(-1, -1, k), over.view(groups, k, n).mT
    )
    over = (over & (index >= 0)).view(routing.experts.shape)
    kept = routing._replace(
        experts=routing.experts.masked_fill(over, -1),
        weights=routing.weights.masked_fill(over, 0.0),
    )
    return kept, over.sum()


def drop_second_at_random(routing: Routing, seed: Tensor) -> Routing:
    """Keeps the second choice with probability 2 w_2, as in GShard; training only.

    Args:
        routing: of (..., 2).
        seed: [seed, offset] (2,) int64 of the Philox noise.

    Returns:
        The routing with index -1 and weight 0 for dropped assignments.

    Raises:
        ValueError: a routing of k != 2.

    Reference:
        Lepikhin et al., GShard, 2020, arXiv:2006.16668.

    Example:
        >>> from omniattn.functional import softmax_top_k
        >>> routing = softmax_top_k(torch.tensor([[0.0, 0.0]]), 2)
        >>> drop_second_at_random(routing, torch.tensor([1, 0])).experts
        tensor([[0, 1]])
    """
    op = "drop_second_at_random"
    require_routing(op, routing)
    if routing.experts.shape[-1] != 2:
        raise ValueError(f"{op}: routing must have k = 2, got k={routing.experts.shape[-1]}")
    second = routing.weights[..., 1]
    seed = require_seed(op, seed, second)
    u = uniform_like(second, seed=seed)
    dropped = torch.stack([torch.zeros_like(u, dtype=torch.bool), u >= 2 * second.detach()], -1)
    return routing._replace(
        experts=routing.experts.masked_fill(dropped, -1),
        weights=routing.weights.masked_fill(dropped, 0.0),
    )
