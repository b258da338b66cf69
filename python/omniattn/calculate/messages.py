"""Bytes that a rank of context_parallel sends for a layer, from its calls on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from omniattn.checks.ranks import ACTIVE, Region
from omniattn.distributed.states import PASSED, empty_state
from omniattn.distributed.sums import sums_by_chunk


class _Counted(Region):
    """Adds up what a rank sends in the forward and the backward of its calls, in zigzag order.

    A chunk's state goes to the rank of the next chunk, its gradient to that of the one before.
    Ranks between the first and the last send two of both, and so most of all.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks, self.bytes = ranks, 0
        self.neighbours = 2 if ranks == 2 else 4

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Keys and values go around twice, and their gradients once."""
        wide = torch.promote_types(q.dtype, torch.float32)
        for t in (k, v):
            self.bytes += (self.ranks - 1) * t.numel() * (2 * t.itemsize + wide.itemsize)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        if not options.get("return_lse"):
            return out
        return out, q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide)

    def run(self, op: Any, args: tuple[Any, ...]) -> Any:
        if op.name in PASSED:
            given = op.schema.by_name(args, {})
            if filters := PASSED[op.name].filters:
                x, rows = given["x"], given[filters].shape[-1] - 1
                self.bytes += self.neighbours * x.shape[0] * rows * x.shape[2] * x.itemsize
            elif sums_by_chunk(op, given):
                # The ranks gather a sum and a decay of two chunks each, and their gradients' sums.
                state = empty_state(op, PASSED[op.name], given)
                decay = state if given["gv"] is not None else state[..., :1]
                self.bytes += 2 * (self.ranks - 1) * (2 * state.nbytes + decay.nbytes)
            else:
                state = empty_state(op, PASSED[op.name], given)
                self.bytes += self.neighbours * state.nbytes
        return op.alone(*args)

    def require(self, op: str) -> None:
        """Leaves this to `context_parallel`."""

    def positions(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(count, device=device)

    def length(self, count: int) -> int:
        return self.ranks * count

    def unshard(self, t: Tensor, dim: int = 1) -> Tensor:
        self.bytes += 2 * (self.ranks - 1) * t.nbytes
        return torch.cat([t] * self.ranks, dim)

    def before(self, t: Tensor) -> Tensor:
        self.bytes += self.neighbours * t[:, :1].nbytes
        return t

    def after(self, t: Tensor) -> Tensor:
        return self.before(t)

    def sums(self, t: Tensor) -> Tensor:
        # The ranks gather sums of two chunks each, and gradients of those that have them.
        passes = 2 if t.is_floating_point() else 1
        self.bytes += passes * (self.ranks - 1) * 2 * t[:, :1].nbytes
        return t.cumsum(1)

    def several(self, steps: int) -> AbstractContextManager[None]:
        return nullcontext()

    def first(self, t: Tensor) -> Tensor | None:
        return None


def context_bytes(ranks: int, run: Callable[[], object]) -> int:
    """Returns the bytes that a rank sends in a training step for the calls of `run`."""
    region = _Counted(ranks)
    ACTIVE.region = region
    try:
        with torch.no_grad():
            run()
    finally:
        ACTIVE.region = None
    return region.bytes
