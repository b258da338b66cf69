"""Baselines of top-k: a stable sort, and torch.topk with unspecified order of ties."""

from __future__ import annotations

from torch import Tensor

from baselines._common import lacks


def sorted_top_k(
    scores: Tensor, k: int, *, mask: Tensor | None = None, sorted_by_index: bool = False
) -> tuple[Tensor, Tensor]:
    lacks(mask=mask is not None, sorted_by_index=sorted_by_index)
    values, index = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], index[..., :k]


def unstable_top_k(
    scores: Tensor, k: int, *, mask: Tensor | None = None, sorted_by_index: bool = False
) -> tuple[Tensor, Tensor]:
    lacks(mask=mask is not None, sorted_by_index=sorted_by_index)
    values, index = scores.topk(k)
    return values, index


BASELINES = {"top_k": {"sort": sorted_top_k, "aten": unstable_top_k}}
