"""mamba-ssm's selective scan (B, D, T) and its in-place step."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import (
    require_device,
    require_distinct,
    require_rows,
    require_shape,
    widen,
)
from omniattn.compat._errors import (
    errors_of,
    require_flags,
    require_form,
    require_index,
    require_numbers,
    require_optional,
    require_real,
    require_writable,
)

__all__ = ["selective_scan_fn", "selective_scan_ref", "selective_state_update"]


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
    """Computes :func:`functional.selective_scan` with u (B, D, T).

    Args:
        u, delta, z: (B, D, T); copied if T is contiguous in memory.
        A: (D, N), real or complex.
        B, C: (B, N, T), (B, G, N, T) or (D, N). With a complex A the last dimension of a B or C
            that varies over time is 2 T, with real and imaginary parts interleaved. If both vary,
            they have the same G.
        D, delta_bias: (D,).
        delta_softplus: True if dt is softplus(delta + delta_bias).
        return_last_state: if True, returns (y, last state) instead of y, both with gradients.
        backend: backend of functional.selective_scan.

    Returns:
        y (B, D, T) of u's dtype, or with the last state (B, D, N) in fp32 (fp64 for fp64). Mixed
        dtypes are promoted to the widest one.
    """
    require_flags("selective_scan_fn", return_last_state=return_last_state)
    y, state = _of_channels(
        "selective_scan_fn", u, delta, A, B, C, D, z, delta_bias, delta_softplus, backend
    )
    return (y, state) if return_last_state else y


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
    """Computes `selective_scan_fn` by the eager definition, step by step."""
    require_flags("selective_scan_ref", return_last_state=return_last_state)
    y, state = _of_channels(
        "selective_scan_ref", u, delta, A, B, C, D, z, delta_bias, delta_softplus, "reference"
    )
    return (y, state) if return_last_state else y


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
    """Computes one step x and updates `state` in place, without gradients, for inference.

    Args:
        state: (B, D, N), or (B, H, D, N) with heads; of any floating-point dtype. With
            `state_batch_indices` its first dimension is the size of a pool.
        x, dt, z: (B, D), or (B, H, D).
        A: (D, N), or (H, D, N).
        B, C: (B, N), or (B, G, N) with heads; head h uses group h // (H / G).
        D, dt_bias: (D,), or (H, D).
        dt_softplus: True if dt is softplus(dt + dt_bias).
        state_batch_indices: (B,) int, distinct rows of `state` to read and update.

    Returns:
        y of x's shape and dtype.
    """
    op = "selective_state_update"
    require_numbers(op, state=state, A=A, B=B, C=C)
    require_real(op, x=x, dt=dt)
    require_optional(op, z=z, D=D, dt_bias=dt_bias)
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
    require_device(op, "state", state, x)
    require_writable(op, "state", state)
    indices = None
    if state_batch_indices is not None:
        require_index(op, "state_batch_indices", state_batch_indices, (len(x),), x)
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
    for name, t, sizes in (
        ("A", A, tuple(own.shape[1:])),
        ("dt", dt, shape),
        ("z", z, shape),
        ("D", D, of_channels),
        ("dt_bias", dt_bias, of_channels),
    ):
        if t is not None:
            require_shape(op, name, t, sizes)
    heads = x.ndim == 3
    for name, t in (("B", B), ("C", C)):
        if t.ndim not in (2, 3) or (len(t), t.shape[-1]) != (len(x), A.shape[-1]):
            raise ValueError(
                f"{op}: {name} must have shape (B, N), or (B, G, N) with heads, got "
                f"{name}.shape={tuple(t.shape)}, state.shape={tuple(own.shape)}"
            )
        if t.ndim == 3:
            _require_divisor(op, name, t, x.shape[1] if heads else 1)

    def channels(t: Tensor, first: int) -> Tensor:
        """Maps (.., H, D) to (.., H D)."""
        return t.flatten(first, first + 1) if heads else t

    names = {"u": "x", "delta": "dt", "delta_bias": "dt_bias", "delta_softplus": "dt_softplus"}
    with torch.no_grad(), errors_of(op, initial_state="state", **names):
        y, after = scan(
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
        if indices is None:
            state.copy_(after.view(state.shape))
        else:
            state[indices] = after.view(own.shape).to(state.dtype)
    return y.view(x.shape)


def _of_channels(
    op: str,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Computes the scan of u (B, D, T) and its last state."""
    require_real(op, u=u, delta=delta)
    require_numbers(op, A=A, B=B, C=C)
    require_optional(op, z=z, D=D, delta_bias=delta_bias)
    require_form(op, "u", u, "B, D, T")
    require_form(op, "A", A, "D, N")
    for name, t in (("delta", delta), ("z", z)):
        if t is not None:
            require_shape(op, name, t, tuple(u.shape))
    B, C = (steps_first(op, name, t, u, A) for name, t in (("B", B), ("C", C)))
    require_same_groups(op, B, C)
    with errors_of(op):
        y, state = scan(
            *(u.mT, delta.mT, A, B, C, D, None if z is None else z.mT),
            *(delta_bias, delta_softplus, None, backend),
        )
    return y.mT, state


def steps_first(op: str, name: str, w: Tensor, u: Tensor, A: Tensor) -> Tensor:
    """Returns B or C (`name`) as (B, T, N), (B, T, G, N) or (D, N), for u (B, D, T)."""
    if w.ndim == 2:
        return w
    (batch, channels, steps), states = u.shape, A.shape[-1]
    in_pairs = A.is_complex() and not w.is_complex()
    if in_pairs and w.ndim in (3, 4) and w.shape[-1] != 2 * steps:
        raise ValueError(
            f"{op}: {name} must have 2 T={2 * steps} as its last size with a complex A, got "
            f"{name}.shape={tuple(w.shape)}"
        )
    last = 2 * steps if in_pairs else steps
    if w.ndim not in (3, 4) or (len(w), *w.shape[-2:]) != (batch, states, last):
        raise ValueError(
            f"{op}: {name} must have shape (B, N, T), (B, G, N, T) or (D, N), got "
            f"{name}.shape={tuple(w.shape)}, B={batch}, N={states}, T={last}"
        )
    if w.ndim == 4:
        _require_divisor(op, name, w, channels)
    if in_pairs:
        w = of_pairs(w)
    return w.movedim(-1, 1)


def of_pairs(w: Tensor) -> Tensor:
    """Converts interleaved real and imaginary parts, of any alignment, to complex numbers."""
    parts = widen(w).unflatten(-1, (-1, 2))
    return torch.complex(parts[..., 0], parts[..., 1])


def require_same_groups(op: str, B: Tensor, C: Tensor) -> None:
    if B.ndim == C.ndim == 4 and B.shape[2] != C.shape[2]:
        raise ValueError(
            f"{op}: C must have the groups of B, got {C.shape[2]} groups of C, {B.shape[2]} of B"
        )


def _require_divisor(op: str, name: str, w: Tensor, count: int) -> None:
    """Requires that the number of groups of w (B, G, ...) divides `count` channels or heads."""
    if w.shape[1] == 0 or count % w.shape[1]:
        raise ValueError(
            f"{op}: the groups G of {name} must divide {count}, got {name}.shape={tuple(w.shape)}"
        )


def scan(
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
    """Runs functional.selective_scan on (B, T, D) in the time-varying tensors' widest dtype."""
    delta_softplus = False if delta_softplus is None else delta_softplus  # mamba-ssm passes None
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


def _varies(t: Tensor) -> bool:
    """Returns True if t is real and has a time dimension."""
    return t.ndim > 2 and not t.is_complex()
