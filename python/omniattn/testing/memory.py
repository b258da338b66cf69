"""Memory layouts for tests: strides with poisoned gaps, poisoned new memory, far offsets."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from omniattn.testing.environment import current_device

__all__ = ["LAYOUTS", "Layout", "poisoned_memory", "relayout"]

Layout: TypeAlias = Literal["contiguous", "padded", "gapped", "transposed", "stepped", "far"]
LAYOUTS: tuple[Layout, ...] = ("padded", "gapped", "transposed", "stepped")


def relayout(t: Tensor, layout: Layout) -> Tensor:
    """Copies t to storage of another layout, with poison in all other elements.

    padded: a gap after each row and around the tensor, unit last stride, odd offset.
    gapped: a gap of 4 elements after each row from an aligned address, so rows are off 16 bytes.
    transposed: leading dimensions in reverse memory order.
    stepped: last stride 2.
    far: the last row is 2^31 elements after the first; untouched pages use no memory.
    """
    if layout == "contiguous" or t.dim() == 0:
        return t
    if layout == "padded":
        out = _poisoned([n + 2 for n in t.shape], t)[(slice(1, -1),) * t.dim()]
    elif layout == "gapped":
        out = _poisoned([*t.shape[:-1], t.shape[-1] + 4], t)[..., : t.shape[-1]]
    elif layout == "transposed":
        order = [*reversed(range(t.dim() - 1)), t.dim() - 1]
        out = _poisoned([t.shape[i] for i in order], t).permute(order)
    elif layout == "stepped":
        out = _poisoned([*t.shape[:-1], 2 * t.shape[-1]], t)[..., ::2]
    else:
        rows, inner = t.shape[0], t[0].contiguous()
        stride = 2**31 // max(rows - 1, 1) + inner.numel()
        storage = t.new_empty((rows - 1) * stride + inner.numel() + 1)
        out = storage.as_strided(t.shape, (stride, *inner.stride()), 1)
    return out.copy_(t)


def _poisoned(shape: list[int], like: Tensor) -> Tensor:
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return like.new_full(shape, float("nan"))
    return like.new_full(shape, 1 if like.dtype == torch.bool else torch.iinfo(like.dtype).min)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills new memory with 0xFF bytes, a NaN in every dtype (glibc's M_PERTURB).

    A kernel that reads uninitialised memory then returns NaN. glibc does not fill blocks below
    1 KiB that it returns from a thread's cache, which holds seven of each size. On CUDA the free
    memory of torch's allocator is filled instead.
    """
    if current_device().type == "cuda":
        torch.cuda.empty_cache()
        sizes = [1 << bits for bits in range(9, 25)] * 8
        blocks = [torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in sizes]
        del blocks
        yield
        return
    mallopt = ctypes.CDLL(None).mallopt
    perturb, filled_with_ff = -6, 0x100  # new bytes get the complement of the low byte
    if not mallopt(perturb, filled_with_ff):
        raise RuntimeError("poisoned_memory: needs glibc's allocator")
    try:
        yield
    finally:
        mallopt(perturb, 0)
