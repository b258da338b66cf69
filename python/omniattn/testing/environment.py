"""Context managers for the state of the machine: instruction set, number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from omniattn.config import CPU_ISAS

__all__ = ["isa", "isas", "threads"]


def isas() -> tuple[str, ...]:
    """The instruction sets of this machine that this build has kernels for, lowest first."""
    best: int = torch.ops.omniattn.detected_cpu_isa()
    return CPU_ISAS[: best + 1]


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Runs the kernels of one instruction set."""
    before = torch.ops.omniattn.cpu_isa()
    if name not in CPU_ISAS or not torch.ops.omniattn.set_cpu_isa(CPU_ISAS.index(name)):
        raise ValueError(f"isa: name must be one of {isas()}, got name={name!r}")
    try:
        yield
    finally:
        torch.ops.omniattn.set_cpu_isa(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs torch, and omniattn with it, on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
