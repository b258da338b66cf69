"""Mamba-2's state-space duality: a recurrence of a matrix state with one decay per head."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    cast_like,
    clamp,
    holds_arrays,
    require_bool,
    require_decaying,
    require_float,
    require_number,
    require_shape,
    require_strided,
    shown,
)
from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import SequenceOptions, sequences_of, spelled_out
from omniattn.encoding.sequences import Sequences as Sequences
from omniattn.functional.recurrences._common import run, sequence_count, widened
from omniattn.ops import recurrence as ops
from omniattn.ops.dispatch.plain import are_alike, is_plain
from omniattn.reference.precision import compute_dtype, widen

__all__ = ["ssd"]


@over_sequences("x", "dt", "B", "C", "z")
@spelled_out(SequenceOptions)
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Mamba-2's state-space layer (SSD), with one decay per head and token.

    With ``dt = clamp(softplus(dt + dt_bias), *dt_limit)``, where softplus is an option:

    ``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T``, ``y_t = (h_t C_t + D x_t) * silu(z_t)``.

    Args:
        x: (B, T, H, P), float64, float32, bfloat16 or float16, any strides.
        dt: (B, T, H), floating-point: the step sizes, or the argument of their softplus. Steps,
            decays and states are computed in float32 (float64 for float64).
        A: (H,), floating-point, at most 0, since states that grow would overflow. Not checked on
            CUDA or in a trace.
        B: (B, T, G, N) of x's dtype; H is a multiple of G, and head h reads group h // (H / G).
        C: (B, T, G, N) of x's dtype.
        D: (H,) or (H, P), floating-point: factors of x in y.
        z: (B, T, H, P) of x's dtype: the gate of y.
        dt_bias: (H,), floating-point.
        dt_softplus: True if steps are the softplus of dt + dt_bias.
        dt_limit: minimum and maximum step, at least 0. Infinity is no limit; -infinity is no
            minimum, with dt_softplus only, since states would grow in negative steps.
        initial_state: (S, H, P, N), floating-point; None for zeros. S is B, or the number of
            sequences.
        cu_seqlens: (S + 1,) int32 or int64: B is 1, and tokens cu_seqlens[s] .. cu_seqlens[s + 1]
            are sequence s, with a state of its own; they grow from 0 to T. Jagged nested tensors
            (B, j, ...) in place of (B, T, ...) bring their own boundaries, and y has them, too.
        backend: None for the native kernel of x's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        y (B, T, H, P) of x's dtype, and the state (S, H, P, N) after the last token in float32
        (float64 for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from x's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Runs the kernels of `gated_linear_attention` with q = C, k = B, v = x and g = dt A, which
        also multiply v by dt and add D x. As there, a NaN or infinity in x or dt may also reach
        outputs of up to 31 steps before its own. y is rounded once. Gradients flow to all tensors,
        from y and from the final state. torch computes the gate silu(z), so the last bits of y and
        of gradients may depend on the number of threads; without z they do not. Second and
        forward-mode derivatives are sums of such calls.

    Reference:
        Dao and Gu, Transformers are SSMs, 2024, arXiv:2405.21060.

    Example:
        >>> one = torch.ones(1, 3, 1, 1)
        >>> y, state = ssd(one, one[..., 0], torch.tensor([0.5]).log(), one, one)
        >>> y.flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    sequences = sequences_of("ssd", options)
    return state_space_duality(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, sequences)


def state_space_duality(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    sequences: Sequences,
    *,
    fp32_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes `ssd` of tensors that are not jagged; `fp32_output`: y of half types in fp32."""
    op = "ssd"
    if z is None and dt_softplus is True and _is_unlimited(dt_limit):
        found = _attempt(x, dt, A, B, C, D, dt_bias, sequences, fp32_output)
        if found is not None:
            return found
    initial_state, cu_seqlens, backend = sequences
    require_float(op, "x", x)
    if not are_alike(x.dtype, x, B, C):
        B, C = cast_like(op, "B", B, x, "x"), cast_like(op, "C", C, x, "x")
        for name, t in (("x", x), ("B", B), ("C", C)):
            require_strided(op, name, t)
    require_heads(op, x, B, C)
    batch, steps, heads, size = x.shape
    A = widened(op, "A", A, x, ((heads,),), "x")
    require_decaying(op, "A", A)
    dt = widened(op, "dt", dt, x, ((batch, steps, heads),), "x")
    count = sequence_count(op, x, cu_seqlens, "x")
    if dt_bias is not None:
        dt = dt + widened(op, "dt_bias", dt_bias, x, ((heads,),), "x")
    require_bool(op, "dt_softplus", dt_softplus)
    if dt_softplus:
        dt = nnf.softplus(dt)
    least, largest = require_limits(op, dt_limit, dt_softplus)
    if least > 0 or largest < math.inf or not dt_softplus:
        dt = clamp(dt, least, largest if largest < math.inf else None)
    if D is not None:
        D = widened(op, "D", D, x, ((heads,), (heads, size)), "x")
        D = (D if D.ndim == 2 else D[:, None]).expand(count, heads, size)
    if z is not None:
        z = cast_like(op, "z", z, x, "x")
        require_strided(op, "z", z)
        require_shape(op, "z", z, tuple(x.shape))
    if initial_state is not None:
        shape = (count, heads, size, B.shape[3])
        initial_state = widened(op, "initial_state", initial_state, x, (shape,), "x").mT
    y, state = run(
        *(op, C, B, x, dt * A, 1.0, Sequences(initial_state, cu_seqlens, backend)),
        beta=dt,
        skip=D,
        fp32_output=fp32_output or z is not None,  # y is rounded once, after the gate
        q_name="C",
    )
    if z is not None:
        y = y * nnf.silu(widen(z))
        y = y if fp32_output else y.to(x.dtype)
    return y, state.mT


def _is_unlimited(dt_limit: tuple[float, float]) -> bool:
    plain = type(dt_limit) is tuple and all(type(bound) is float for bound in dt_limit)
    return plain and dt_limit == (0.0, math.inf)


def _attempt(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    sequences: Sequences,
    fp32_output: bool,
) -> tuple[Tensor, Tensor] | None:
    """Runs `ssd` of plain tensors in the dtypes of the op, with softplus and without limits.

    Returns None for other calls, and for those that the checks must name in an error.
    """
    initial_state, cu_seqlens, backend = sequences
    if cu_seqlens is not None or backend is not None:
        return None
    if not is_plain(x, dt, A, B, C, D, dt_bias, initial_state) or x.ndim != 4:
        return None
    wide = compute_dtype(x)
    for t in (dt, A, D, dt_bias, initial_state):
        if t is not None and not (t.dtype == wide and t.layout == torch.strided):
            return None
    batch, _, heads, size = x.shape
    if dt.shape != x.shape[:3]:
        return None
    for t in (A, D, dt_bias):
        if t is not None and t.shape != (heads,):
            return None
    if heads == 0 or not A.detach().max().item() <= 0.0:
        return None
    dt = nnf.softplus(dt if dt_bias is None else dt + dt_bias)
    found = ops.recurrence.attempt(
        *(C, B, x, dt * A, dt, None, None, None),
        None if D is None else D[:, None].expand(batch, heads, size),
        *(None, None, None if initial_state is None else initial_state.mT, None),
        *(1.0, False, 0, False, 0.0, fp32_output),
    )
    return None if found is None else (found[0], found[1].mT)


def require_heads(op: str, x: Tensor, B: Tensor, C: Tensor) -> None:
    """Checks the shapes of x (B, T, H, P), and of B and C (B, T, G, N) with G a divisor of H."""
    if x.ndim != 4:
        raise ValueError(f"{op}: x must have shape (B, T, H, P), got x.shape={tuple(x.shape)}")
    heads = x.shape[2]
    if B.ndim != 4 or B.shape[:2] != x.shape[:2] or (heads % max(1, B.shape[2])):
        raise ValueError(
            f"{op}: B must have shape (B, T, G, N) with B and T of x and G a divisor of its heads, "
            f"got B.shape={tuple(B.shape)}, x.shape={tuple(x.shape)}"
        )
    if B.shape[2] == 0 and heads > 0:
        raise ValueError(f"{op}: B must have groups, got B.shape={tuple(B.shape)}")
    require_shape(op, "C", C, tuple(B.shape))


def require_limits(op: str, dt_limit: tuple[float, float], softplus: bool) -> tuple[float, float]:
    """Checks and returns the numbers of `dt_limit`; infinite ones are no limits."""
    if not isinstance(dt_limit, tuple | list) or len(dt_limit) != 2 or holds_arrays(dt_limit):
        raise TypeError(f"{op}: dt_limit must be (least, largest), got dt_limit={shown(dt_limit)}")
    least, largest = dt_limit
    if least == -math.inf:
        if not softplus:
            raise ValueError(
                f"{op}: dt_limit must begin at 0 or above without dt_softplus, since states grow "
                f"in steps below 0, got dt_limit={shown(dt_limit)}"
            )
        least = 0.0
    for bound in (least, largest):
        if bound != math.inf:
            require_number(op, "dt_limit", bound, 0)
    if least > largest or least == math.inf:
        raise ValueError(f"{op}: dt_limit must be (least, largest), got dt_limit={shown(dt_limit)}")
    return float(least), float(largest)
