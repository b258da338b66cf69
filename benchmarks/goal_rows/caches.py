"""Rows of goals.py for cache eviction: a decode step after 32k tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from goal_rows.goal import Provider, Row, tensors
from omniattn import functional
from omniattn.modules import H2O, EvictingCache, Eviction, KVCache, SnapKV, Streaming, Threshold

SEEN, HEADS, KV_HEADS, DIM = 32768, 32, 8, 128
#: Rotary tables for all positions of the largest cache that re-rotates its keys.
ROPE = functional.rotary_tables(functional.rope_frequencies(DIM), torch.arange(2049))


def _filled(policy: Eviction, kept: int) -> EvictingCache:
    """Returns a cache with the last `kept` tokens, each with a different weight."""
    cache = EvictingCache(policy, 1, SEEN + 1024, KV_HEADS, DIM)
    k, v = tensors(*[(1, kept, KV_HEADS, DIM)] * 2)
    positions = torch.arange(SEEN - kept, SEEN).expand(1, KV_HEADS, kept)
    names = tuple(str(p) for p in cache.policies)
    saved = {"k": k, "v": v, "positions": positions, "weight": torch.rand(positions.shape)}
    rope = ROPE if cache.moves else None
    counts = {"length": SEEN, "settled": SEEN, "rope": rope, "eviction": names}
    cache.load_state_dict(saved | counts)
    return cache


def eviction_rows() -> Iterator[Row]:
    """Eviction against attention to as many tokens in a KVCache, which reads k once, not twice."""
    q, k, v = tensors((1, 1, HEADS, DIM), *[(1, 1, KV_HEADS, DIM)] * 2)

    def evicting(cache: EvictingCache) -> Provider:
        row = (ROPE[0][:1], ROPE[1][:1]) if cache.moves else None

        def step() -> object:
            with torch.no_grad():
                return cache.attend(q, k, v, rope=row)

        return step

    def plain(kept: int) -> Provider:
        cache = KVCache(1, kept + 1, KV_HEADS, DIM)
        cache.append(*tensors(*[(1, kept, KV_HEADS, DIM)] * 2))

        def step() -> object:
            cache.crop(kept)
            with torch.no_grad():
                return functional.attention(q, *cache.append(k, v))

        return step

    for name, policy, kept, goal in (
        ("threshold", Threshold(eps=0.0), SEEN, 2.0),
        ("H2O", H2O(1024, 1024), 2048, 2.5),
        ("StreamingLLM", Streaming(4, 2044), 2048, 2.0),
        ("SnapKV", SnapKV(2048), 2048, 1.5),
    ):
        cache = _filled(policy, kept)
        yield Row(
            f"{name} decode, {kept} of {SEEN} tokens",
            "forward",
            evicting(cache),
            plain(kept),
            "as many in a KVCache",
            goal,
            bytes=2 * 4 * kept * KV_HEADS * DIM,
        )
