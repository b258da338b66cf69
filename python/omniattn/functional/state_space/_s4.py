"""State updates per step and per chunk, and argument checks, shared by S4 and S4D."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    require_bool,
    require_choice,
    require_decaying,
    require_derivative,
    require_device,
    require_float,
    require_range,
    require_shape,
    require_strided,
    require_tensor,
)
from omniattn.reference.precision import compute_dtype

MODES = ("conv", "recurrent")
#: An output and the state after it.
State: TypeAlias = tuple[Tensor, Tensor]
#: Number of tokens per matrix product from inputs to a state, or from a state to outputs.
CHUNK = 64


def by_recurrence(
    u: Tensor,
    D: Tensor | None,
    step: Callable[[Tensor, Tensor], State],
    initial_state: Tensor | None,
    like: Tensor,
) -> State:
    """Iterates (y, state) = step(state, u of a token) over u (B, T, H); states as `like`."""
    x, steps = u.to(like.real.dtype), u.shape[1]
    state = initial_state
    if state is None:
        state = like.new_zeros(u.shape[0], *like.shape)
    outputs = []
    for each in x.unbind(1):
        y, state = step(state, each)
        outputs.append(y)
    if not outputs:  # an empty result still has gradients (zeros)
        outputs.append(step(state, x.sum(1))[0])
        state = state.clone()
    y = torch.stack(outputs, 1)[:, :steps]
    if D is not None:
        y = y + D * x
    return y.to(u.dtype), state


def final_state(x: Tensor, log_ab: Tensor, bb: Tensor, initial_state: Tensor | None) -> Tensor:
    """Computes a diagonal system's state (B, H, N) after x (B, T, H), first per chunk."""
    batch, steps = x.shape[:2]
    chunks = -(-steps // CHUNK)
    # In reversed time, the index is the distance to the end.
    distances = torch.arange(max(CHUNK, chunks), dtype=x.dtype, device=x.device)
    within = (log_ab[..., None] * distances[:CHUNK]).exp()  # (H, N, CHUNK)
    between = (log_ab[..., None] * (CHUNK * distances[:chunks])).exp()
    late = torch.nn.functional.pad(x.flip(1), (0, 0, 0, chunks * CHUNK - steps))
    late = late.unflatten(1, (chunks, CHUNK)).permute(3, 0, 1, 2).flatten(1, 2)  # (H, B K, CHUNK)
    each = (late.to(within.dtype) @ within.mT).unflatten(1, (batch, chunks))  # (H, B, K, N)
    state = bb * (each * between.mT[:, None]).sum(2).transpose(0, 1)
    if initial_state is None:
        return state
    return state + (log_ab * steps).exp() * initial_state


class RealSystem(NamedTuple):
    """A bilinear step over the real and imaginary parts of a state.

    Stores Ab - 1: Ab itself would lose the digits of a tiny or huge dt, which its powers need.
    """

    growth: Tensor  # Ab - 1, (H, 2 N, 2 N)
    square: Tensor  # Ab^2 - 1
    bb: Tensor  # (H, 2 N)
    c: Tensor


def real_system(Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor) -> RealSystem:
    """Builds the real system: summed over both conjugates ``P* s`` is 2 Re(conj(P) s), and
    ``C* s`` is 2 Re(conj(C) s)."""
    re, im = torch.diag_embed(Lambda.real), torch.diag_embed(Lambda.imag)
    p, b, c = (torch.cat((t.real, t.imag), -1) for t in (by_rank(P), B, C))
    a = torch.cat((torch.cat((re, -im), -1), torch.cat((im, re), -1)), -2)
    a = dt[:, None, None] * (a - 2 * p.mT @ p)
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    right = torch.cat((a, 2 * one, dt[:, None, None] * b[..., None]), -1)
    found = torch.linalg.solve(one - a / 2, right)
    growth, more = found[..., :-1].chunk(2, -1)  # Ab - 1, Ab + 1
    return RealSystem(growth, growth @ more, found[..., -1], 2 * c)


def by_rank(P: Tensor) -> Tensor:
    """Returns P of rank one, (H, N), or more as (H, R, N)."""
    return P[:, None] if P.ndim == 2 else P


def real_system_kernel(system: RealSystem, length: int) -> Tensor:
    """Computes ``C Ab^l Bb`` (H, length) by powers i n applied to C and j to Bb, l = i n + j."""
    if isinstance(length, Tensor):  # a size under torch.jit.trace
        length = int(length)
    width = 1 << (length.bit_length() + 1) // 2
    columns, grown = _krylov(system.growth, system.square, system.bb, width)
    rows, _ = _krylov(grown.mT, None, system.c, -(-length // width))
    return (rows.mT @ columns).flatten(1)[:, :length]


def real_system_states(
    x: Tensor, system: RealSystem, initial_state: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Returns the initial state's part of y (B, T, H), and the final state (B, H, N)."""
    growth, square, bb, c = system
    batch, _, channels = x.shape
    inputs, whole = _krylov(growth, square, bb, CHUNK)  # Ab^j Bb
    first = (c[:, None] + c[:, None] @ growth)[:, 0]
    outputs, _ = _krylov(growth.mT, square.mT, first, CHUNK)  # C Ab^(j + 1)
    # (H, 2 N, B): with the input, and without.
    state = x.new_zeros(channels, bb.shape[1], batch)
    free = None
    if initial_state is not None:
        state = torch.cat((initial_state.real, initial_state.imag), -1).permute(1, 2, 0)
        free = state
    decayed = []
    for chunk in x.permute(2, 1, 0).split(CHUNK, 1):  # (H, t, B)
        count = chunk.shape[1]
        grown = whole if count == CHUNK else _power(growth, square, count)
        state = torch.baddbmm(state, grown, state) + inputs[..., :count].flip(-1) @ chunk
        if free is not None:
            decayed.append(outputs.mT[:, :count] @ free)
            free = torch.baddbmm(free, grown, free)
    final = torch.complex(*state.permute(2, 0, 1).chunk(2, -1))
    if free is None or not decayed:
        return None, final
    return torch.cat(decayed, 1).permute(2, 1, 0), final


def _krylov(growth: Tensor, square: Tensor | None, b: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns b, a b, .., a^(count - 1) b of ``a = 1 + growth`` as columns (H, M, count).

    Also returns ``a^w - 1`` for the smallest power of two w >= count.
    """
    columns = b[..., None]
    while columns.shape[-1] < count:
        columns = torch.cat((columns, torch.baddbmm(columns, growth, columns)), -1)
        growth, square = _squared(growth, square), None
    return columns[..., :count], growth


def _power(growth: Tensor, square: Tensor | None, count: int) -> Tensor:
    """Computes ``(1 + growth)^count - 1``."""
    grown = torch.zeros_like(growth)
    while count:
        if count % 2:
            grown = grown + torch.baddbmm(growth, growth, grown)
        growth, square = _squared(growth, square), None
        count //= 2
    return grown


def _squared(growth: Tensor, square: Tensor | None) -> Tensor:
    """Computes ``(1 + growth)^2 - 1``, or returns `square`, exact for `growth` near -2."""
    return torch.baddbmm(growth, growth, growth, beta=2) if square is None else square


def require_input(op: str, u: Tensor) -> torch.dtype:
    """Checks u; returns the dtype of the model's parameters."""
    require_float(op, "u", u)
    require_strided(op, "u", u)
    if u.ndim != 3:
        raise ValueError(f"{op}: u must have shape (B, T, H), got u.shape={tuple(u.shape)}")
    return compute_dtype(u)


def require_parameter(op: str, name: str, t: Tensor, u: Tensor, dtype: torch.dtype) -> None:
    if t.dtype != dtype:
        raise TypeError(
            f"{op}: {name} must be {dtype} with u.dtype={u.dtype}, got {name}.dtype={t.dtype}"
        )
    require_strided(op, name, t)
    require_device(op, name, t, u, "u")


def require_skip(
    op: str, D: Tensor | None, u: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if D is not None:
        require_tensor(op, "D", D)
        require_parameter(op, "D", D, u, dtype)
        require_shape(op, "D", D, shape)


def require_terms(
    op: str, A: Tensor, vectors: dict[str, Tensor], dt: Tensor, name: str = "A"
) -> None:
    require_tensor(op, name, A)
    if A.dtype not in (torch.complex64, torch.complex128):
        raise TypeError(f"{op}: {name} must be complex64 or complex128, got {name}.dtype={A.dtype}")
    require_strided(op, name, A)
    require_derivative(op, **{name: A}, **vectors, dt=dt)
    if A.ndim != 2:
        raise ValueError(f"{op}: {name} must have shape (H, N), got {name}.shape={tuple(A.shape)}")
    real = torch.float64 if A.dtype == torch.complex128 else torch.float32
    channels, states = A.shape
    wanted: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]] = {}
    for key, t in {**vectors, "dt": dt}.items():
        require_tensor(op, key, t)
        require_strided(op, key, t)
    for key, t in vectors.items():
        ranks = t.shape[1:2] if key == "P" and t.ndim == 3 else ()
        wanted[key] = t, A.dtype, (channels, *ranks, states)
    for key, (t, dtype, shape) in {**wanted, "dt": (dt, real, (A.shape[0],))}.items():
        if t.dtype != dtype:
            raise TypeError(
                f"{op}: {key} must be {dtype} with {name}.dtype={A.dtype}, "
                f"got {key}.dtype={t.dtype}"
            )
        require_shape(op, key, t, shape)
        require_device(op, key, t, A, name)
    require_decaying(op, name, A)
    require_range(op, "dt", dt, 0.0)


def require_call(
    op: str,
    u: Tensor,
    A: Tensor,
    vectors: dict[str, Tensor],
    dt: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    mode: str,
    name: str = "A",
) -> None:
    dtype = require_input(op, u)
    require_terms(op, A, vectors, dt, name)
    require_parameter(op, "dt", dt, u, dtype)
    if A.shape[0] != u.shape[2]:
        raise ValueError(
            f"{op}: {name} must have the H of u, "
            f"got {name}.shape={tuple(A.shape)}, u.shape={tuple(u.shape)}"
        )
    require_skip(op, D, u, dtype, (u.shape[2],))
    if initial_state is not None:
        require_tensor(op, "initial_state", initial_state)
        require_derivative(op, initial_state=initial_state)
        require_parameter(op, "initial_state", initial_state, u, A.dtype)
        require_shape(op, "initial_state", initial_state, (u.shape[0], *A.shape))
    require_bool(op, "output_final_state", output_final_state)
    require_choice(op, "mode", mode, MODES)
