"""dsa_indexer: the keys with the largest scores of the lightning indexer, for each query."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops._autograd import Op
from omniattn.ops._vmap import Fold
from omniattn.reference.precision import compute_dtype

__all__ = ["dsa_indexer"]


def _index(q: Tensor, topk: int) -> Tensor:
    return q.new_empty((*q.shape[:2], topk), dtype=torch.int32)


def _scores(q: Tensor, topk: int, return_scores: bool) -> Tensor:
    return q.new_empty((*q.shape[:2], topk) if return_scores else 0, dtype=compute_dtype(q))


def _formula(
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    key_padding: Tensor | None,
    topk: int,
    causal: bool,
    relu: bool,
    recent: bool,
    return_scores: bool,
) -> tuple[Tensor, Tensor]:
    """The op in plain torch, from its own arguments."""
    index, scores = reference.dsa_indexer(
        q,
        k,
        w,
        topk,
        causal=causal,
        activation="relu" if relu else None,
        tie="recent" if recent else "first",
        key_padding=key_padding,
        return_scores=True,
    )
    return index, scores


#: (q, k, w, key_padding, topk, causal, relu, recent, return_scores) -> (index, scores); no gradient
dsa_indexer = Op(
    "dsa_indexer",
    fakes={"index": _index, "scores": _scores},
    formula=_formula,
    fold=Fold(("q", "k", "w", "key_padding"), when=lambda return_scores: bool(return_scores)),
)
