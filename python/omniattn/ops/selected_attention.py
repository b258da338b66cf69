"""selected_attention: attention to keys in listed blocks."""

from __future__ import annotations

from torch import Tensor

from omniattn import reference
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.ops.dispatch.names import like_or_wide
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.precision import compute_dtype

__all__ = ["selected_attention"]


def _out(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _rows(q: Tensor) -> Tensor:
    batch, tq, heads, _ = q.shape
    return q.new_empty((batch, heads, tq), dtype=compute_dtype(q))


def _formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    sinks: Tensor | None,
    seed: Tensor | None,
    block_size: int,
    query_block: int,
    causal: bool,
    scale: float,
    softcap: float,
    dropout_p: float,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the op in plain torch from its own arguments."""
    return reference.selected_attention(
        q,
        k,
        v,
        indices,
        block_size=block_size,
        query_block=query_block,
        causal=causal,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        return_lse=True,
    )


#: Every batch entry has its own list; functions expand shared lists.
_BATCH = ("q", "k", "v", "indices")


def _undropped(seed: Tensor | None) -> bool:
    """Returns True without dropout: then nothing depends on the index of a batch entry."""
    return seed is None


#: (q, k, v, indices, sinks, seed, block_size, query_block, causal, scale, softcap, dropout_p)
#: -> (out, lse)
selected_attention = DifferentiableOp(
    "selected_attention",
    fakes={"out": _out, "lse": _rows, "lse_tail": _rows},
    private=("lse_tail",),
    backward_op=BackwardOp(
        "selected_attention_backward",
        fakes={"dsinks": lambda q, sinks: like_or_wide(sinks, q)},
        fold=Fold((*_BATCH, "out", "lse", "lse_tail"), when=_undropped),
    ),
    formula=_formula,
    fold=Fold(_BATCH, when=_undropped),
)
