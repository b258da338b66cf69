"""Which cache a layer of attention decodes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omniattn.checks.arguments import shown
from omniattn.modules.base.state import Storage
from omniattn.modules.caches.cache import Cache
from omniattn.modules.caches.evicting import EvictingCache
from omniattn.modules.caches.eviction import Eviction, Window, policies_of_groups
from omniattn.modules.caches.kv_cache import CrossCache, KVCache
from omniattn.modules.caches.rolling import RollingCache

if TYPE_CHECKING:
    from omniattn.modules.attention.attention import Attention


def new_cache(
    config: Attention.Config,
    batch: int,
    max_length: int,
    rolling: bool,
    eviction: Eviction | Sequence[Eviction] | None,
    storage: Storage,
) -> Cache:
    """An empty cache; arguments as of `Attention.new_state`."""
    c, sizes = config, (config.kv_heads, config.head_size)
    if eviction is not None:
        whole = c.causal and c.window_size == (-1, -1) and c.normaliser == "softmax"
        if rolling or not whole:
            raise ValueError(
                "Attention: eviction needs causal self-attention by softmax without a window, "
                f"got causal={c.causal}, window_size={c.window_size}, "
                f"normaliser={shown(c.normaliser)}, rolling={rolling}"
            )
        policies = policies_of_groups("Attention", eviction, c.num_heads, c.kv_heads)
        if isinstance(policies, Window):
            return RollingCache(batch, min(max_length, policies.size), *sizes, **storage)
        return EvictingCache(policies, batch, max_length, *sizes, **storage)
    if c.cross:
        return CrossCache()
    if not rolling:
        return KVCache(batch, max_length, *sizes, **storage)
    if not c.causal or c.window_size[0] < 0:
        raise ValueError(
            "Attention: a rolling cache must have causal=True and a left window, "
            f"got causal={c.causal}, window_size={c.window_size}"
        )
    return RollingCache(batch, min(max_length, c.window_size[0] + 1), *sizes, **storage)
