"""Attention on the cache of transformers' continuous batching, as `generate_batch` uses it.

The queries of all requests lie in one row, and so do the keys that each of them reads from its
pages. Neither a mask nor a copy of keys per head is made.
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
    """Whether a call of attention is one of continuous batching.

    Until transformers 5.23 it comes with the cache; since 5.24 the layers ask the cache, which
    leaves its indices in the keywords.
    """
    return isinstance(cache, PagedAttentionCache) or given.get("write_index") is not None


@torch.compiler.disable  # the cache updates views of its tensor in place
def _update(
    cache: PagedAttentionCache, key: Tensor, value: Tensor, layer: int, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The keys and values of all tokens; `given` gets their ends for this kind of layer."""
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
    """Attention of the new tokens of several requests to all keys of their own request.

    Args:
        module: the calling layer.
        query: (1, Hq, total, D).
        key: (1, Hkv, total, D) of the new tokens, which go into the cache; without a cache
            (1, Hkv, total keys, D) of all tokens.
        value: (1, Hkv, total or total keys, Dv).
        cache: has the other keys and values, if the layer has not asked it.
        cu_seq_lens_q: ends of the requests in query.
        scale, softcap, sinks: see :func:`omniattn.functional.attention`.
        kwargs: what the manager gives to the model; the cache reads its indices there.

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
    """Lets continuous batching keep a model's attention if it is ours.

    transformers compares its name with a list and has no hook for others.
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
