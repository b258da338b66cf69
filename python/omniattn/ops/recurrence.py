"""recurrence: matrix states over time."""

from __future__ import annotations

from torch import Tensor

from omniattn import reference
from omniattn.ops._autograd import DifferentiableOp
from omniattn.ops._vmap import Fold
from omniattn.reference.precision import compute_dtype

__all__ = ["recurrence"]


def _states(rows: int, q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((rows, v.shape[2], q.shape[3], v.shape[3]), dtype=compute_dtype(q))


def _final_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return _states(q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, q, v)


def _chunk_starts(q: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """As recurrence_slots in csrc/kernels/recurrence/recurrence.h."""
    chunk = 16 if g is not None and g.dim() == 4 else 32
    batch, steps = q.shape[:2]
    if cu_seqlens is None:
        return _states(batch * ((steps + chunk - 1) // chunk), q, v)
    return _states(steps // chunk + cu_seqlens.shape[0] - 1, q, v)


#: (q, k, v, g, beta, bonus, a, b, skip, initial_state, cu_seqlens, scale, delta)
#: -> (o, final_state), as reference.recurrence: beta multiplies v, or with `delta` what the state
#: lacks of it; skip * v is added to outputs.
recurrence = DifferentiableOp(
    "recurrence",
    fakes={
        "o": lambda v: v.new_empty(v.shape),
        "final_state": _final_state,
        "states": _chunk_starts,
        "dinitial_state": lambda q, v, cu_seqlens: _final_state(q, v, cu_seqlens),
    },
    private=("states",),
    formula=reference.recurrence,
    fold=Fold(
        ("q", "k", "v", "g", "beta", "bonus", "a", "b", "skip", "initial_state"),
        when=lambda cu_seqlens: cu_seqlens is None,
    ),
)
