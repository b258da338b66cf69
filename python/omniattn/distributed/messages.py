"""Messages between ranks: of two ranks, around the ring, and from all to all, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omniattn.distributed.layout import Layout


class Ring:
    """Passes tensors to the next rank while this rank computes; `wait` returns what arrived."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.works: list[Any] = []
        self.sent: list[Tensor] = []
        self.arriving: list[Tensor] = []

    def start(self, *tensors: Tensor, like: Sequence[Tensor] | None = None) -> None:
        """Starts to send contiguous tensors to the next rank, and to receive from the one before.

        The tensors that arrive are like those sent, or like `like`.
        """
        layout = self.layout
        self.sent = list(tensors)
        self.arriving = [torch.empty_like(t) for t in like or tensors]
        after = layout.global_rank(layout.rank + 1)
        before = layout.global_rank(layout.rank - 1)
        calls = [dist.P2POp(dist.isend, t, after, layout.group) for t in self.sent]
        calls += [dist.P2POp(dist.irecv, t, before, layout.group) for t in self.arriving]
        self.works = dist.batch_isend_irecv(calls)

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.arriving


class Outbox:
    """Keeps tensors alive until they are sent."""

    def __init__(self) -> None:
        self.pending: list[tuple[Any, Tensor]] = []

    def send(self, layout: Layout, t: Tensor, rank: int) -> None:
        self.pending = [(work, kept) for work, kept in self.pending if not work.is_completed()]
        t = t.contiguous()
        work = dist.isend(t, layout.global_rank(rank), layout.group)
        self.pending.append((work, t))

    def flush(self) -> None:
        for work, _ in self.pending:
            work.wait()
        self.pending = []


class Prompt(Outbox):
    """Outbox without an end: returns when a tensor was taken."""

    def send(self, layout: Layout, t: Tensor, rank: int) -> None:
        super().send(layout, t, rank)
        self.flush()


def receive(layout: Layout, t: Tensor, rank: int) -> Tensor:
    """Fills t with what a rank sends."""
    dist.recv(t, layout.global_rank(rank), layout.group)
    return t


def gather(t: Tensor, layout: Layout) -> Tensor:
    """Returns the tensors t of all ranks, (ranks, ...)."""
    found = t.new_empty(layout.ranks, *t.shape)
    dist.all_gather(list(found.unbind(0)), t.contiguous(), group=layout.group)
    return found


class Receive(torch.autograd.Function):
    """Receives a tensor like `like` from a rank; its gradient goes back there.

    `anchor` is any tensor that needs a gradient, by which autograd knows that this one does, too.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, like: Tensor, layout: Layout, outbox: Outbox, rank: int
    ) -> Tensor:
        ctx.route = layout, outbox, rank
        return receive(layout, torch.empty_like(like), rank)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layout, outbox, rank = ctx.route
        outbox.send(layout, grads[0], rank)
        return None, None, None, None, None


class Send(torch.autograd.Function):
    """Sends a state to a rank and returns it with `out`, on which the rank's loss depends.

    The gradient of the state is that of the other rank, plus that of its uses here.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, state: Tensor, layout: Layout, outbox: Outbox, rank: int
    ) -> tuple[Tensor, Tensor]:
        ctx.route = layout, rank
        outbox.send(layout, state.detach(), rank)
        return out.view_as(out), state.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layout, rank = ctx.route
        grad_out, grad_state = grads
        grad = receive(layout, torch.empty_like(grad_state).contiguous(), rank)
        return grad_out, grad_state + grad, None, None, None


class Gather(torch.autograd.Function):
    """Returns the tensors t of all ranks, (ranks, ...); gradients are summed at their ranks."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return gather(t, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        arrived = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, grads[0].contiguous(), group=ctx.layout.group)
        return arrived.sum(0), None


class Join(torch.autograd.Function):
    """Returns t; its backward waits for messages that this rank takes part in but does not use.

    A collective must have a backward on every rank: one that does not use what the others sent has
    gradients of zeros for it.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], *(torch.zeros_like(t) for t in ctx.saved_tensors)


class Exchange(torch.autograd.Function):
    """Sends t[r] of t (ranks, ...) to rank r, and returns what the ranks sent, (ranks, ...)."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        arrived = torch.empty_like(t, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, t.contiguous(), group=layout.group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Exchange.apply(grads[0], ctx.layout), None


class Halo(torch.autograd.Function):
    """Exchanges rows of chunks, t (chunks, B, rows, C): returns those of the chunks `by` places
    (1 or -1) before this rank's chunks, zeros where there is none."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: Layout, by: int) -> Tensor:
        ctx.layout, ctx.by = layout, by
        return _shift(layout, t, by)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _shift(ctx.layout, grads[0], -ctx.by), None, None


def _shift(layout: Layout, t: Tensor, by: int) -> Tensor:
    """Returns rows of the chunks `by` before those of this rank, zeros where there is none."""
    t = t.contiguous()
    found = torch.zeros_like(t)
    calls = []
    for n, chunk in enumerate(layout.own):
        target, source = chunk + by, chunk - by
        if 0 <= target < layout.count and layout.owner(target) != layout.rank:
            peer = layout.global_rank(layout.owner(target))
            calls.append((min(chunk, target), dist.P2POp(dist.isend, t[n], peer, layout.group)))
        if 0 <= source < layout.count:
            if layout.owner(source) == layout.rank:
                found[n] = t[layout.own.index(source)]
                continue
            peer = layout.global_rank(layout.owner(source))
            call = dist.P2POp(dist.irecv, found[n], peer, layout.group)
            calls.append((min(chunk, source), call))
    # Messages of a pair of ranks match by order, so all ranks order them by their boundary.
    calls.sort(key=lambda call: call[0])
    for work in dist.batch_isend_irecv([call for _, call in calls]) if calls else ():
        work.wait()
    return found
