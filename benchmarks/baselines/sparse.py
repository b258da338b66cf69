"""Baselines of attention patterns: torch's kernel with a dense mask."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import Tensor

from baselines._common import lacks
from baselines.attention import sdpa_attention
from omniattn import reference
from omniattn.functional import masks

_WINDOW = ("kernel_size", "stride", "dilation", "is_causal")


@functools.cache
def _neighborhood(shape: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> Tensor:
    tokens = math.prod(shape)
    return masks.GridNeighborhood(shape, **dict(options)).dense(tokens, tokens)


def masked_neighborhood(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, **options: Any
) -> Tensor:
    lacks(lse=options.pop("return_lse", False))
    last = query.dim() - 3
    shape = tuple(query.shape[1 : last + 1])
    mask = _neighborhood(shape, tuple((n, options[n]) for n in _WINDOW if n in options))
    q, k, v = (t.flatten(1, last) for t in (query, key, value))
    return sdpa_attention(q, k, v, mask=mask.to(q.device), scale=scale).unflatten(1, shape)


@functools.cache
def _hubs(tq: int, tk: int, options: tuple[tuple[str, Any], ...]) -> Tensor:
    return masks.hub_spoke(**dict(options)).dense(tq, tk)


@functools.cache
def _representatives(tq: int, tk: int, options: tuple[tuple[str, Any], ...]) -> Tensor:
    return masks.deterministic_sparse(**dict(options)).dense(tq, tk)


def masked_hubs(
    q: Tensor, k: Tensor, v: Tensor, *, dual: str | None = None, **options: Any
) -> Tensor:
    lacks(dual=dual)
    mask = _hubs(q.shape[1], k.shape[1], tuple(options.items()))
    return sdpa_attention(q, k, v, mask=mask.to(q.device))


def masked_representatives(
    q: Tensor, k: Tensor, v: Tensor, *, representative: str = "token", **options: Any
) -> Tensor:
    lacks(means=representative == "mean")
    mask = _representatives(q.shape[1], k.shape[1], tuple(options.items()))
    return sdpa_attention(q, k, v, mask=mask.to(q.device))


BASELINES = {
    **{name: {"aten": masked_neighborhood} for name in ("na1d", "na2d", "na3d")},
    "longformer_attention": {"eager": reference.longformer_attention},
    "bigbird_attention": {"eager": reference.bigbird_attention},
    "hub_spoke_attention": {"aten": masked_hubs, "eager": reference.hub_spoke_attention},
    "detsa_attention": {"aten": masked_representatives},
    "dual_chunk_attention": {"eager": reference.dual_chunk_attention},
    "local_strided_attention": {"eager": reference.local_strided_attention},
}
