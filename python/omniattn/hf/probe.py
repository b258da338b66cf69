"""Finds the forward that computes the same as a module, by running both."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Finding", "Forward", "Left", "draws", "probing", "same", "takes", "twin"]

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Left:
    """Why a layer is left unchanged, and the level at which that is logged."""

    reason: str
    level: int = logging.DEBUG


Finding = Forward | Left | None


def takes(x: Tensor, activation: str | None = None) -> bool:
    """Whether ours runs: on CUDA a layer keeps its own, as ours have not run on a GPU yet."""
    return x.is_cpu and activation in (None, "silu", "swish")


def own_copy(state: Tensor) -> Tensor:
    """A state that its cache is about to overwrite, which what autograd saves must outlive."""
    return state.clone() if torch.is_grad_enabled() else state


def draws() -> Callable[..., Tensor]:
    """Returns a function that draws random tensors of given sizes, in the same sequence each
    time."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Where layers are made and run for comparison: the same draws each time, whatever the caller
    has set."""
    with torch.random.fork_rng(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        torch.manual_seed(0)
        with torch.no_grad():
            yield


def twin(module: nn.Module, dtype: torch.dtype, modules: dict[str, nn.Module]) -> Any:
    """A copy of `module` on the CPU with `modules`, in training so that dropout shows, and without
    hooks. Its parameters are random, as zeros or ones would hide what they do."""
    generator = torch.Generator().manual_seed(0)
    made: Any = object.__new__(type(module))
    made.__dict__.update(module.__dict__ | nn.Module().__dict__)
    for name, p in module._parameters.items():
        random = None if p is None else torch.randn(p.shape, generator=generator, device="cpu")
        made._parameters[name] = None if random is None else nn.Parameter(random.to(dtype))
    made._buffers = dict(module._buffers)
    made._modules = modules
    return made


def same(
    twin: Callable[[torch.dtype], Any],
    candidates: Sequence[Forward],
    size: int,
    dtypes: Sequence[torch.dtype],
) -> Forward | Left:
    """The candidate that computes what the module of `twin` does, in all dtypes; the closest in the
    last one where several do. A module that takes no rows has none (norms over channels in front,
    I-BERT's)."""
    generator = torch.Generator().manual_seed(0)
    # Off centre to tell RMSNorm from LayerNorm; small rows to tell one eps from another, large ones
    # for activations that are clamped.
    rows = torch.randn(3, 4, size, generator=generator, device="cpu") + 0.5
    rows = (rows * torch.tensor([1e-3, 1.0, 1e2], device="cpu").view(3, 1, 1)).flatten(0, 1)
    errors: dict[Forward, float] = dict.fromkeys(candidates, 0.0)

    def run(forward: Forward, module: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(0)  # so that dropout in the same place drops the same
        y: Tensor = forward(module, x)
        return y

    with torch.random.fork_rng(), torch.no_grad():
        for dtype in dtypes:
            module, x = twin(dtype), rows.to(dtype)
            try:
                expected = run(type(module).forward, module, x)
            except Exception as error:
                return Left(f"its forward does not take rows ({type(error).__name__}: {error})")
            if not isinstance(expected, Tensor):
                return Left("its forward does not return a tensor")
            bound = 20 * torch.finfo(dtype).eps * expected.abs().amax(-1)
            found = {each: run(each, module, x) for each in errors}
            differences = {
                each: (y - expected).abs() for each, y in found.items() if y.dtype == expected.dtype
            }
            errors = {
                each: difference.sum().item()
                for each, difference in differences.items()
                if (difference.amax(-1) <= bound).all()
            }
    if not errors:
        return Left("it computes something else")
    return min(errors, key=errors.__getitem__)
