"""recurrence: the matrix state of linear attention, retention and the delta rules."""

from __future__ import annotations

from torch import Tensor

from omniattn import reference
from omniattn.ops._autograd import DifferentiableOp
from omniattn.ops._vmap import Fold
from omniattn.reference.precision import compute_dtype

__all__ = ["recurrence"]


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


#: Steps from one saved state to the next, as in csrc/kernels/recurrence/recurrence.h.
_STATE_STEPS = 64


def _final_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    shape = (_sequences(q, cu_seqlens), v.shape[2], q.shape[-1], v.shape[-1])
    return v.new_empty(shape, dtype=compute_dtype(v))


def _states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    batch, steps = q.shape[:2]
    if cu_seqlens is None:
        slots = batch * ((steps + _STATE_STEPS - 1) // _STATE_STEPS)
    else:
        slots = steps // _STATE_STEPS + cu_seqlens.shape[0] - 1
    return v.new_empty((slots, v.shape[2], q.shape[-1], v.shape[-1]), dtype=compute_dtype(v))


#: (q, k, v, g, beta, initial_state, cu_seqlens, scale) -> (o, final_state)
recurrence = DifferentiableOp(
    "recurrence",
    fakes={
        "o": lambda v: v.new_empty(v.shape),
        "final_state": _final_state,
        "states": _states,
    },
    private=("states",),
    formula=reference.recurrence,
    fold=Fold(
        ("q", "k", "v", "g", "beta", "initial_state"), when=lambda cu_seqlens: cu_seqlens is None
    ),
)
