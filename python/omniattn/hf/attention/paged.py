"""Attention on the paged cache of transformers' continuous batching (`generate_batch`).

The queries of all requests are packed in one row, and so are the keys read from their pages. No
mask and no copy of keys per head is made.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    PagedAttentionCache,
)
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

from omniattn.functional import attention_varlen

__all__ = ["accept_continuous_batching", "is_paged", "paged_attention"]


def is_paged(cache: PagedAttentionCache | None, given: dict[str, Any]) -> bool:
    """Returns True if a call of attention is part of continuous batching.

    Up to transformers 5.23 the call passes the cache; since 5.24 the layer updates the cache, whose
    indices remain in the keywords.
    """
    return isinstance(cache, PagedAttentionCache) or given.get("write_index") is not None


@torch.compiler.disable  # the cache updates views of its tensor in place
def _update(
    cache: PagedAttentionCache, key: Tensor, value: Tensor, layer: int, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns all keys and values; puts the layer type's cumulative lengths into `given`."""
    keys, values = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=given)
    return keys, values


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedAttentionCache | None,
    cu_seq_lens_q: Tensor,
    *,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    """Computes attention of the new tokens of several requests, each to its own request's keys.

    Args:
        module: the calling layer.
        query: (1, Hq, total, D).
        key: (1, Hkv, total, D) of the new tokens, to be added to the cache; without a cache,
            (1, Hkv, total keys, D) of all tokens.
        value: (1, Hkv, total or total keys, Dv).
        cache: holds the earlier keys and values; None if the layer has already updated it.
        cu_seq_lens_q: cumulative lengths of the requests in query.
        scale, softcap, sinks: see :func:`omniattn.functional.attention`.
        kwargs: keywords from the batching manager, with the cache's indices.

    Returns:
        (1, total, Hq, Dv).
    """
    layer: Any = module.layer_idx
    if cache is not None:
        key, value = _update(cache, key, value, layer, kwargs)
    config: Any = module.config
    slides = layer in group_layers_by_attn_type(config).get("sliding_attention", ())
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention_varlen(
        q,
        k,
        v,
        cu_seq_lens_q,
        kwargs["cu_seq_lens_k"],
        kwargs["max_length_q"],
        kwargs["max_length_k"],
        causal=True,
        window_size=(config.sliding_window - 1 if slides else -1, -1),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
    )
    return out[None]


@functools.cache
def accept_continuous_batching(is_ours: Any) -> None:
    """Makes continuous batching keep our attention.

    transformers compares the implementation's name with a fixed list and has no hook.
    """
    kind: Any = ContinuousBatchingManager
    switch = kind.switch_to_cb_friendly_attn

    @functools.wraps(switch)
    def switch_to_cb_friendly_attn(
        self: Any, model: PreTrainedModel, *args: Any, **kwargs: Any
    ) -> None:
        if not is_ours(model.config._attn_implementation):
            switch(self, model, *args, **kwargs)

    kind.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
