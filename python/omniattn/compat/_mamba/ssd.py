"""mamba-ssm's Mamba-2 scan, with sequences separated by seq_idx."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import is_traced, require_int, require_integers, require_shape, shown
from omniattn.compat._errors import (
    errors_of,
    require_flags,
    require_index,
    require_real,
    require_state_dtype,
)
from omniattn.compat.causal_conv1d import boundaries
from omniattn.functional.recurrences._common import require_numbers_of_rows, widened
from omniattn.functional.state_space.ssd import require_heads

__all__ = ["mamba_chunk_scan_combined"]


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Computes :func:`functional.ssd` in the widest dtype of x, B, C and z.

    Args:
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit: as there, each of any floating-point
            dtype.
        chunk_size: chunk size of mamba-ssm's kernels; has no effect.
        initial_states: (B, H, P, N), at the start of each row.
        seq_idx: (B, T) int, sequence index of each step; the steps of a sequence are contiguous. A
            sequence starts from zeros, or from `initial_states` at the start of a row.
        cu_seqlens: (S + 1,) int, boundaries of the sequences whose states are returned; requires
            B = 1. As in mamba-ssm, they are used only with `return_varlen_states` and do not
            separate sequences in y; only seq_idx does. If given, seq_idx must change at them.
        return_final_states: if True, returns the states at the ends of the rows.
        return_varlen_states: if True, returns the final states of the sequences of `cu_seqlens`,
            each starting from zeros; `initial_states` must be None.
        state_dtype: dtype of the returned states; None for fp32 (fp64 for fp64).

    Returns:
        y (B, T, H, P) of x's dtype, or a tuple of y, the final states (B, H, P, N) and the final
        states of the sequences (S, H, P, N), the latter two if requested.
    """
    op = "mamba_chunk_scan_combined"
    require_flags(
        op,
        dt_softplus=dt_softplus,
        return_final_states=return_final_states,
        return_varlen_states=return_varlen_states,
    )
    require_int(op, "chunk_size", chunk_size, 1)
    require_state_dtype(op, state_dtype)
    if return_varlen_states and cu_seqlens is None:
        raise ValueError(
            f"{op}: cu_seqlens must be given where return_varlen_states=True, got cu_seqlens=None"
        )
    if return_varlen_states and initial_states is not None:
        raise ValueError(
            f"{op}: initial_states must be None where return_varlen_states=True, got "
            f"initial_states={shown(initial_states)}"
        )
    tensors = _promoted(op, x, dt, A, B, C, z)
    if cu_seqlens is not None:
        require_integers(op, "cu_seqlens", cu_seqlens)
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    y, states, bounds = scan_rows(op, tensors, seq_idx, initial_states, options)
    kept = []
    if return_final_states:
        kept.append(final_states(states, bounds, x))
    if return_varlen_states:
        assert cu_seqlens is not None
        require_numbers_of_rows(op, cu_seqlens, x, "x")
        if bounds is None:
            kept.append(_scan(op, "x", tensors, options, cu_seqlens=cu_seqlens)[1])
        else:
            kept.append(_of_sequences(op, states, bounds, cu_seqlens))
    kept = [t.to(state_dtype or t.dtype) for t in kept]
    return (y.to(x.dtype), *kept) if kept else y.to(x.dtype)


def _promoted(
    op: str, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, z: Tensor | None
) -> dict[str, Tensor | None]:
    """Returns the arguments of `functional.ssd` by name, with x, B, C and z promoted to one dtype.

    First checks the tensors with a time dimension.
    """
    given = {"x": x, "B": B, "C": C} | ({} if z is None else {"z": z})
    require_real(op, **given, dt=dt)
    require_heads(op, x, B, C)
    require_shape(op, "dt", dt, tuple(x.shape[:3]))
    if z is not None:
        require_shape(op, "z", z, tuple(x.shape))
    dtype = reduce(torch.promote_types, (t.dtype for t in given.values()))
    return {"dt": dt, "A": A, "z": z} | {name: t.to(dtype) for name, t in given.items()}


def scan_rows(
    op: str,
    tensors: dict[str, Tensor | None],
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    options: dict[str, Any],
    x_name: str = "x",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes y, the final states, and with seq_idx the boundaries in one row of B T steps.

    There is one state per row, or per sequence if seq_idx is given.
    """
    x, keys = tensors["x"], tensors["B"]
    assert x is not None and keys is not None
    if initial_states is not None:
        shape = (len(x), *x.shape[2:], keys.shape[-1])
        initial_states = widened(op, "initial_states", initial_states, x, (shape,), x_name)
    if seq_idx is not None:
        require_index(op, "seq_idx", seq_idx, tuple(x.shape[:2]), x, x_name)
    if seq_idx is None or x.shape[1] == 0:
        return *_scan(op, x_name, tensors, options, initial_state=initial_states), None
    bounds = boundaries(op, seq_idx)
    if initial_states is not None:  # for each row's first sequence; others start from zeros
        first = torch.searchsorted(bounds, _ends(x) - x.shape[1])
        zeros = initial_states.new_zeros(len(bounds) - 1, *initial_states.shape[1:])
        initial_states = zeros.index_copy(0, first, initial_states)
    rows = {
        name: t if t is None or name == "A" else t.flatten(0, 1)[None]
        for name, t in tensors.items()
    }
    more = {"initial_state": initial_states, "cu_seqlens": bounds}
    y, states = _scan(op, x_name, rows, options, **more)
    return y.view(x.shape), states, bounds


def _scan(
    op: str,
    x_name: str,
    tensors: dict[str, Tensor | None],
    options: dict[str, Any],
    **more: Tensor | None,
) -> tuple[Tensor, Tensor]:
    call: Callable[..., tuple[Tensor, Tensor]] = functional.ssd
    with errors_of(op, x=x_name):
        return call(**tensors, **options, **more)


def _of_sequences(op: str, states: Tensor, bounds: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Selects the states of the sequences at `cu_seqlens` from the states at `bounds`."""
    wanted = cu_seqlens.to(bounds)
    if not is_traced():
        inside = bounds[(bounds >= wanted[0]) & (bounds <= wanted[-1])]
        if not torch.equal(inside, wanted.unique_consecutive()):
            raise ValueError(
                f"{op}: cu_seqlens must be where seq_idx changes, got cu_seqlens="
                f"{shown(cu_seqlens)} and changes at {shown(bounds)}"
            )
    at = (torch.searchsorted(bounds, wanted[1:]) - 1).clamp(min=0)
    empty = wanted[1:] == wanted[:-1]
    return torch.where(empty.view(-1, 1, 1, 1), 0, states[at])


def final_states(states: Tensor, bounds: Tensor | None, x: Tensor) -> Tensor:
    """Selects the states of `scan_rows` at the ends of the rows of x (B, T, ...)."""
    return states if bounds is None else states[torch.searchsorted(bounds, _ends(x)) - 1]


def _ends(x: Tensor) -> Tensor:
    """Returns the ends of the rows of (B, T, ...) in one row of B T steps."""
    return torch.arange(1, x.shape[0] + 1, device=x.device) * x.shape[1]
