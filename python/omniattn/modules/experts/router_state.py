"""Statistics of a router in the last forward of a mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling


class RouterState(NamedTuple):
    """Statistics of the router of a :class:`omniattn.modules.MoE` in the last forward.

    A forward that activation checkpointing repeats in the backward does not count.

    Attributes:
        experts: (..., k) int64, as executed: -1 where an assignment was dropped or masked.
        counts: (E,) int64, assignments before any was dropped.
        dropped: () int64, assignments over capacity.
        entropy: () of the mean scores of the real tokens in nats: log E where the load is even, 0
            for no tokens. Detached.
        balance_loss: () with its coefficient and gradient, 0 without one and in inference: in eval
            under no_grad.
        z_loss: the same of the z-loss.
    """

    experts: Tensor
    counts: Tensor
    dropped: Tensor
    entropy: Tensor
    balance_loss: Tensor
    z_loss: Tensor


def load_entropy(scores: Tensor, token_mask: Tensor | None) -> Tensor:
    """Entropy () of the mean scores (..., T, E) of the real tokens."""
    if token_mask is not None:
        scores = scores.masked_fill(~token_mask[..., None], 0.0)
    total = scores.flatten(0, -2).sum(0)
    share = total / total.sum().clamp(min=torch.finfo(total.dtype).tiny)
    return torch.special.entr(share).sum()


def in_backward() -> bool:
    """Whether a backward is running, so that a forward is one that checkpointing repeats."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1
