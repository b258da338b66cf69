"""Finds a forward that is equivalent to a module's, by running both."""

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
    """Reason why a layer is left unchanged, and the level at which to log it."""

    reason: str
    level: int = logging.DEBUG


Finding = Forward | Left | None


def takes(x: Tensor, activation: str | None = None) -> bool:
    """Returns True if our function applies; on CUDA layers keep their own, as ours are untested."""
    return x.is_cpu and activation in (None, "silu", "swish")


def own_copy(state: Tensor) -> Tensor:
    """Copies a state that its cache will overwrite, as autograd may have saved it."""
    return state.clone() if torch.is_grad_enabled() else state


def draws() -> Callable[..., Tensor]:
    """Returns a function that draws random tensors of given sizes from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Context for probes: fixed seed, without gradients, independent of the caller's settings."""
    with torch.random.fork_rng(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        torch.manual_seed(0)
        with torch.no_grad():
            yield


def twin(module: nn.Module, dtype: torch.dtype, modules: dict[str, nn.Module]) -> Any:
    """Returns a CPU copy of `module` with submodules `modules`, random parameters and no hooks.

    Zeros or ones as parameters would hide their effect; training mode reveals dropout.
    """
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
    """Returns the candidate that equals the module of `twin` in all dtypes, or why there is none.

    Of several candidates, the closest in the last dtype wins. A module that does not take rows has
    none (channels-first norms, I-BERT's).
    """
    generator = torch.Generator().manual_seed(0)
    # The mean separates RMSNorm from LayerNorm, small rows reveal eps, large rows reveal clamps.
    rows = torch.randn(3, 4, size, generator=generator, device="cpu") + 0.5
    rows = (rows * torch.tensor([1e-3, 1.0, 1e2], device="cpu").view(3, 1, 1)).flatten(0, 1)
    errors: dict[Forward, float] = dict.fromkeys(candidates, 0.0)

    def run(forward: Forward, module: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(0)  # equal dropout masks
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
