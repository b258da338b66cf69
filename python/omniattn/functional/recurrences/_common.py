"""Checks and calls shared by the recurrences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.checks.arguments import (
    FLOATS,
    cast_like,
    implementation,
    is_traced,
    require_bool,
    require_device,
    require_float,
    require_integers,
    require_number,
    require_one_shape,
    require_range,
    require_shape,
    require_strided,
    require_tensor,
    shown,
    use_reference,
)
from omniattn.checks.packed import require_all_tokens
from omniattn.encoding.sequences import Sequences
from omniattn.ops import norm as norms
from omniattn.ops import recurrence as ops
from omniattn.ops.dispatch.plain import PLAIN, are_alike, is_eager, is_plain
from omniattn.reference.empty import nothing_of
from omniattn.reference.precision import compute_dtype
from omniattn.reference.values import require_all_rows

_L2_EPS = 1e-6
#: Numbers of dimensions of log-decays, one for all channels of a head or one for each; 0 for none.
NO_DECAY, OF_HEADS, OF_CHANNELS = 0, 3, 4
#: Number of key heads that keeps the threads of a backward busy.
_KEY_HEADS = 16


def require_heads(
    op: str, q: Tensor, k: Tensor, v: Tensor, q_name: str = "q"
) -> tuple[Tensor, Tensor]:
    """Checks q, k and v; returns k and v."""
    alike = type(q) in PLAIN and q.dtype in FLOATS and are_alike(q.dtype, q, k, v)
    if not alike:
        require_float(op, q_name, q)
    shape = q.shape
    if len(shape) != 4:
        raise ValueError(
            f"{op}: {q_name} must have shape (B, T, H, K), got {q_name}.shape={tuple(shape)}"
        )
    if not alike:
        k, v = cast_like(op, "k", k, q, q_name), cast_like(op, "v", v, q, q_name)
        for name, t in ((q_name, q), ("k", k), ("v", v)):
            require_strided(op, name, t)
    v_shape = v.shape
    require_shape(op, "k", k, shape)
    heads = shape[2]
    if (
        len(v_shape) != 4
        or v_shape[:2] != shape[:2]
        or v_shape[2] % max(1, heads)
        or (heads == 0 and v_shape[2] > 0)
    ):
        raise ValueError(
            f"{op}: v must have shape (B, T, Hv, V) with B and T of {q_name} and Hv a multiple of "
            f"its heads, got v.shape={tuple(v_shape)}, {q_name}.shape={tuple(shape)}"
        )
    return k, v


def widened(
    op: str,
    name: str,
    t: Tensor,
    v: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    v_name: str = "v",
) -> Tensor:
    """Checks the shape of a decay, beta or state; returns it in fp32 (fp64 for fp64)."""
    dtype = compute_dtype(v)
    if are_alike(dtype, t) and v.is_cpu and t.shape in shapes:
        return t
    require_tensor(op, name, t)
    if t.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} must be floating-point, got {name}.dtype={t.dtype}")
    require_strided(op, name, t)
    require_one_shape(op, name, t, shapes)
    require_device(op, name, t, v, v_name)
    return t if t.dtype == dtype else t.to(dtype)


def state_parts(
    op: str,
    state: tuple[Tensor, ...] | None,
    names: str,
    v: Tensor,
    shapes: tuple[tuple[int, ...], ...],
) -> tuple[Tensor, ...] | None:
    """Checks a state of several tensors, whose `names` errors show, and returns them widened."""
    if state is None:
        return None
    if not isinstance(state, tuple) or len(state) != len(shapes):
        got = f"type(initial_state)={type(state).__name__}"
        if isinstance(state, tuple):
            got = f"len(initial_state)={len(state)}"
        raise TypeError(f"{op}: initial_state must be a tuple ({names}), got {got}")
    return tuple(
        widened(op, f"initial_state[{i}]", t, v, (shape,))
        for i, (t, shape) in enumerate(zip(state, shapes, strict=True))
    )


def past_tokens(op: str, position: Tensor | None, v: Tensor, count: int) -> Tensor | None:
    """Checks the numbers of tokens (count,) before those of a call; returns them as int64."""
    if position is None:
        return None
    require_integers(op, "position", position)
    require_device(op, "position", position, v)
    require_shape(op, "position", position, (count,))
    return position.long()


def place_of_state(
    op: str, position: Tensor | None, v: Tensor, count: int, initial_state: object
) -> Tensor | None:
    """As `past_tokens`, for states of open mini-batches, which `position` counts the tokens of."""
    position = past_tokens(op, position, v, count)
    if position is not None:
        require_range(op, "position", position, least=0)
        if initial_state is None:
            raise ValueError(
                f"{op}: position must be None without initial_state, got position={shown(position)}"
            )
    return position


def log_decays(
    op: str,
    name: str,
    g: Tensor,
    v: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    v_name: str = "v",
) -> Tensor:
    """Checks and widens log-decays; positive ones, usually a sign error, would make states grow."""
    g = widened(op, name, g, v, shapes, v_name)
    require_range(op, name, g, most=0.0)
    return g


def attempt(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    sequences: Sequences,
    decays: tuple[int, ...],
    beta: Tensor | None = None,
    delta: bool = False,
    l2norm: bool = False,
    gv: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Runs a recurrence of plain tensors in the dtypes of the op.

    Returns None for other calls, and for those that the checks must name in an error or whose g or
    gv holds NaN. `decays` has the numbers of dimensions that g may have."""
    initial_state, cu_seqlens, backend = sequences
    if backend is not None or cu_seqlens is not None or type(l2norm) is not bool:
        return None
    if not is_plain(q, k, v, g, gv, beta, initial_state) or q.ndim != 4:
        return None
    wide = compute_dtype(q)
    for t in (g, gv, beta, initial_state):
        if t is not None and t.dtype != wide:
            return None
    if (NO_DECAY if g is None else g.ndim) not in decays:
        return None
    for t in (g, gv):
        if t is not None and t.layout != torch.strided:
            return None
        if t is not None and t.numel() > 0 and not t.detach().max().item() <= 0.0:
            return None
    width = q.shape[-1]
    if scale is None:
        scale = width**-0.5 if width > 0 else 1.0
    elif type(scale) is not float or not math.isfinite(scale):
        return None
    if l2norm and width > 0:
        q, k = unit_rows(norms.norm.attempt, q, k)
        if q is None or k is None:
            return None
    found: tuple[Tensor, Tensor] | None = ops.recurrence.attempt(
        *(q, k, v, g, beta, None, None, None, None, None, gv),
        *(initial_state, None, scale, delta, 0, False, 0.0, False),
    )
    return found


def delta(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float | None,
    l2norm: bool,
    sequences: Sequences,
    decays: int = NO_DECAY,
) -> tuple[Tensor, Tensor]:
    """Runs a delta rule, whose g has `decays` dimensions."""
    found = attempt(op, q, k, v, g, scale, sequences, (decays,), beta, True, l2norm)
    if found is not None:
        return found
    k, v = require_heads(op, q, k, v)
    if decays != NO_DECAY:
        shape = (*v.shape[:3], q.shape[-1])[:decays]
        g = log_decays(op, "g", cast(Tensor, g), v, (shape,))
    backend = sequences.backend
    beta = widened(op, "beta", beta, v, (tuple(v.shape[:3]),))
    require_bool(op, "l2norm", l2norm)
    use_reference(op, backend, q)  # checks backend, before the norm does
    if l2norm and q.shape[-1] > 0:
        q, k = unit_rows(implementation("rms_norm", backend, q, norms.norm), q, k)
    return run(op, q, k, v, g, scale, sequences, beta=beta, delta=True)


def low_rank(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    scale: float | None,
    sequences: Sequences,
    q_name: str = "q",
) -> tuple[Tensor, Tensor]:
    """Runs a low-rank transition; g (B, T, Hv, K) is already checked."""
    a, b = cast_like(op, "a", a, q, q_name), cast_like(op, "b", b, q, q_name)
    require_shape(op, "a", a, tuple(q.shape))
    require_shape(op, "b", b, tuple(q.shape))
    return run(op, q, k, v, g, scale, sequences, a=a, b=b, q_name=q_name)


def unit_rows(norm: Callable[..., Any], *tensors: Tensor) -> list[Any]:
    """Returns x / sqrt(sum x^2 + 1e-6) for tensors of equal size and dtype.

    Computed as an RMS norm, by `norm`, whose weight K^-0.5 is passed exactly, as an offset.
    """
    size = tensors[0].shape[-1]
    zeros = tensors[0].new_zeros(size)
    return [norm(x, zeros, None, False, _L2_EPS / size, size**-0.5, False) for x in tensors]


def run(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    sequences: Sequences,
    *,
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    skip: Tensor | None = None,
    min_denominator: Tensor | None = None,
    gv: Tensor | None = None,
    delta: bool = False,
    feature_map: str = "identity",
    normalize: bool = False,
    eps: float = 0.0,
    fp32_output: bool = False,
    q_name: str = "q",
) -> tuple[Tensor, Tensor]:
    """Runs the recurrence on checked tensors; returns outputs and the final state.

    With `fp32_output`, outputs of half types are in fp32.
    """
    initial_state, cu_seqlens, backend = sequences
    count = sequence_count(op, q, cu_seqlens, q_name)
    if initial_state is not None:
        shape = (count, v.shape[2], q.shape[-1], v.shape[-1] + normalize)
        initial_state = widened(op, "initial_state", initial_state, v, (shape,))
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] > 0 else 1.0
    else:
        require_number(op, "scale", scale)
    if torch.is_grad_enabled() and not q.is_cpu:  # on the CPU the backward splits the work itself
        copies = _copies(q.shape[2], v.shape[2])
        q, k = repeated(q, copies), repeated(k, copies)
        a, b = (t if t is None else repeated(t, copies) for t in (a, b))
    tensors = q, k, v, g, beta, bonus, a, b, skip, min_denominator, gv, initial_state
    arguments = (
        *(*tensors, cu_seqlens, scale, delta),
        *(ops.FEATURE_MAPS.index(feature_map), normalize, eps, fp32_output),
    )
    if backend is None and cu_seqlens is None and is_plain(*tensors):
        found: tuple[Tensor, Tensor] | None = ops.recurrence.attempt(*arguments)
        if found is not None:
            return found
    o, state = implementation(op, backend, q, ops.recurrence)(*arguments)
    return o, state


def _copies(heads: int, v_heads: int) -> int:
    """Number of copies of each key head, each with a part of its value heads, if key heads are few.

    The backward assigns all value heads of a key head to one thread, so copies add parallelism."""
    group = v_heads // max(1, heads)
    enough = (n for n in range(1, group) if group % n == 0 and heads * n >= _KEY_HEADS)
    return next(enough, max(1, group)) if heads < _KEY_HEADS else 1


def repeated(t: Tensor, count: int) -> Tensor:
    """Repeats each head of (B, T, H, ..) `count` times; expands a single head without a copy."""
    if count == 1:
        return t
    return t[:, :, :, None].expand(-1, -1, -1, count, *t.shape[3:]).flatten(2, 3)


def first_of(count: int, g: Tensor) -> Tensor:
    """Extends decays (B, T, ...) to (B, T * count, ...), so that first updates decay the state."""
    if count == 1:
        return g
    behind = (0, 0) * (g.ndim - 2) + (0, count - 1)
    return nnf.pad(g[:, :, None], behind).flatten(1, 2)


def is_step(t: Tensor, cu_seqlens: Tensor | None) -> bool:
    """True in an eager call of one token (B, 1, ...), all of whose past is in its state."""
    return cu_seqlens is None and t.shape[1] == 1 and is_eager()


def edge(t: Tensor, cu_seqlens: Tensor | None, old: Tensor, first: bool = False) -> Tensor:
    """Returns the last token of each sequence in t (B, T, ...), or the first, else that in `old`.

    Sequences without tokens, (S, ...), have theirs in `old`."""
    if (cu_seqlens is None or not is_traced()) and t.shape[1] == 0:
        return old + nothing_of(t)
    if cu_seqlens is None:
        return t[:, 0 if first else -1]
    rows = cu_seqlens[:-1].long() if first else cu_seqlens[1:].long() - 1
    found = t[0].index_select(0, rows.clamp(0, t.shape[1] - 1))
    present = (cu_seqlens.diff() > 0).view(-1, *[1] * (found.ndim - 1))
    return torch.where(present, found, old)


def sequence_count(op: str, x: Tensor, cu_seqlens: Tensor | None, name: str = "q") -> int:
    """Returns B, or checks the boundaries and returns the number of packed sequences."""
    if cu_seqlens is None:
        return x.shape[0]
    require_boundaries(op, cu_seqlens, x, name)
    return cu_seqlens.shape[0] - 1


def require_boundaries(op: str, cu_seqlens: Tensor, x: Tensor, name: str) -> None:
    """Requires (N + 1,) integers that grow from 0 to the T of x (1, T, ...)."""
    require_numbers_of_rows(op, cu_seqlens, x, name)
    require_all_tokens(op, cu_seqlens, x.shape[1])


def composed_sequence_count(op: str, q: Tensor, cu_seqlens: Tensor | None, name: str = "q") -> int:
    """As `sequence_count`, for compositions, which have no kernel that checks the boundaries."""
    if cu_seqlens is None:
        return q.shape[0]
    require_numbers_of_rows(op, cu_seqlens, q, name)
    if not require_all_tokens(op, cu_seqlens, q.shape[1]):
        require_all_rows(op, cu_seqlens, q.shape[1])
    return cu_seqlens.shape[0] - 1


def require_numbers_of_rows(op: str, cu_seqlens: Tensor, x: Tensor, name: str) -> None:
    """Requires that cu_seqlens is (N + 1,) integers and x a batch of one."""
    require_integers(op, "cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{op}: cu_seqlens must be int32 or int64, got cu_seqlens.dtype={cu_seqlens.dtype}"
        )
    require_device(op, "cu_seqlens", cu_seqlens, x, name)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"{op}: cu_seqlens must have shape (N + 1,), got cu_seqlens.shape="
            f"{tuple(cu_seqlens.shape)}"
        )
    if x.shape[0] != 1:
        raise ValueError(f"{op}: B must be 1 with cu_seqlens, got {name}.shape={tuple(x.shape)}")
