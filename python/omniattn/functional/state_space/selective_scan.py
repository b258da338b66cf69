"""Mamba's selective scan."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    cast_like,
    implementation,
    require_bool,
    require_decaying,
    require_device,
    require_float,
    require_shape,
    require_strided,
    require_tensor,
    widen,
)
from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import SequenceOptions, sequences_of, spelled_out
from omniattn.functional.recurrences._common import sequence_count, widened
from omniattn.ops import scan as ops
from omniattn.reference.precision import complex_dtype

__all__ = ["selective_scan"]


@over_sequences("u", "delta", "z", either=("B", "C"))
@spelled_out(SequenceOptions)
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Mamba's scan: a diagonal state-space model whose step, input and output depend on the token.

    For each channel d of group g and state n, with ``dt = delta + delta_bias`` or, with
    ``delta_softplus``, ``dt = softplus(delta + delta_bias)``:

    ``h_t[d, n] = e^(dt_t[d] A[d, n]) h_{t-1}[d, n] + dt_t[d] B_t[g, n] u_t[d]``

    ``y_t[d] = (sum_n C_t[g, n] h_t[d, n] + D[d] u_t[d]) silu(z_t[d])``

    Args:
        u: (B, T, D), float64, float32, bfloat16 or float16; like delta, z, B and C copied only
            where the numbers of a token are not next to each other.
        delta: (B, T, D), of u's dtype.
        A: (D, N), its real part at most 0: states that grow would overflow. Not checked on CUDA or
            in a trace. Computed in float32 (float64 for float64), as are D, delta_bias and states.
        B: (B, T, N) or (B, T, G, N) of u's dtype, where channel d is of group d // (D / G); or
            (D, N), the same at all tokens, computed in float32 (float64).
        C: as B, with the groups of B.
        D: (D,), or None for no such term.
        z: (B, T, D) of u's dtype, or None for no gate.
        delta_bias: (D,), or None.
        delta_softplus: True if dt is softplus(delta + delta_bias), which is linear above 20.
        initial_state: (S, D, N), None for zeros; S is B, or the number of sequences.
        cu_seqlens: (S + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own; they grow from 0 to T. Jagged nested tensors
            (B, j, ...) in place of (B, T, ...) bring their own boundaries, and y has them, too.
        backend: None for the native kernel of u's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        y (B, T, D) of u's dtype, and the state (S, D, N) after the last token in float32 (float64
        for float64). ``mamba_ssm.selective_scan_fn`` has (B, D, T) instead:
        `omniattn.compat.mamba_ssm`.

    Raises:
        TypeError: a dtype is unsupported or differs from u's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Gradients flow to all tensors, from y and from the final state; they do not depend on the
        number of threads. The backward keeps the inputs and the state of every 32nd token, and
        memory for no other states. Second and forward-mode derivatives go through `linear_scan`,
        chunk by chunk, complex ones through the eager definition. CUDA takes at most 256 states, or
        128 complex ones.

        A may be complex: y then has ``2 Re(sum_n C h)``, B and C may be complex, too, and states
        are. The kernels compute ``e^(dt Re A)``, ``cos(dt Im A)`` and ``sin(dt Im A)``, and copy B
        and C as pairs of float32 (float64 for float64).

    Reference:
        Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
        arXiv:2312.00752.

    Example:
        >>> one = torch.ones(1, 3, 1)
        >>> y, state = selective_scan(one, one, torch.tensor([[0.5]]).log(), one, one)
        >>> y.flatten(), state.flatten()
        (tensor([1.0000, 1.5000, 1.7500]), tensor([1.7500]))
    """
    op = "selective_scan"
    initial_state, cu_seqlens, backend = sequences_of(op, options)
    delta, z = of_steps(op, u, delta, z)
    channels = u.shape[2]
    require_tensor(op, "A", A)
    require_strided(op, "A", A)
    if A.ndim != 2 or A.shape[0] != channels:
        raise ValueError(f"{op}: A must have shape ({channels}, N), got A.shape={tuple(A.shape)}")
    require_decaying(op, "A", A)
    require_bool(op, "delta_softplus", delta_softplus)
    count, is_complex = sequence_count(op, u, cu_seqlens, "u"), A.is_complex()
    A = _constant(op, "A", A, u, tuple(A.shape), is_complex)
    B = _weights(op, "B", B, u, A, is_complex)
    C = _weights(op, "C", C, u, A, is_complex)
    if B.ndim == C.ndim == 4 and B.shape[2] != C.shape[2]:
        raise ValueError(
            f"{op}: C must have the groups of B, got {C.shape[2]} groups of C, {B.shape[2]} of B"
        )
    if D is not None:
        D = widened(op, "D", D, u, ((channels,),), "u")
    if delta_bias is not None:
        delta_bias = widened(op, "delta_bias", delta_bias, u, ((channels,),), "u")
    if initial_state is not None:
        shape = (count, *A.shape)
        initial_state = _constant(op, "initial_state", initial_state, u, shape, is_complex)
    run = implementation(op, backend, u, ops.selective_scan)
    if is_complex:
        A, B, C = _pairs(A), _pairs(B), 2 * _pairs(C, conjugated=True)
        initial_state = None if initial_state is None else _pairs(initial_state)
    y, state = run(
        u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens, delta_softplus, is_complex
    )
    return y, torch.view_as_complex(state.unflatten(-1, (-1, 2))) if is_complex else state


def of_steps(op: str, u: Tensor, delta: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Checks u, and returns delta and z in its dtype."""
    require_float(op, "u", u)
    if u.ndim != 3:
        raise ValueError(f"{op}: u must have shape (B, T, D), got u.shape={tuple(u.shape)}")
    delta = cast_like(op, "delta", delta, u, "u")
    require_shape(op, "delta", delta, tuple(u.shape))
    if z is not None:
        z = cast_like(op, "z", z, u, "u")
        require_shape(op, "z", z, tuple(u.shape))
    return delta, z


def _pairs(x: Tensor, conjugated: bool = False) -> Tensor:
    """Converts (.., N) to interleaved real and imaginary parts (.., 2 N), optionally conjugated."""
    if x.is_complex():
        x = x.resolve_conj()
        real, imag = x.real, x.imag
    else:
        real = widen(x)
        imag = torch.zeros_like(real)
    return torch.stack((real, -imag if conjugated else imag), -1).flatten(-2)


def _constant(
    op: str, name: str, t: Tensor, u: Tensor, shape: tuple[int, ...], is_complex: bool
) -> Tensor:
    """Checks and widens t as `widened`; with a complex A, t may be complex as well."""
    require_tensor(op, name, t)
    if not (is_complex and t.is_complex()):
        return widened(op, name, t, u, (shape,), "u")
    require_strided(op, name, t)
    require_shape(op, name, t, shape)
    require_device(op, name, t, u, "u")
    return t.to(complex_dtype(u))


def _weights(op: str, name: str, t: Tensor, u: Tensor, A: Tensor, is_complex: bool) -> Tensor:
    """Returns B or C as (B, T, G, N) or (D, N)."""
    require_tensor(op, name, t)
    require_strided(op, name, t)
    (batch, steps, channels), states = u.shape, A.shape[1]
    if t.ndim == 2:
        return _constant(op, name, t, u, tuple(A.shape), is_complex)
    if t.ndim == 3:
        fits, groups = tuple(t.shape) == (batch, steps, states), 1
    else:
        groups = t.shape[2] if t.ndim == 4 else 0
        fits = t.ndim == 4 and tuple(t.shape) == (batch, steps, groups, states)
        fits = fits and (channels % groups == 0 if groups > 0 else channels == 0)
    if not fits:
        raise ValueError(
            f"{op}: {name} must have shape {(batch, steps, states)}, ({batch}, {steps}, G, "
            f"{states}) with G groups of the {channels} channels, or {tuple(A.shape)}, got "
            f"{name}.shape={tuple(t.shape)}"
        )
    if is_complex and t.is_complex():
        require_device(op, name, t, u, "u")
        t = t.to(complex_dtype(u))
    else:
        t = cast_like(op, name, t, u, "u")
    return t.unsqueeze(2) if t.ndim == 3 else t
