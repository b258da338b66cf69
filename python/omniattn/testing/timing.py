"""Times one call; benchmarks/run.py interleaves timings to compare providers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch._functorch.config

from omniattn.testing.spec import Call, Function, Pass, output_gradients

__all__ = ["once", "prepare", "time_call"]


def prepare(call: Call, function: Function, pass_: Pass) -> Callable[[], object]:
    """Returns a callable that runs one pass; "backward" reuses the graph of one forward."""
    if pass_ == "forward":
        detached = call.map(torch.Tensor.detach)
        tensors, options = detached.tensors, detached.options

        def forward() -> object:
            with torch.no_grad():
                return function(**tensors, **options)

        return forward
    leaves = call.requiring_grad()
    if pass_ == "backward":
        # A compiled graph that may reuse the memory of its saved tensors runs backward only once:
        # discard the graphs of earlier calls.
        torch._dynamo.reset()
        with torch._functorch.config.patch(donated_buffer=False):
            outputs = leaves.run(function)
        grads = output_gradients(outputs)
        return lambda: torch.autograd.grad(outputs, leaves.leaves, grads, retain_graph=True)
    grads = output_gradients(leaves.run(function))
    return lambda: torch.autograd.grad(leaves.run(function), leaves.leaves, grads)


def once(function: Callable[[], object], repeats: int) -> float:
    """Returns seconds per call over `repeats` calls."""
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


def time_call(function: Callable[[], object], *, seconds: float = 0.3) -> float:
    """Returns median seconds per call, from samples of at least 5 ms, about `seconds` in total."""
    function()
    first = once(function, 1)
    repeats = max(1, round(5e-3 / first))
    samples = max(3, min(50, round(seconds / (first * repeats))))
    return statistics.median(once(function, repeats) for _ in range(samples))
