"""Baselines of the lightning indexer and its loss, with all scores in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baselines._common import lacks
from omniattn import reference


def _scores(q: Tensor, k: Tensor, w: Tensor | None, causal: bool, activation: str | None) -> Tensor:
    products = torch.einsum("bthd,bsd->bths", q, k)
    if activation == "relu":
        products = products.relu()
    scores = products.sum(2) if w is None else torch.einsum("bths,bth->bts", products, w)
    if not causal:
        return scores
    tq, tk = q.shape[1], k.shape[1]
    future = torch.arange(tk) > torch.arange(tk - tq, tk)[:, None]
    return scores.masked_fill(future.to(scores.device), -torch.inf)


def dense_indexer(
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    topk: int,
    *,
    causal: bool = True,
    activation: str | None = "relu",
    tie: str = "first",
    key_padding: Tensor | None = None,
    sorted_by_index: bool = False,
    return_scores: bool = False,
    key_stride: int = 1,
    past: int | None = None,
) -> Tensor:
    """Selects keys by torch.topk, with unspecified order of ties and no -1 for missing keys."""
    lacks(recent=tie != "first", padding=key_padding is not None, order=sorted_by_index)
    lacks(windows=key_stride > 1 or past is not None)
    lacks(scores=return_scores, missing_keys=topk > k.shape[1])
    return _scores(q, k, w, causal, activation).topk(topk, dim=-1).indices.int()


def dense_loss(
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor | None,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> Tensor:
    lacks(halves=q_idx.dtype in (torch.bfloat16, torch.float16))
    return reference.dsa_indexer_loss(q_idx, k_idx, w, q, k, lse, indices, **options)


BASELINES = {"dsa_indexer": {"aten": dense_indexer}, "dsa_indexer_loss": {"eager": dense_loss}}
