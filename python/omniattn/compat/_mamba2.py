"""mamba-ssm 2.3: the scan of Mamba-2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.compat.causal_conv1d import boundaries

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
    """:func:`functional.ssd`; chunk_size changes nothing.

    Args:
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit: as there.
        chunk_size: of the kernels of mamba-ssm.
        initial_states: (B, H, P, N), at the start of each row.
        seq_idx: (B, T) int, the same number for the steps of one sequence, which lie next to each
            other; a sequence starts from zeros, or from `initial_states` at the start of a row.
        cu_seqlens: (S + 1,) int, B is 1: the boundaries of the sequences, which are those of
            seq_idx where it is given. mamba-ssm reads them for the states alone.
        return_final_states: whether to return the states at the ends of the rows.
        return_varlen_states: whether to return those of the sequences of `cu_seqlens`.
        state_dtype: of the returned states, default: that of x.

    Returns:
        y (B, T, H, P), or a tuple of it, the final states (B, H, P, N) and those of the sequences
        (S, H, P, N), the latter two where they are asked for.
    """
    op = "mamba_chunk_scan_combined"
    if return_varlen_states and cu_seqlens is None:
        raise ValueError(f"{op}: cu_seqlens must be given where return_varlen_states=True")
    if seq_idx is not None and tuple(seq_idx.shape) != tuple(x.shape[:2]):
        raise ValueError(
            f"{op}: seq_idx must have shape (B, T), got seq_idx.shape={tuple(seq_idx.shape)}, "
            f"x.shape={tuple(x.shape)}"
        )
    if cu_seqlens is not None and initial_states is not None:
        raise ValueError(f"{op}: initial_states must be None where cu_seqlens are given")
    options: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    rows, state, bounds = [x, dt, B, C], initial_states, cu_seqlens
    last: Any = slice(None) if cu_seqlens is None else slice(-1, None)
    if cu_seqlens is None and seq_idx is not None:
        bounds = boundaries(seq_idx)
        rows = [t.flatten(0, 1)[None] for t in rows]
        z = None if z is None else z.flatten(0, 1)[None]
        last = torch.searchsorted(bounds, _ends(x)) - 1
        if state is not None:  # of the first sequence of each row; others start from zeros
            first = nnf.pad(last[:-1] + 1, (1, 0))
            zeros = state.new_zeros(len(bounds) - 1, *state.shape[1:])
            state = zeros.index_copy(0, first, state)
    own, steps, keys, queries = rows
    y, states = functional.ssd(
        own,
        steps,
        A,
        keys,
        queries,
        z=z,
        dt_limit=dt_limit,
        initial_state=state,
        cu_seqlens=bounds,
        **options,
    )
    y, states = y.view(x.shape), states.to(state_dtype or x.dtype)
    wanted = (y, *(states[last],) * return_final_states, *(states,) * return_varlen_states)
    return y if len(wanted) == 1 else wanted


def _ends(x: Tensor) -> Tensor:
    """The ends of the rows of (B, T, ...) in one row of B T steps."""
    return torch.arange(1, x.shape[0] + 1, device=x.device) * x.shape[1]
