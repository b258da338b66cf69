"""Scans: linear_scan, rwkv4, slstm, the gates of mLSTM, and the selective scan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops.derivatives.scans import (
    linear_scan_pieces,
    selective_chunk,
    selective_scan_pieces,
    selective_tokens,
)
from omniattn.ops.dispatch import library as _library
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.chunks import in_chunks
from omniattn.ops.dispatch.names import state_slots
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.precision import compute_dtype

__all__ = [
    "exponential_gates",
    "linear_scan",
    "rwkv4",
    "selective_scan",
    "selective_scan_inplace",
    "slstm",
    "ssd_inplace",
]


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _slots(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return state_slots(x, cu_seqlens, _library.CONSTANTS["scan_chunk"])


def _wkv_states(k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return k.new_empty((_slots(k, cu_seqlens), 4, k.shape[2]), dtype=compute_dtype(k))


def _wkv_state(k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return k.new_empty((_sequences(k, cu_seqlens), 3, k.shape[2]), dtype=compute_dtype(k))


#: (w, u, k, v, initial_state, cu_seqlens) -> (y, final_state)
rwkv4 = DifferentiableOp(
    "rwkv4",
    fakes={
        "y": lambda k: k.new_empty(k.shape),
        "final_state": _wkv_state,
        "states": _wkv_states,
        "dinitial_state": _wkv_state,
    },
    private=("states",),
    formula=reference.rwkv4,
    pieces=in_chunks("rwkv4", reference.rwkv4, ("k", "v")),
    fold=Fold(("k", "v", "initial_state"), when=lambda cu_seqlens: cu_seqlens is None),
)


def _linear_state(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty((_sequences(x, cu_seqlens), x.shape[2]), dtype=compute_dtype(x))


def _linear_states(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty((_slots(x, cu_seqlens), x.shape[2]), dtype=compute_dtype(x))


#: (x, g, initial_state, cu_seqlens) -> (y, final_state)
linear_scan: DifferentiableOp = DifferentiableOp(
    "linear_scan",
    fakes={
        "final_state": _linear_state,
        "states": _linear_states,
        "dinitial_state": _linear_state,
    },
    private=("states",),
    formula=reference.linear_scan,
    pieces=lambda *args: linear_scan_pieces(linear_scan, *args),
    fold=Fold(("x", "g", "initial_state"), when=lambda cu_seqlens: cu_seqlens is None),
)


def _gate_state(g: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return g.new_empty((_sequences(g, cu_seqlens), g.shape[2]))


#: (g, i, initial_state, cu_seqlens) -> (decay, factor, m, final_state)
exponential_gates = DifferentiableOp(
    "exponential_gates",
    fakes={"final_state": _gate_state, "dinitial_state": _gate_state},
    formula=reference.exponential_gates,
    fold=Fold(("g", "i", "initial_state"), when=lambda cu_seqlens: cu_seqlens is None),
)


def _slstm_state(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    shape = (_sequences(x, cu_seqlens), 4, *x.shape[3:])
    return x.new_empty(shape, dtype=compute_dtype(x))


def _slstm_trace(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], 7, *x.shape[3:]), dtype=compute_dtype(x))


#: (x, r, initial_state, cu_seqlens, exp_forget) -> (y, final_state)
slstm = DifferentiableOp(
    "slstm",
    fakes={
        "y": lambda x: x.new_empty((*x.shape[:2], *x.shape[3:])),
        "final_state": _slstm_state,
        "trace": _slstm_trace,
        "dinitial_state": _slstm_state,
    },
    private=("trace",),
    formula=lambda x, r, initial_state, cu_seqlens, exp_forget: reference.slstm(
        x,
        r,
        forget_gate="exp" if exp_forget else "sigmoid",
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    ),
    fold=Fold(("x", "initial_state"), when=lambda cu_seqlens: cu_seqlens is None),
)


def _selective_state(u: Tensor, B: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    shape = (_sequences(u, cu_seqlens), u.shape[2], B.shape[-1])
    return u.new_empty(shape, dtype=compute_dtype(u))


def _selective_states(u: Tensor, B: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    shape = (_slots(u, cu_seqlens), B.shape[-1], u.shape[2])
    return u.new_empty(shape, dtype=compute_dtype(u))


def _parameter_gradient(u: Tensor, parameter: Tensor | None) -> Tensor:
    """Returns an empty tensor without the parameter, of the dtype that it would have."""
    shape = (0,) if parameter is None else parameter.shape
    return u.new_empty(shape, dtype=compute_dtype(u))


def _selective_formula(
    u: Tensor,
    delta: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    delta_softplus: bool,
    paired: bool,
) -> tuple[Tensor, Tensor]:
    if A is None:
        return reference.longhorn_scan(u, delta, B, C, D, z, delta_bias, initial_state, cu_seqlens)

    def joined(x: Tensor) -> Tensor:
        # vmap does not support the gradients of torch.complex, which are views.
        return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())

    if paired:
        A, B, C = joined(A), joined(B), joined(C).conj() / 2
        initial_state = None if initial_state is None else joined(initial_state)
    y, state = reference.selective_scan(
        u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens, delta_softplus
    )
    return y, torch.view_as_real(state).flatten(-2) if paired else state


def _selective_chunk(*args: Any) -> tuple[Tensor, Tensor]:
    u, delta, A, B, C, _, _, _, initial_state, *_, paired = args
    if paired or A is None:
        return _selective_formula(*args)
    return selective_chunk(linear_scan, u, delta, A, B, C, initial_state)


_selective_chunks = in_chunks(
    *("selective_scan", _selective_chunk, ("u", "delta", "B", "C", "z")), tokens=selective_tokens
)
#: (u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens, delta_softplus, paired)
#: -> (y, final_state). If paired, A, B, 2 conj(C) and states are interleaved real and imaginary
#: parts. Without A it is longhorn_scan.
selective_scan: DifferentiableOp = DifferentiableOp(
    "selective_scan",
    fakes={
        "y": lambda u: u.new_empty(u.shape),
        "final_state": _selective_state,
        "states": _selective_states,
        "dinitial_state": _selective_state,
        # Empty without the argument, with the same dtype.
        "dA": lambda u, A: _parameter_gradient(u, A),
        "dD": lambda u, D: _parameter_gradient(u, D),
        "ddelta_bias": lambda u, delta_bias: _parameter_gradient(u, delta_bias),
    },
    private=("states",),
    formula=_selective_formula,
    pieces=lambda *args: selective_scan_pieces(selective_scan, _selective_chunks, *args),
    fold=Fold(
        ("u", "delta", "z", "initial_state"),
        when=lambda B, C, cu_seqlens: cu_seqlens is None and B.dim() == 2 and C.dim() == 2,
    ),
)

#: (u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus) -> y, with real states; and
#: (x, dt, A, B, C, D, z, dt_bias, initial_state, dt_softplus, least, largest) -> y. Each computes
#: one token and updates the states in place, without gradients.
selective_scan_inplace = torch.ops.omniattn.selective_scan_.default
ssd_inplace = torch.ops.omniattn.ssd_.default
for name in ("selective_scan_", "ssd_"):
    _library.register_fake(name)(lambda x, *_: x.new_empty(x.shape))
