"""Cases and helpers shared by the OpSpecs of several families."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omniattn.testing.spec import Case, Pass, Random

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FORWARD: tuple[Pass, ...] = ("forward",)
EACH: tuple[Pass, ...] = ("forward", "backward")
TRAINING: tuple[Pass, ...] = ("forward+backward",)
BOTH: tuple[Pass, ...] = ("forward", "forward+backward")
#: Passes over the data, or GEMMs, relative to the forward.
SWEEPS: dict[Pass, int] = {"forward": 1, "backward": 2, "forward+backward": 3}


def rows(label: str, M: int, N: int, tensors: tuple[str, ...] = (), **options: Any) -> Case:
    return Case(label, {"M": M, "N": N}, tensors, options)


def boundaries(count: int, steps: int, random: Random) -> Tensor:
    """Returns random cu_seqlens (count + 1,) that cover all tokens."""
    inner = random.integers(steps + 1, count - 1).sort().values
    return torch.cat((torch.tensor([0]), inner, torch.tensor([steps])))


def flat_state(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps functions whose state is a tuple, to take and return its tensors one by one."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> tuple[Tensor, ...]:
            state = tuple(options.pop(name, None) for name in names)
            if any(t is not None for t in state):
                options["initial_state"] = state
            o, state = function(*args, **options)
            return (o, *state)

        return run

    return wrap


def element_flops(per_element: int) -> Callable[[Case, Pass], float]:
    """Returns nominal FLOP counts for memory-bound ops."""

    def flops(case: Case, pass_: Pass) -> float:
        return float(per_element * case.sizes["M"] * case.sizes["N"] * SWEEPS[pass_])

    return flops


def gemm_flops(case: Case, pass_: Pass) -> float:
    size = 2.0 * case.sizes["M"] * case.sizes.get("N", case.sizes.get("V", 0)) * case.sizes["K"]
    return size * SWEEPS[pass_]
