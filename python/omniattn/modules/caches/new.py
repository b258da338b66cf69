"""Constructors of caches for layers, which depend only on the protocol of caches.

Each function takes a layer, the weight that computes its keys, the sizes of the cache class, and
device and dtype of the storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import autocast_dtype
from omniattn.modules.base.state import State, Storage
from omniattn.modules.caches.cache import Cache, storage_like
from omniattn.modules.caches.compressed import CSAState
from omniattn.modules.caches.evicting import EvictingCache
from omniattn.modules.caches.eviction import Eviction, Window
from omniattn.modules.caches.forgetting import ForgettingCache
from omniattn.modules.caches.kv_cache import (
    BlockKeyCache,
    CrossCache,
    KVCache,
    LatentCache,
    PeriodicKeyCache,
)
from omniattn.modules.caches.path import PathCache
from omniattn.modules.caches.quantized import QuantizedCache, require_int8
from omniattn.modules.caches.queries import QueryCache
from omniattn.modules.caches.rolling import RollingCache
from omniattn.modules.caches.selective import SelectiveCache


def _like(
    layer: object,
    weight: Tensor,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Storage:
    """Returns device and dtype of a cache whose keys and values attention reads unconverted.

    The dtype must be that of the queries: the weight's, or autocast's.
    """
    given = weight.dtype if dtype is None or not weight.is_floating_point() else dtype
    if given not in (weight.dtype, autocast_dtype(weight)):
        raise TypeError(
            f"{type(layer).__name__}: dtype of new_state must be that of the parameters, or under "
            f"autocast its dtype, got dtype={dtype}, parameters of {weight.dtype}"
        )
    return storage_like(weight, device, dtype)


def keys_and_values(
    layer: object,
    weight: Tensor,
    batch: int,
    max_length: int,
    heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    kv_dtype: torch.dtype | None = None,
    **storage: Unpack[Storage],
) -> Cache:
    """Creates a cache of all tokens, which it stores in `kv_dtype`, int8, if it is given."""
    like = _like(layer, weight, **storage)
    require_int8(type(layer).__name__, kv_dtype)
    kind = KVCache if kv_dtype is None else QuantizedCache
    return kind(batch, max_length, heads, head_dim, v_head_dim=v_head_dim, **like)


def with_block_means(
    layer: object, weight: Tensor, *sizes: int, block_size: int, **storage: Unpack[Storage]
) -> Cache:
    """Creates a cache of all tokens and of the mean keys of blocks."""
    return BlockKeyCache(*sizes, block_size=block_size, **_like(layer, weight, **storage))


def with_period(
    layer: object, weight: Tensor, *sizes: int, period: int, **storage: Unpack[Storage]
) -> Cache:
    """Creates a cache of all tokens, for keys rotated by their positions modulo `period`."""
    return PeriodicKeyCache(*sizes, period=period, **_like(layer, weight, **storage))


def with_penalties(
    layer: object, weight: Tensor, *sizes: int, **storage: Unpack[Storage]
) -> SelectiveCache:
    """Creates a cache of all tokens and their penalties."""
    return SelectiveCache(*sizes, **_like(layer, weight, **storage))


def require_penalties(op: str, state: State | None) -> SelectiveCache | None:
    """Requires that `state` is a cache with penalties or None, and returns it."""
    if state is None or isinstance(state, SelectiveCache):
        return state
    raise TypeError(f"{op}: state must be a SelectiveCache, got type(state)={type(state).__name__}")


def require_corrections(op: str, state: State | None) -> KVCache | None:
    """Requires a cache of all tokens, whose values can be replaced, or None, and returns it."""
    if state is None or isinstance(state, KVCache):
        return state
    raise TypeError(f"{op}: state must be a KVCache, got type(state)={type(state).__name__}")


def with_factors(
    layer: object,
    weight: Tensor,
    batch: int,
    max_length: int,
    width: int,
    v_width: int,
    **storage: Unpack[Storage],
) -> Cache:
    """Creates a cache of the factors of all tokens' keys and values, rows of these widths."""
    return KVCache(
        batch, max_length, 1, width, v_head_dim=v_width, **_like(layer, weight, **storage)
    )


def with_gates(
    layer: object, weight: Tensor, *sizes: int, num_heads: int, **storage: Unpack[Storage]
) -> Cache:
    """Creates a cache of all tokens and their forget gates."""
    return ForgettingCache(*sizes, num_heads=num_heads, **_like(layer, weight, **storage))


def require_gates(state: State | None) -> ForgettingCache | None:
    """Requires that `state` is a cache with forget gates or None, and returns it."""
    if state is None or isinstance(state, ForgettingCache):
        return state
    raise TypeError(
        "Attention: state must be a ForgettingCache with forget_gate=True, "
        f"got type(state)={type(state).__name__}"
    )


def with_queries(
    layer: object, weight: Tensor, *sizes: int, num_heads: int, **storage: Unpack[Storage]
) -> Cache:
    """Creates a cache of all tokens and their queries."""
    return QueryCache(*sizes, num_heads=num_heads, **_like(layer, weight, **storage))


def require_queries(op: str, state: State | None) -> QueryCache | None:
    """Requires that `state` is a cache with queries or None, and returns it."""
    if state is None or isinstance(state, QueryCache):
        return state
    raise TypeError(f"{op}: state must be a QueryCache, got type(state)={type(state).__name__}")


def with_path(
    layer: object,
    weight: Tensor,
    *sizes: int,
    num_heads: int,
    taps: int,
    **storage: Unpack[Storage],
) -> Cache:
    """Creates a cache of all tokens whose keys every token changes."""
    return PathCache(*sizes, num_heads=num_heads, taps=taps, **_like(layer, weight, **storage))


def require_path(op: str, state: State | None) -> PathCache | None:
    """Requires that `state` is a cache of path attention or None, and returns it."""
    if state is None or isinstance(state, PathCache):
        return state
    raise TypeError(f"{op}: state must be a PathCache, got type(state)={type(state).__name__}")


def of_latents(layer: object, weight: Tensor, *sizes: int, **storage: Unpack[Storage]) -> Cache:
    """Creates a cache of latents: keys whose first columns are the values."""
    return LatentCache(*sizes, **_like(layer, weight, **storage))


def of_source(layer: object, weight: Tensor, **storage: Unpack[Storage]) -> Cache:
    """Creates a cache of a cross-attention source."""
    _like(layer, weight, **storage)
    return CrossCache()


def of_window(
    layer: object, weight: Tensor, *sizes: int, sort: bool = False, **storage: Unpack[Storage]
) -> Cache:
    """Creates a cache of the last tokens."""
    return RollingCache(*sizes, sort=sort, **_like(layer, weight, **storage))


def with_compressed_keys(
    layer: object,
    weight: Tensor,
    batch: int,
    max_length: int,
    sizes: dict[str, Any],
    **storage: Unpack[Storage],
) -> CSAState:
    """Creates caches of a window, of compressed keys, and of what the next ones read."""
    return CSAState(batch, max_length, **sizes, **_like(layer, weight, **storage))


def by_policy(
    layer: object,
    weight: Tensor,
    policies: Eviction | Sequence[Eviction],
    batch: int,
    max_length: int,
    heads: int,
    head_dim: int,
    **storage: Unpack[Storage],
) -> Cache:
    """Creates a cache of the tokens kept by a policy, or by one policy per head."""
    if isinstance(policies, Window):
        length = min(max_length, policies.size)
        return of_window(layer, weight, batch, length, heads, head_dim, **storage)
    like = _like(layer, weight, **storage)
    return EvictingCache(policies, batch, max_length, heads, head_dim, **like)
