"""recurrence: matrix states over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from omniattn import reference
from omniattn.ops.derivatives import recurrence_tangents
from omniattn.ops.dispatch.autograd import DifferentiableOp, Op
from omniattn.ops.dispatch.chunks import in_chunks
from omniattn.ops.dispatch.library import CONSTANTS
from omniattn.ops.dispatch.names import like_or_wide, state_slots
from omniattn.ops.dispatch.pieces import Pieces
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.precision import compute_dtype
from omniattn.reference.recurrences.decayed_sum import decayed_sum as definition_of_sum

__all__ = ["FEATURE_MAPS", "decayed_sum", "recurrence"]

#: Feature maps of the kernels, in the order of their numbers in csrc/semantics/linear_attention.h.
FEATURE_MAPS = ("identity", "elu1", "relu", "squared_relu", "exp")


def _states(rows: int, q: Tensor, v: Tensor, normalize: bool) -> Tensor:
    width = v.shape[3] + normalize
    return q.new_empty((rows, v.shape[2], q.shape[3], width), dtype=compute_dtype(q))


def _final_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, normalize: bool) -> Tensor:
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _states(rows, q, v, normalize)


def _chunk_starts(
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
) -> Tensor:
    """Returns the saved states, at the starts of chunks."""
    of_channels = gv is not None or (g is not None and g.dim() == 4)
    name = "recurrence_chunk_of_channel_decay" if of_channels else "recurrence_chunk"
    return _states(state_slots(q, cu_seqlens, CONSTANTS[name]), q, v, normalize)


_ARGUMENTS = (
    *("q", "k", "v", "g", "beta", "bonus", "a", "b", "skip", "min_denominator", "gv"),
    *("initial_state", "cu_seqlens", "scale", "delta", "feature_map", "normalize", "eps"),
    "fp32_output",
)


def _by_name(args: Sequence[Any]) -> dict[str, Any]:
    """Returns the arguments of reference.recurrence."""
    given = dict(zip(_ARGUMENTS, args, strict=True))
    return given | {"feature_map": FEATURE_MAPS[given["feature_map"]]}


def _formula(*args: Any) -> tuple[Tensor, Tensor]:
    return reference.recurrence(**_by_name(args))


#: (q, k, v, g, beta, bonus, a, b, skip, min_denominator, gv, initial_state, cu_seqlens, scale,
#: delta, feature_map, normalize, eps, fp32_output) -> (o, final_state), as reference.recurrence:
#: beta multiplies v, or with `delta` the difference of v and the state's prediction; skip * v is
#: added to outputs; `normalize` divides them by sums of weights, with `min_denominator` and eps;
#: `fp32_output`: outputs of half types are in float32.
recurrence = DifferentiableOp(
    "recurrence",
    fakes={
        "o": lambda v, fp32_output: v.new_empty(
            v.shape, dtype=compute_dtype(v) if fp32_output else v.dtype
        ),
        "final_state": _final_state,
        "states": _chunk_starts,
        "dg": lambda q, g: like_or_wide(g, q),
        "dbeta": lambda q, beta: like_or_wide(beta, q),
        "dbonus": lambda q, bonus: like_or_wide(bonus, q),
        "dskip": lambda q, skip: like_or_wide(skip, q),
        "dmin_denominator": lambda q, min_denominator: like_or_wide(min_denominator, q),
        "dgv": lambda q, gv: like_or_wide(gv, q),
        "dinitial_state": lambda q, v, cu_seqlens, normalize: _final_state(
            q, v, cu_seqlens, normalize
        ),
    },
    private=("states",),
    formula=_formula,
    pieces=lambda *args: _pieces(*args),
    fold=Fold(
        (
            *("q", "k", "v", "g", "beta", "bonus", "a", "b", "skip", "min_denominator", "gv"),
            "initial_state",
        ),
        when=lambda cu_seqlens: cu_seqlens is None,
    ),
)


def _by_kernels(*args: Any) -> tuple[Tensor, Tensor]:
    return recurrence(*args) if recurrence_tangents.applies(_by_name(args)) else _formula(*args)


_in_chunks = in_chunks(
    "recurrence",
    _by_kernels,
    ("q", "k", "v", "g", "beta", "a", "b", "min_denominator", "gv"),
    ("bonus", "skip"),
    tokens=recurrence_tangents.tokens,
)


def _pieces(*args: Any) -> Pieces | None:
    values, pieces = _by_name(args), _in_chunks(*args)
    if pieces is None and recurrence_tangents.applies(values):
        return recurrence_tangents.tangent_pieces(_call, values, recurrence.schema.tensors)
    return pieces


def _call(values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Calls the op with the arguments of reference.recurrence."""
    values = values | {"feature_map": FEATURE_MAPS.index(values["feature_map"])}
    found: tuple[Tensor, Tensor] = recurrence(*(values[n] for n in _ARGUMENTS))
    return found


def _formula_of_sum(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    k, v, g, beta, gv, feature_map, *how = args
    return definition_of_sum(k, v, g, beta, gv, FEATURE_MAPS[feature_map], *how)


#: (k, v, g, beta, gv, feature_map, from_start, before_own) -> (sum, decay, value_decay), as the
#: definition; no gradient
decayed_sum = Op(
    "decayed_sum",
    fakes={
        "sum": lambda k, v: _states(k.shape[0], k, v, False),
        "decay": lambda k, v: _states(k.shape[0], k, v, False)[..., 0],
        "value_decay": lambda k, v, gv: k.new_empty(
            0 if gv is None else (v.shape[0], *v.shape[2:]), dtype=compute_dtype(k)
        ),
    },
    formula=_formula_of_sum,
)
