"""dsa_indexer: each query's keys with the largest lightning indexer scores; and its loss."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops.dispatch.autograd import DifferentiableOp, Op
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.ops.dispatch.library import CONSTANTS
from omniattn.ops.dispatch.names import like_or_wide
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.precision import compute_dtype

__all__ = ["dsa_indexer", "dsa_indexer_loss"]

#: Number of statistics per query that the backward needs in addition to p.
_KEPT = CONSTANTS["indexer_loss_kept"]


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
    """Computes the op in plain torch from its own arguments."""
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


def _kept(q_idx: Tensor, indices: Tensor | None) -> Tensor:
    count = 0 if indices is None else indices.shape[2]
    return q_idx.new_empty((*q_idx.shape[:2], _KEPT + count), dtype=compute_dtype(q_idx))


def _loss_formula(
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor | None,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    indices: Tensor | None,
    key_padding: Tensor | None,
    scale: float,
    causal: bool,
    relu: bool,
) -> Tensor:
    return reference.dsa_indexer_loss(
        *(q_idx, k_idx, w, q, k, lse, indices),
        scale=scale,
        causal=causal,
        activation="relu" if relu else None,
        key_padding=key_padding,
    )


_BATCH = ("q_idx", "k_idx", "w", "q", "k", "lse", "indices", "key_padding")

#: (q_idx, k_idx, w, q, k, lse, indices, key_padding, scale, causal, relu) -> loss
dsa_indexer_loss = DifferentiableOp(
    "dsa_indexer_loss",
    fakes={
        "loss": lambda q_idx: q_idx.new_empty(q_idx.shape[:2], dtype=compute_dtype(q_idx)),
        "kept": _kept,
    },
    private=("kept",),
    backward_op=BackwardOp(
        "dsa_indexer_loss_backward",
        fakes={"dw": lambda q_idx, w: like_or_wide(w, q_idx)},
        fold=Fold((*_BATCH, "kept")),
    ),
    formula=_loss_formula,
    fold=Fold(_BATCH),
)
