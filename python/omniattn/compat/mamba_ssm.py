"""mamba-ssm 2: selective scans with the channels before the steps, their step in place, and the
scan of Mamba-2."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.compat.causal_conv1d import boundaries, require_real
from omniattn.functional._checks import (
    is_traced,
    require_distinct,
    require_float,
    require_integers,
    require_rows,
    require_shape,
    require_tensor,
    shown,
    widen,
)

__all__ = [
    "mamba_chunk_scan_combined",
    "selective_scan_fn",
    "selective_scan_ref",
    "selective_state_update",
]


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`functional.selective_scan` of u (B, D, T).

    Args:
        u, delta, z: (B, D, T); steps next to each other in memory are copied.
        A: (D, N), real or complex.
        B, C: (B, N, T), (B, G, N, T) or (D, N); with a complex A the last dimension of those that
            vary is 2 T, real and imaginary parts in turn. Where both vary, they have the same G.
        D, delta_bias: (D,).
        delta_softplus: whether dt is softplus(delta + delta_bias).
        return_last_state: whether to return (y, last state) in place of y, both with gradients.
        backend: of functional.selective_scan.

    Returns:
        y (B, D, T) of u's dtype, or with the last state (B, D, N) in fp32 (fp64 for fp64). Tensors
        of several dtypes are computed in the widest one.
    """
    op = "selective_scan_fn"
    _require(op, 0, u=u, delta=delta, A=A, B=B, C=C)
    require_real(op, u=u, delta=delta, z=z)
    for name, t in (("u", u), ("delta", delta), ("z", z)):
        if t is not None and t.ndim != 3:
            raise ValueError(
                f"{op}: {name} must have shape (B, D, T), got {name}.shape={tuple(t.shape)}"
            )

    def rows(name: str, w: Tensor) -> Tensor:
        if w.ndim == 2:
            return w
        if w.ndim not in (3, 4):
            raise ValueError(
                f"{op}: {name} must have shape (B, N, T), (B, G, N, T) or (D, N), got "
                f"{name}.shape={tuple(w.shape)}"
            )
        if A.is_complex() and not w.is_complex():
            if w.shape[-1] != 2 * u.shape[2]:
                raise ValueError(
                    f"{op}: {name} must have 2 T={2 * u.shape[2]} as its last size with a complex "
                    f"A, got {name}.shape={tuple(w.shape)}"
                )
            w = torch.view_as_complex(widen(w).unflatten(-1, (-1, 2)).contiguous())
        return w.movedim(-1, 1)

    y, state = _scan(
        u.mT,
        delta.mT,
        A,
        rows("B", B),
        rows("C", C),
        D,
        None if z is None else z.mT,
        delta_bias,
        delta_softplus,
        None,
        backend,
    )
    return (y.mT, state) if return_last_state else y.mT


def selective_scan_ref(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_scan_fn` by the eager definition, one step after another."""
    return selective_scan_fn(
        u,
        delta,
        A,
        B,
        C,
        D,
        z,
        delta_bias,
        delta_softplus,
        return_last_state,
        backend="reference",
    )


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """The step x that follows `state`, which is updated in place, without gradients: for inference.

    Args:
        state: (B, D, N), or (B, H, D, N) with heads; of any floating-point dtype. With
            `state_batch_indices` its first size is that of a pool.
        x, dt, z: (B, D), or (B, H, D).
        A: (D, N), or (H, D, N).
        B, C: (B, N), or (B, G, N) with heads, of which head h reads group h // (H / G).
        D, dt_bias: (D,), or (H, D).
        dt_softplus: whether dt is softplus(dt + dt_bias).
        state_batch_indices: (B,) int, the rows of `state` that are read and written, each
            at most once.

    Returns:
        y of x's shape and dtype.
    """
    op = "selective_state_update"
    _require(op, 0, state=state, x=x, dt=dt)
    _require(op, 2, A=A, B=B, C=C)
    require_real(op, x=x, dt=dt, z=z, D=D, dt_bias=dt_bias)
    if state.is_complex() != A.is_complex():
        raise TypeError(
            f"{op}: state must be complex where A is, got state.dtype={state.dtype}, "
            f"A.dtype={A.dtype}"
        )
    if x.ndim not in (2, 3) or state.ndim != x.ndim + 1:
        raise ValueError(
            f"{op}: x must have shape (B, D) or (B, H, D) and state (B, D, N) or (B, H, D, N), got "
            f"x.shape={tuple(x.shape)}, state.shape={tuple(state.shape)}"
        )
    indices = None
    if state_batch_indices is not None:
        require_integers(op, "state_batch_indices", state_batch_indices)
        indices = state_batch_indices.long()
        require_rows(op, "state_batch_indices", indices, len(state))
        require_distinct(op, "state_batch_indices", indices)
    own = state if indices is None else state[indices]
    if own.shape[:-1] != x.shape:
        raise ValueError(
            f"{op}: state must have the B and D of x, got state.shape={tuple(own.shape)}, "
            f"x.shape={tuple(x.shape)}"
        )
    shape, of_channels = tuple(x.shape), tuple(x.shape[1:])
    require_shape(op, "A", A, tuple(own.shape[1:]))
    for name, t, sizes in (
        ("dt", dt, shape),
        ("z", z, shape),
        ("D", D, of_channels),
        ("dt_bias", dt_bias, of_channels),
    ):
        if t is not None:
            require_shape(op, name, t, sizes)
    heads = x.ndim == 3

    def channels(t: Tensor, first: int) -> Tensor:
        """(.., H, D) -> (.., H D)."""
        return t.flatten(first, first + 1) if heads else t

    y, after = _scan(
        channels(x, 1)[:, None],
        channels(dt, 1)[:, None],
        channels(A, 0),
        B[:, None],
        C[:, None],
        None if D is None else channels(D, 0),
        None if z is None else channels(z, 1)[:, None],
        None if dt_bias is None else channels(dt_bias, 0),
        dt_softplus,
        channels(own, 1),
        None,
    )
    with torch.no_grad():
        if indices is None:
            state.copy_(after.view(state.shape))
        else:
            state[indices] = after.view(own.shape).to(state.dtype)
    return y.view(x.shape)


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
        cu_seqlens: (S + 1,) int, B is 1: the boundaries of the sequences; where seq_idx is given
            too, it must change at them. mamba-ssm reads them for the states alone.
        return_final_states: whether to return the states at the ends of the rows.
        return_varlen_states: whether to return those of the sequences of `cu_seqlens`.
        state_dtype: of the returned states; None for fp32 (fp64 for fp64), whatever x is.

    Returns:
        y (B, T, H, P), or a tuple of it, the final states (B, H, P, N) and those of the sequences
        (S, H, P, N), the latter two where they are asked for.
    """
    op = "mamba_chunk_scan_combined"
    if return_varlen_states and cu_seqlens is None:
        raise ValueError(f"{op}: cu_seqlens must be given where return_varlen_states=True")
    if cu_seqlens is not None and initial_states is not None:
        raise ValueError(f"{op}: initial_states must be None where cu_seqlens are given")
    _check_sequences(op, x, seq_idx, cu_seqlens)
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
    y, states = y.view(x.shape), states.to(state_dtype or states.dtype)
    wanted = (y, *(states[last],) * return_final_states, *(states,) * return_varlen_states)
    return y if len(wanted) == 1 else wanted


def _check_sequences(op: str, x: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if seq_idx is None:
        return
    require_integers(op, "seq_idx", seq_idx)
    if tuple(seq_idx.shape) != tuple(x.shape[:2]):
        raise ValueError(
            f"{op}: seq_idx must have shape (B, T), got seq_idx.shape={tuple(seq_idx.shape)}, "
            f"x.shape={tuple(x.shape)}"
        )
    if cu_seqlens is not None and len(x) == 1 and not is_traced():
        changes = boundaries(seq_idx)
        if not torch.equal(changes, cu_seqlens.to(changes).unique()):
            raise ValueError(
                f"{op}: cu_seqlens must be where seq_idx changes, got cu_seqlens="
                f"{shown(cu_seqlens)} and changes at {shown(changes)}"
            )


def _scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool | None,
    state: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """functional.selective_scan of (B, T, D), in the widest dtype of what varies."""
    if delta_softplus is None or delta_softplus in (0, 1):  # mamba-ssm passes None
        delta_softplus = bool(delta_softplus)
    given = (u, delta, B, C, *(() if z is None else (z,)))
    dtype = reduce(torch.promote_types, (t.dtype for t in given if _varies(t)))
    wide_u, wide_delta, B, C, *gate = (t.to(dtype) if _varies(t) else t for t in given)
    wide_z = gate[0] if gate else None
    y, final = functional.selective_scan(
        wide_u,
        wide_delta,
        A,
        B,
        C,
        D,
        wide_z,
        delta_bias,
        delta_softplus,
        initial_state=state,
        backend=backend,
    )
    return y.to(u.dtype), final


def _require(op: str, least: int, **tensors: Tensor) -> None:
    """Tensors with `least` dimensions, on which what follows relies."""
    for name, t in tensors.items():
        require_tensor(op, name, t)
        if t.ndim < least:
            raise ValueError(
                f"{op}: {name} must have at least {least} dimensions, got "
                f"{name}.shape={tuple(t.shape)}"
            )
        if not t.is_complex():
            require_float(op, name, t)


def _varies(t: Tensor) -> bool:
    """Whether t is real and has steps."""
    return t.ndim > 2 and not t.is_complex()


def _ends(x: Tensor) -> Tensor:
    """The ends of the rows of (B, T, ...) in one row of B T steps."""
    return torch.arange(1, x.shape[0] + 1, device=x.device) * x.shape[1]
