"""Rows of goals.py for caches: kinds of heads, eviction after 32k tokens, int8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from goal_rows.goal import BF16, F32, Provider, Row, fill, provider, tensors
from omniattn import functional
from omniattn.modules import (
    H2O,
    Attention,
    DeepSeekSparseAttention,
    EvictingCache,
    Eviction,
    KVCache,
    LayerConfig,
    MultiHeadLatentAttention,
    SnapKV,
    Streaming,
    Threshold,
)

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


def kind_rows() -> Iterator[Row]:
    """Steps with grouped, single and latent heads after 8k tokens, at the rate of bytes of MHA.

    A step reads the weights and what is stored; DSA reads all keys of its indexer and the selected
    latents.
    """
    width, heads, seen = 2048, 16, 8192
    latent = (width, heads, None, 512, 128, 64, 128)
    sparse = DeepSeekSparseAttention.Config(*latent, index_heads=16, index_dim=64)
    kinds: dict[str, LayerConfig] = {
        "MHA": Attention.Config(width, heads, causal=True),
        "GQA": Attention.Config(width, heads, 4, causal=True),
        "MQA": Attention.Config(width, heads, 1, causal=True),
        "MLA": MultiHeadLatentAttention.Config(*latent),
        "DSA": sparse,
    }
    for dtype in (F32, BF16):
        runs: dict[str, Provider] = {}
        read: dict[str, int] = {}
        for name, config in kinds.items():
            torch.manual_seed(0)
            layer: Any = config.build(dtype=dtype)
            state = layer.new_state(1, seen + 1)
            if name == "DSA":
                latents = fill(state.latents, seen)
                stored = fill(state.index, seen) + latents * sparse.index_topk // seen
            else:
                stored = fill(state, seen)
            runs[name] = _step(layer, state, seen)
            read[name] = stored + sum(p.nbytes for p in layer.parameters())
        for name in ("GQA", "MQA", "MLA", "DSA"):
            yield Row(
                f"{name} step d{width} H{heads} after {seen} tokens",
                "forward",
                runs[name],
                runs["MHA"],
                "rate of MHA",
                1.0,
                share=read[name] / read["MHA"],
                dtype=dtype,
                bytes=read[name],
            )


def _step(layer: Any, state: Any, seen: int) -> Provider:
    """Returns a decode step of a layer after the tokens in its state."""
    (x,) = tensors((1, 1, layer.config.dim), dtype=next(layer.parameters()).dtype)
    options = {}
    if isinstance(layer, MultiHeadLatentAttention):
        frequencies = functional.rope_frequencies(layer.config.qk_rope_dim)
        options["rope"] = functional.rotary_tables(frequencies, torch.arange(seen, seen + 1))

    def step() -> object:
        state.crop(seen)
        with torch.no_grad():
            return layer(x, state=state, **options)

    return step
