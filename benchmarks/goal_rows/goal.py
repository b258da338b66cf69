"""Rows of goals.py and helpers to make them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from omniattn.modules import KVCache
from omniattn.testing import prepare
from omniattn.testing.spec import Call, Function, Pass

F32, BF16 = torch.float32, torch.bfloat16
PASSES: tuple[Pass, ...] = ("forward", "forward+backward")
#: Products of the head size per pair: 2 in the forward, 5 in the backward.
PRODUCTS = {"forward": 2, "forward+backward": 7}
Provider = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """A call, its yardstick and the goal.

    The goal is met if the time of `run` is at most `goal` * `share` * the time of `yardstick`, its
    rate at least `least` of the ceiling and, with `memory`, the memory it adds at most `memory` *
    `share` * that of `yardstick`. With `same`, both results are compared before timing. With
    `seconds`, the yardstick is too slow to alternate: it was `called_once`, took that long, and
    returns that result. The rate counts `flops` or `exponentials` if given, else `bytes`.
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
    least: float = 0.0  # minimum share of the ceiling
    memory: float = 0.0
    same: bool = False
    seconds: float = 0.0


def called_once(run: Provider) -> dict[str, object]:
    """Calls a slow yardstick once; returns the fields of its row."""
    start = time.perf_counter()
    found = run()
    return {"seconds": time.perf_counter() - start, "yardstick": lambda: found}


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=make).to(dtype) for shape in shapes]


def fill(cache: KVCache, length: int) -> int:
    """Fills a cache with `length` tokens; returns the bytes of their keys and values."""
    views = cache.views()
    stored = tensors(*((1, length, *v.shape[2:]) for v in views), dtype=views[0].dtype)
    cache.append(*stored)
    return sum(t.nbytes for t in stored)


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
    """Computes torch's attention on our layout."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, **options)
    return out.transpose(1, 2)
