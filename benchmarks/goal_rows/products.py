"""Counts FLOPs of all matrix products in the chunk form of recurrences with a matrix state.

The state is K x V, a chunk has C tokens. Half of a product within a chunk is above the diagonal and
is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from omniattn.testing.spec import Pass

#: Chunk sizes of csrc/kernels/recurrence, in general and with decays per channel.
CHUNK, CHANNEL_CHUNK = 32, 16


def plain(v: Sequence[int], k: int, chunk: int = CHUNK) -> dict[Pass, float]:
    """Counts S' = a S + k v^T, for values of shape (B, T, H, V) and keys of size `k`."""
    kv, ck, cv = _sizes(v, k, chunk)
    return _passes(v, 2 * kv + ck / 2 + cv / 2, again=ck / 2)


def delta(v: Sequence[int], k: int, chunk: int = CHUNK) -> dict[Pass, float]:
    """Counts S' = a S + k u^T, u = beta (v - a S^T k): also key-key scores and a solve."""
    kv, ck, cv = _sizes(v, k, chunk)
    return _passes(v, 3 * kv + ck + cv, again=kv + ck + cv / 2)


def low_rank(v: Sequence[int], k: int, chunk: int = CHANNEL_CHUNK) -> dict[Pass, float]:
    """Counts S' = a S + b (S^T a)^T + k v^T: 2 reads, 2 writes, 4 score matrices, a solve."""
    kv, ck, cv = _sizes(v, k, chunk)
    return _passes(v, 4 * kv + 2 * ck + 2 * cv, again=kv + 2 * ck + cv)


def _sizes(v: Sequence[int], k: int, chunk: int) -> tuple[float, float, float]:
    return k * v[3], chunk * k, chunk * v[3]


def _passes(v: Sequence[int], forward: float, again: float) -> dict[Pass, float]:
    """Counts passes: the backward has two products per product, and recomputes `again` products."""
    tokens = 2.0 * v[0] * v[1] * v[2]
    return {"forward": tokens * forward, "forward+backward": tokens * (3 * forward + again)}
