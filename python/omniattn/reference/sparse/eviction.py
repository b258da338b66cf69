"""Decoding with cache eviction, one head and one query at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: Tokens that one head keeps: position -> sum of the attention weights received.
Received = dict[int, float]


def evicting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: str,
    *,
    calls: Sequence[int],
    rotate: Callable[[Tensor, int], Tensor] | None = None,
    **sizes: Any,
) -> tuple[Tensor, list[list[list[int]]]]:
    """q (B,T,Hq,D), k (B,T,Hkv,D), v (B,T,Hkv,Dv) -> O (B,T,Hq,Dv), positions kept by (b, kv head).

    `calls`: number of tokens of each call, the prompt first. Policies and their sizes: "threshold"
    (eps, stat, grace, sinks, recent, rho), "h2o" (heavy, recent), "streaming" (sinks, recent,
    evict), "snapkv" (size, window, kernel, pooling). "streaming" rotates tokens to their positions
    in the cache, by `rotate(x, position)`; other policies take rotated q and k.
    """
    batch, _, heads, _ = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    kept: list[list[list[int]]] = [[[] for _ in range(kv_heads)] for _ in range(batch)]
    for b in range(batch):
        for h in range(kv_heads):
            mine = slice(h * group, (h + 1) * group)
            rows = q[b, :, mine], k[b, :, h], v[b, :, h]
            out[b, :, mine], received = _one_head(*rows, policy, calls, rotate, sizes)
            kept[b][h] = sorted(received)
    return out, kept


def _one_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: str,
    calls: Sequence[int],
    rotate: Callable[[Tensor, int], Tensor] | None,
    sizes: dict[str, Any],
) -> tuple[Tensor, Received]:
    """Returns O (T, G, Dv) and the tokens kept, of q (T, G, D), k (T, D), v (T, Dv)."""
    out, received, seen = [], Received(), 0
    for new in calls:
        if sizes.get("evict") == "before":
            first = seen + new - sizes["recent"]
            received = {p: w for p, w in received.items() if p < sizes["sinks"] or p >= first}
        past = sorted(received)
        queries = range(seen, seen + new)
        decay = sizes.get("rho", 0.9) if sizes.get("stat") == "ema" else 1.0
        for i in queries:
            keys = past + list(range(seen, i + 1))
            if rotate is None:
                rows, own = k[keys], q[i]
            else:
                rows = torch.stack([rotate(k[p], place) for place, p in enumerate(keys)])
                own = rotate(q[i], len(keys) - 1)
            p = (own @ rows.T / math.sqrt(q.shape[2])).softmax(-1)
            out.append(p @ v[keys])
            votes = policy != "snapkv" or (seen == 0 and i >= new - sizes["window"])
            for key, weight in zip(keys, p.mean(0).tolist(), strict=True):
                received[key] = decay * received.get(key, 0.0) + (weight if votes else 0.0)
        received = _kept(policy, received, seen, seen + new, **sizes)
        seen += new
    return torch.stack(out), received


def _kept(policy: str, received: Received, seen: int, length: int, **sizes: Any) -> Received:
    """Returns the tokens kept after a call that appended positions [seen, length)."""
    if policy == "threshold":
        return _above(received, seen, length, **sizes)
    left = dict(received)
    if policy == "h2o":
        while len(left) > sizes["heavy"] + sizes["recent"]:
            others = [p for p in left if p < length - sizes["recent"]]
            del left[min(others, key=lambda p: (left[p], p))]
        return left
    if policy == "streaming":
        first = length - sizes["recent"]
        return {p: w for p, w in left.items() if p < sizes["sinks"] or p >= first}
    if policy == "snapkv":
        if seen > 0 or length <= sizes["size"]:
            return left
        votes = _pooled([left[p] for p in range(length - sizes["window"])], **sizes)
        best = sorted(range(len(votes)), key=lambda p: (-votes[p], p))
        chosen = best[: sizes["size"] - sizes["window"]]
        return {p: left[p] for p in (*chosen, *range(length - sizes["window"], length))}
    raise ValueError(f"evicting_attention: policy must be a known one, got policy={policy!r}")


def _pooled(votes: list[float], *, kernel: int, pooling: str, **_: int) -> list[float]:
    """Pools votes over windows of `kernel`, padded with 0."""
    half = kernel // 2
    padded = [0.0] * half + votes + [0.0] * half
    parts = [padded[n : n + kernel] for n in range(len(votes))]
    return [sum(part) / kernel if pooling == "mean" else max(part) for part in parts]


def _above(
    received: Received,
    seen: int,
    length: int,
    *,
    eps: float,
    stat: str,
    grace: int,
    sinks: int,
    recent: int,
    rho: float = 0.9,
) -> Received:
    """Keeps tokens whose statistic is at least eps, and tokens exempt from the test."""
    left = Received()
    for p, weight in received.items():
        age, before = length - 1 - p, seen - 1 - p
        tested = age >= grace and (stat != "sum" or before < grace)
        value = weight / (age + 1) if stat == "mean" else weight
        if p < sinks or p >= length - recent or not tested or value >= eps:
            left[p] = weight
    return left
