"""Floating-point operations of the chunk form of recurrences of a matrix state, all products.

With a state of K x V and chunks of C tokens. Half of a product within a chunk is above the diagonal
and is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from omniattn.testing.spec import Pass

#: Chunks that csrc/kernels/recurrence computes, and with a decay of each channel.
CHUNK, CHANNEL_CHUNK = 32, 16


def plain(v: Sequence[int], k: int, chunk: int = CHUNK) -> dict[Pass, float]:
    """S' = a S + k v^T: of values of shape (B, T, H, V) and keys of size `k`."""
    kv, ck, cv = _sizes(v, k, chunk)
    return _passes(v, 2 * kv + ck / 2 + cv / 2, again=ck / 2)


def delta(v: Sequence[int], k: int, chunk: int = CHUNK) -> dict[Pass, float]:
    """S' = a S + k u^T with u = beta (v - a S^T k): scores of keys with keys too, and a solve."""
    kv, ck, cv = _sizes(v, k, chunk)
    return _passes(v, 3 * kv + ck + cv, again=kv + ck + cv / 2)


def low_rank(v: Sequence[int], k: int, chunk: int = CHANNEL_CHUNK) -> dict[Pass, float]:
    """S' = a S + b (S^T a)^T + k v^T: two reads, two writes, four tables of scores, a solve."""
    kv, ck, cv = _sizes(v, k, chunk)
    return _passes(v, 4 * kv + 2 * ck + 2 * cv, again=kv + 2 * ck + cv)


def _sizes(v: Sequence[int], k: int, chunk: int) -> tuple[float, float, float]:
    return k * v[3], chunk * k, chunk * v[3]


def _passes(v: Sequence[int], forward: float, again: float) -> dict[Pass, float]:
    """Each product has two in the backward, which computes `again` what a chunk needs of the
    forward."""
    tokens = 2.0 * v[0] * v[1] * v[2]
    return {"forward": tokens * forward, "forward+backward": tokens * (3 * forward + again)}
