"""Rows of goals.py, and functions that make them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from omniattn.testing import prepare
from omniattn.testing.spec import Call, Function, Pass

F32, BF16 = torch.float32, torch.bfloat16
PASSES: tuple[Pass, ...] = ("forward", "forward+backward")
#: Products of the head size per pair: two forward, five backward.
PRODUCTS = {"forward": 2, "forward+backward": 7}
Provider = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """`run` may take `goal` times the time of `yardstick` times `share`, and must reach `least`.

    With `memory` it may also add at most that many times the memory of `yardstick` times `share`.
    The yardstick is held against ours before both are timed where it does the `same`. With
    `seconds` it was `called_once` for so long, since turns would take too long, and gives what it
    gave then. The rate is of `flops` or `exponentials` where there are any, else of `bytes`.
    """

    name: str
    pass_: Pass
    run: Provider
    yardstick: Provider
    against: str
    goal: float
    share: float = 1.0
    dtype: torch.dtype = F32
    flops: float = 0.0
    bytes: float = 0.0
    exponentials: float = 0.0
    least: float = 0.0  # of the ceiling
    memory: float = 0.0
    same: bool = False
    seconds: float = 0.0


def called_once(run: Provider) -> dict[str, object]:
    """Fields of a row whose yardstick takes long."""
    start = time.perf_counter()
    found = run()
    return {"seconds": time.perf_counter() - start, "yardstick": lambda: found}


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=make).to(dtype) for shape in shapes]


def self_attention(
    batch: int, length: int, heads: int, dim: int, dtype: torch.dtype = F32
) -> dict[str, torch.Tensor]:
    return dict(zip("qkv", tensors(*[(batch, length, heads, dim)] * 3, dtype=dtype), strict=True))


def provider(
    pass_: Pass, named: dict[str, torch.Tensor], function: Function, **options: object
) -> Provider:
    leaves = tuple(name for name, t in named.items() if t.is_floating_point())
    return prepare(Call(named, options, leaves), function, pass_)


def sdpa(q, k, v, bias=None, **options):
    """torch's attention on our layout."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, **options)
    return out.transpose(1, 2)
