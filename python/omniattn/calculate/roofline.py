"""Arithmetic intensity, and the time that a machine's ceilings allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from omniattn.calculate.costs import flops, step_cost
from omniattn.calculate.memory import kv_bytes
from omniattn.calculate.parameters import parameters
from omniattn.calculate.sources import Source, config_of, dtype_of, require_sizes
from omniattn.checks.arguments import require_number


class Device(NamedTuple):
    """Ceilings of a GPU by its maker's data sheet.

    Attributes:
        peak_flops: operations per second of dense bf16 products.
        bandwidth: bytes per second of its memory.
        link: bytes per second that it sends to others of its host (NVLink, one direction).
    """

    peak_flops: float
    bandwidth: float
    link: float


#: SXM forms, by NVIDIA's data sheets. A network between hosts has less than `link`.
DEVICES = {
    "a100": Device(312e12, 2.039e12, 300e9),
    "h100": Device(989e12, 3.35e12, 450e9),
    "h200": Device(989e12, 4.8e12, 450e9),
    "b200": Device(2250e12, 8e12, 900e9),
}


@dataclass(frozen=True)
class Roofline:
    """Place of a computation under the ceilings of a machine.

    Args:
        flops: floating-point operations.
        bytes: bytes that are read from and written to memory.
        intensity: operations per byte.
        ridge: intensity from which on arithmetic limits, peak_flops / bandwidth.
        seconds: shortest time, the longer one of arithmetic and memory.
        bound: "compute" or "memory".
    """

    flops: int
    bytes: int
    intensity: float
    ridge: float
    seconds: float
    bound: str


def roofline(flops: int, bytes: int, *, peak_flops: float, bandwidth: float) -> Roofline:
    """Returns the time of a computation by the roofline model.

    ``seconds = max(flops / peak_flops, bytes / bandwidth)``; Williams, Waterman, Patterson,
    "Roofline", 2009, doi 10.1145/1498765.1498785.

    Args:
        flops: floating-point operations.
        bytes: bytes that are moved.
        peak_flops: operations per second of the machine.
        bandwidth: bytes per second of its memory.

    Example:
        >>> roofline(10**12, 10**9, peak_flops=1e12, bandwidth=1e11).bound
        'compute'
    """
    require_sizes("roofline", flops=flops, bytes=bytes)
    for name, value in (("peak_flops", peak_flops), ("bandwidth", bandwidth)):
        require_number("roofline", name, value, 0)
        if value == 0:
            raise ValueError(f"roofline: {name} must be > 0, got {name}={value}")
    arithmetic, memory = flops / peak_flops, bytes / bandwidth
    bound = "compute" if arithmetic >= memory else "memory"
    ridge = peak_flops / bandwidth
    return Roofline(flops, bytes, flops / bytes, ridge, max(arithmetic, memory), bound)


def prefill(
    config: Source,
    tokens: int,
    *,
    batch: int = 1,
    dtype: torch.dtype | str = "bf16",
    peak_flops: float,
    bandwidth: float,
) -> Roofline:
    """Returns the roofline of a forward of `tokens` tokens, which reads all weights once.

    The bytes are a lower bound: all weights and the caches that are written, no activations.

    Args:
        config, tokens, batch: as in :func:`omniattn.calculate.flops`.
        dtype: dtype of weights and caches.
        peak_flops, bandwidth: ceilings of the machine, as in :func:`roofline`.
    """
    found, storage = config_of(config), dtype_of(dtype)
    moved = parameters(found).total * storage.itemsize
    moved += kv_bytes(found, tokens, batch=batch, dtype=storage)
    forward = flops(found, tokens, batch=batch).forward
    return roofline(forward, moved, peak_flops=peak_flops, bandwidth=bandwidth)


def decode(
    config: Source,
    step: int,
    *,
    batch: int = 1,
    dtype: torch.dtype | str = "bf16",
    peak_flops: float,
    bandwidth: float,
) -> Roofline:
    """Returns the roofline of one token of each sequence, after `step` tokens.

    The bytes are a lower bound: the caches, and the active weights once, as if all sequences chose
    the same experts.

    Args:
        config, step, batch: as in :func:`omniattn.calculate.step_cost`.
        dtype: dtype of weights and caches.
        peak_flops, bandwidth: ceilings of the machine, as in :func:`roofline`.
    """
    found, storage = config_of(config), dtype_of(dtype)
    moved = parameters(found).active * storage.itemsize
    moved += kv_bytes(found, step + 1, batch=batch, dtype=storage)
    cached = step_cost(found, step, batch=batch).cached
    return roofline(cached, moved, peak_flops=peak_flops, bandwidth=bandwidth)
