"""Functions of positions in layers: a score_mod and a mask that is a function, with a cache too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.functional.masks import Mask
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod, masked_by
from omniattn.modules.caches.cache import Cache, with_cache

Attend = Callable[..., Any]


def with_positions(
    cache: Cache,
    k: Tensor,
    mask: Tensor | Mask | MaskMod | None,
    score_mod: ScoreMod | None,
    attend: Attend,
    positional: bool = False,
) -> tuple[Tensor | Mask | None, ScoreMod | None, Attend]:
    """Returns the mask, the score_mod by token positions and the attention function of a call whose
    keys are a cache's views k (B, S, ...). `positional` is True if other parts of the scores depend
    on positions."""
    if mask is not None and not isinstance(mask, (Tensor, Mask)):
        score_mod, mask = masked_by(mask, score_mod), None
    mask = with_cache(cache, mask, positional or score_mod is not None)
    if score_mod is None:
        return mask, None, attend
    # q becomes the position among the keys, as the caller of a layer counts. The number of keys is
    # an input of the traced function, so that each step reuses the same trace.
    sizes = torch.full((k.shape[0],), k.shape[1], device=k.device)
    first = cache.first(k.shape[1])
    if first is not None:
        score_mod = _moved(score_mod, first)
    return mask, score_mod, partial(functional.attention_cached, cache_seqlens=sizes)


def _moved(score_mod: ScoreMod, first: Tensor) -> ScoreMod:
    """Returns score_mod with queries and keys counted from position first[b]."""

    def moved(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score_mod(score, b, h, q + first[b], k + first[b])

    return moved
