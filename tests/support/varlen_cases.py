"""Packed batches of attention, and keys in pages."""

from __future__ import annotations

import itertools

import torch

F64 = torch.float64
LENGTHS_Q, LENGTHS_K = [3, 0, 130, 1, 64], [40, 5, 130, 0, 200]
H, D = 4, 16


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, dtype=F64):
    make = torch.Generator().manual_seed(0)
    rows = [sum(n) for n in (lengths_q, lengths_k, lengths_k)]
    shapes = zip(rows, (H, 2, 2), (D, D, 8), strict=True)
    qkv = [torch.randn(s, generator=make, dtype=F64).to(dtype) for s in shapes]
    return qkv, boundaries(lengths_q), boundaries(lengths_k)


def pages_of(k, size, seed=0):
    """k (B, T, H, D) in shuffled pages of `size` tokens, between other sequences' pages."""
    batch, length = k.shape[:2]
    count = -(-length // size)
    table = torch.randperm(batch * count + 3, generator=torch.Generator().manual_seed(seed))
    table = table[: batch * count].view(batch, count)
    pages = torch.full((batch * count + 3, size, *k.shape[2:]), torch.nan, dtype=k.dtype)
    for b, n in itertools.product(range(batch), range(count)):
        rows = k[b, n * size : (n + 1) * size]
        pages[table[b, n], : len(rows)] = rows
    return pages, table.int()
