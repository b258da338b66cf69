"""Context managers that set the device, instruction set or number of threads of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from omniattn.config import CPU_ISAS
from omniattn.ops.dispatch import library as _library

__all__ = ["current_device", "isa", "isas", "on_device", "threads"]

_device = torch.device("cpu")


def current_device() -> torch.device:
    """Returns the device of OpSpecs' calls."""
    return _device


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Runs OpSpecs' calls on this device; references stay on the CPU."""
    global _device
    before, _device = _device, torch.device(device)
    try:
        yield
    finally:
        _device = before


def isas() -> tuple[str, ...]:
    """Returns the ISA levels of this machine that this build has kernels for, lowest first."""
    return tuple(n for i, n in enumerate(CPU_ISAS) if torch.ops.omniattn.has_cpu_isa(i))


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Runs the kernels of one ISA level."""
    before = _library.active_isa()
    if name not in CPU_ISAS or not _library.set_active_isa(CPU_ISAS.index(name)):
        raise ValueError(f"isa: name must be one of {isas()}, got name={name!r}")
    try:
        yield
    finally:
        _library.set_active_isa(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs torch, and omniattn with it, on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
