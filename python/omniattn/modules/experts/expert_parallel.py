"""Expert parallelism over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omniattn import functional
from omniattn.functional.routing import Routing
from omniattn.modules.experts.experts import DefaultVectors, Experts

__all__ = ["ExpertParallel", "SplitExperts"]


class ExpertsOverRanks(DefaultVectors):
    """Sends rows to the ranks of their experts, and the results back.

    Attributes:
        group: process group, None for the default group.
        local: number of experts of a rank.
        own: the experts of this rank.
    """

    group: dist.ProcessGroup | None
    local: int

    def divide(self, group: dist.ProcessGroup | None) -> None:
        """Gives this rank its experts.

        Raises:
            ValueError: the number of experts is not a multiple of the number of ranks.
        """
        self.group = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if self.config.experts % ranks != 0:
            raise ValueError(
                "ExpertParallel: experts must be a multiple of the ranks, "
                f"got experts={self.config.experts}, ranks={ranks}"
            )
        self.local = self.config.experts // ranks
        self.own = slice(rank * self.local, (rank + 1) * self.local)

    def compute(self, rows: Tensor, routing: Routing) -> Tensor:
        """Returns what this rank's experts, numbered from 0, make of the rows (N, dim)."""
        raise NotImplementedError

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Computes the weighted sum of the chosen experts of all ranks."""
        k = routing.experts.shape[-1]
        chosen = routing.experts.reshape(-1)
        outside = chosen[(chosen < -1) | (chosen >= self.config.experts)]
        if outside.numel() > 0:
            raise RuntimeError(
                f"ExpertParallel: routing.experts must be in [0, {self.config.experts}) or -1 for "
                f"none, got routing.experts={int(outside[0])}"
            )
        # Sorts rows by expert, hence by rank; omits slots without an expert.
        rows = chosen.masked_fill(chosen < 0, self.config.experts).sort(stable=True).indices
        rows = rows[: int((chosen >= 0).sum())]
        sent = functional.expert_counts(chosen, self.config.experts).view(-1, self.local)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        splits = sent.sum(1).tolist(), received.sum(1).tolist()

        tokens = x.reshape(-1, x.shape[-1])[rows // max(k, 1)]
        weights = routing.weights.masked_fill(routing.experts < 0, 0.0)
        if self.config.weigh_inputs:
            tokens = (tokens * weights.reshape(-1, 1)[rows]).to(x.dtype)
            weights = torch.ones_like(weights)
        if torch.is_grad_enabled() and not tokens.requires_grad:
            tokens.requires_grad_()  # every rank must join the backward's collectives
        arrived = _AllToAll.apply(tokens, *splits, self.group)
        # Received rows are sorted by sending rank, then by local expert.
        expert = torch.arange(self.local, device=x.device).repeat(len(received))
        expert = expert.repeat_interleave(received.flatten())[:, None]
        one = torch.ones_like(expert, dtype=routing.weights.dtype)
        results = self.compute(arrived, Routing(expert, one, one))
        back = _AllToAll.apply(results, *reversed(splits), self.group)

        slots = back.new_zeros(chosen.numel(), x.shape[-1], dtype=routing.weights.dtype)
        slots = slots.index_copy(0, rows, back.to(slots.dtype))
        weighted = slots.view(*routing.experts.shape, x.shape[-1]) * weights[..., None]
        y = weighted.sum(-2).to(back.dtype)
        # results holds the local experts' outputs for the tokens of all ranks.
        return self.reach_others(y, routing, results[:, None], expert)

    def gather(self, vectors: Tensor, own: Tensor) -> None:
        """Gathers the vectors of all ranks."""
        dist.all_gather_into_tensor(vectors, own, group=self.group)


class ExpertParallel(ExpertsOverRanks):
    """Distributes the experts of a :class:`omniattn.modules.MoE` over ranks, E / ranks on each.

    Every rank routes its own tokens. Rows are sent to the ranks of their experts and the results
    back (two all-to-alls in the forward, two in the backward pass), where they are weighted and
    summed in the order of the slots. Outputs and gradients equal those of the single-process layer
    up to rounding: gradients of an expert's weights, and the mean that updates its default vector,
    include the tokens of all ranks. Every rank stores all default vectors. Usage:

    ``layer.experts = ExpertParallel(layer.experts, group)``

    Args:
        experts: all experts of the layer, equal on all ranks; rank r keeps E / ranks of them, from
            expert r E / ranks.
        group: process group, None for the default group. If a rank dies, the collective raises
            RuntimeError on the others after the group's timeout.

    Shape:
        x (..., dim), Routing of (..., k) over all E experts -> (..., dim). Ranks can have different
        numbers of tokens, or none.

    Reference:
        Lepikhin et al., "GShard", 2020, arXiv 2006.16668.
    """

    def __init__(self, experts: Experts, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config = experts.config
        self.divide(group)
        self.experts = experts
        for name, parameter in list(experts.named_parameters()):
            part = nn.Parameter(parameter.detach()[self.own].clone(), parameter.requires_grad)
            setattr(experts, name, part)
        self.register_buffer("default_vectors", experts.default_vectors)
        experts.default_vectors = None

    def reset_parameters(self) -> None:
        """Zeroes the default vectors; the experts reset their own parameters."""
        if self.default_vectors is not None:
            nn.init.zeros_(self.default_vectors)

    def compute(self, rows: Tensor, routing: Routing) -> Tensor:
        y: Tensor = self.experts(rows, routing)
        return y


class SplitExperts(ExpertsOverRanks, Experts):
    """Experts of `omniattn.distributed.expert_parallel`, which read parts of stacked weights."""

    def compute(self, rows: Tensor, routing: Routing) -> Tensor:
        return self._run(rows, routing.experts, routing.weights)


class _AllToAll(torch.autograd.Function):
    """Exchanges rows: sends `sent[r]` rows to rank r and receives `received[r]` rows from it."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.splits, ctx.group = (sent, received), group
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sent, received = ctx.splits
        return _AllToAll.apply(grads[0], received, sent, ctx.group), None, None, None
