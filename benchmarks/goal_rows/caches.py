"""Rows of goals.py for caches: eviction after 32k tokens, and keys and values in int8."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from goal_rows.goal import BF16, F32, Provider, Row, provider, tensors
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


def int8_rows() -> Iterator[Row]:
    """Decoding of keys and values in int8 at the rate of bytes of those in the queries' dtype."""
    cached = functional.attention_cached
    for heads, kv_heads, length in ((32, 8, 5120), (32, 8, 16384), (8, 8, 16384)):
        for dtype in (F32, BF16):
            shapes = [(1, kv_heads, length, DIM)] * 2  # contiguous per head, as in a KVCache
            q, *rows = tensors((1, 1, heads, DIM), *shapes, dtype=dtype)
            k, v = (t.transpose(1, 2) for t in rows)
            lengths = {"cache_seqlens": torch.tensor([length])}
            (codes_k, scale_k), (codes_v, scale_v) = map(functional.quantize_int8, rows)
            stored = {"k": codes_k, "v": codes_v, "k_scale": scale_k, "v_scale": scale_v}
            stored = {name: t.transpose(1, 2) for name, t in stored.items()}
            count = sum(t.nbytes for t in stored.values())
            yield Row(
                f"int8 cache decode H{heads}/{kv_heads} N{length}",
                "forward",
                provider("forward", {"q": q} | stored | lengths, functional.attention_int8),
                provider("forward", {"q": q, "k": k, "v": v} | lengths, cached),
                "rate of q's dtype",
                1.0,
                share=count / (k.nbytes + v.nbytes),
                dtype=dtype,
                bytes=count,
            )
