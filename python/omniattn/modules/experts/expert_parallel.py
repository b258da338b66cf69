"""Expert parallelism over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from omniattn import functional
from omniattn.checks.arguments import require_bool
from omniattn.functional.routing import Routing
from omniattn.modules.experts.experts import DefaultVectors, Experts

__all__ = ["ExpertParallel", "SplitExperts"]


class ExpertsOverRanks(DefaultVectors):
    """Sends rows to the ranks of their experts, and the results back.

    Attributes:
        group: process group, None for the default group.
        local: number of experts of a rank.
        own: the experts of this rank.
        overlap: True to send the rows of half of the tokens while experts compute the other half.
    """

    overlap: bool = False
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
        places = self._places(chosen, k)
        sent = torch.stack(
            [
                functional.expert_counts(chosen[rows], self.config.experts).view(-1, self.local)
                for rows in places
            ],
            1,
        )
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)

        x_rows = x.reshape(-1, x.shape[-1])
        weights = routing.weights.masked_fill(routing.experts < 0, 0.0)
        arriving = []
        for n, rows in enumerate(places):
            tokens = x_rows[rows // max(k, 1)]
            if self.config.weigh_inputs:
                tokens = (tokens * weights.reshape(-1, 1)[rows]).to(x.dtype)
            if torch.is_grad_enabled() and not tokens.requires_grad:
                tokens.requires_grad_()  # every rank must join the backward's collectives
            splits = sent[:, n].sum(1).tolist(), received[:, n].sum(1).tolist()
            arriving.append(self._message(tokens, *splits))
        if self.config.weigh_inputs:
            weights = torch.ones_like(weights)
        results, numbers, returning = [], [], []
        for n, message in enumerate(arriving):
            # Received rows are sorted by sending rank, then by local expert.
            expert = torch.arange(self.local, device=x.device).repeat(len(received))
            expert = expert.repeat_interleave(received[:, n].flatten())[:, None]
            one = torch.ones_like(expert, dtype=routing.weights.dtype)
            results.append(self.compute(message.wait(), Routing(expert, one, one)))
            numbers.append(expert)
            returning.append(self._message(results[-1], message.received, message.sent))
        back = _joined([message.wait() for message in returning])

        slots = back.new_zeros(chosen.numel(), x.shape[-1], dtype=routing.weights.dtype)
        slots = slots.index_copy(0, _joined(places), back.to(slots.dtype))
        weighted = slots.view(*routing.experts.shape, x.shape[-1]) * weights[..., None]
        y = weighted.sum(-2).to(back.dtype)
        # The results are the local experts' outputs for the tokens of all ranks.
        return self.reach_others(y, routing, _joined(results)[:, None], _joined(numbers))

    def _places(self, chosen: Tensor, k: int) -> list[Tensor]:
        """Returns the slots of all tokens, or those of both halves of them, sorted by expert and
        hence by rank, without slots that have no expert."""
        middle = k * (len(chosen) // max(k, 1) // 2)
        bounds = [(0, middle), (middle, len(chosen))] if self.overlap else [(0, len(chosen))]
        found = []
        for start, end in bounds:
            part = chosen[start:end]
            rows = part.masked_fill(part < 0, self.config.experts).sort(stable=True).indices
            found.append(start + rows[: int((part >= 0).sum())])
        return found

    def _message(self, rows: Tensor, sent: list[int], received: list[int]) -> _Message:
        kind = _Overlapped if self.overlap else _Message
        return kind(rows, sent, received, self.group)

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
        overlap: True to exchange the rows of half of the tokens while the experts compute those of
            the other half, in forward and backward. Outputs are the same; gradients of weights
            are sums of both halves. Second derivatives raise an error.

    Shape:
        x (..., dim), Routing of (..., k) over all E experts -> (..., dim). Ranks can have different
        numbers of tokens, or none.

    Reference:
        Lepikhin et al., "GShard", 2020, arXiv 2006.16668.
    """

    def __init__(
        self,
        experts: Experts,
        group: dist.ProcessGroup | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        super().__init__()
        require_bool("ExpertParallel", "overlap", overlap)
        self.overlap = overlap
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


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Message:
    """Rows that go to the other ranks, `sent[r]` to rank r, and those that come from them."""

    def __init__(
        self,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.sent, self.received, self.group = sent, received, group
        self.rows = self.exchange(rows)

    def exchange(self, rows: Tensor) -> Tensor:
        arrived: Tensor = AllToAll.apply(rows, self.sent, self.received, self.group)
        return arrived

    def wait(self) -> Tensor:
        """Returns the rows that arrived."""
        return self.rows


class _Overlapped(_Message):
    """Message that is on its way until `wait`; in the backward, from the gradient of `wait` until
    that of its start."""

    def exchange(self, rows: Tensor) -> Tensor:
        arriving: Tensor = _Start.apply(rows, self)
        return arriving

    def wait(self) -> Tensor:
        arrived: Tensor = _Wait.apply(self.rows, self)
        del self.rows
        return arrived

    def start(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        rows = rows.contiguous()
        arriving = rows.new_empty(sum(received), rows.shape[1])
        options: Any = {"group": self.group, "async_op": True}
        work = dist.all_to_all_single(arriving, rows, received, sent, **options)
        self.pending = work, rows, arriving  # rows must live until they are sent
        return arriving

    def finish(self) -> Tensor:
        work, _, arrived = self.pending
        work.wait()
        del self.pending
        return arrived


class _Start(torch.autograd.Function):
    """Starts to exchange rows; its backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, message: _Overlapped) -> Tensor:
        ctx.message = message
        return message.start(rows, message.sent, message.received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.message.finish(), None


class _Wait(torch.autograd.Function):
    """Waits for rows; its backward starts to send their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, message: _Overlapped) -> Tensor:
        ctx.message, ctx.shape = message, rows.shape
        message.finish()
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        message = ctx.message
        message.start(grads[0], message.received, message.sent)
        # `_Start` takes the gradients from the message, when they have arrived.
        return grads[0].new_zeros(()).expand(ctx.shape), None


class AllToAll(torch.autograd.Function):
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
        return AllToAll.apply(grads[0], received, sent, ctx.group), None, None, None
