"""Router statistics of the last forward of a mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling


class RouterState(NamedTuple):
    """Router statistics of the last forward of a :class:`omniattn.modules.MoE`.

    Recomputations by activation checkpointing do not change them.

    Attributes:
        experts: (..., k) int64, executed assignments; -1 for dropped and masked ones.
        counts: (E,) int64, number of assignments per expert before any are dropped.
        dropped: () int64, number of assignments over capacity.
        entropy: () entropy in nats of the real tokens' mean scores, detached: log E for an even
            load, 0 without tokens.
        balance_loss: () balance loss times its coefficient, differentiable; 0 without a coefficient
            and in inference (eval mode under no_grad).
        z_loss: () z-loss times its coefficient, likewise.
    """

    experts: Tensor
    counts: Tensor
    dropped: Tensor
    entropy: Tensor
    balance_loss: Tensor
    z_loss: Tensor


def load_entropy(scores: Tensor, token_mask: Tensor | None) -> Tensor:
    """Computes the entropy () of the mean scores (..., T, E) of the real tokens."""
    if token_mask is not None:
        scores = scores.masked_fill(~token_mask[..., None], 0.0)
    total = scores.flatten(0, -2).sum(0)
    share = total / total.sum().clamp(min=torch.finfo(total.dtype).tiny)
    return torch.special.entr(share).sum()


def in_backward() -> bool:
    """Returns True during a backward pass, when a forward is a recomputation by checkpointing."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1
