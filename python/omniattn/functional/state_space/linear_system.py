"""Linear time-invariant systems with dense matrices: the recurrence and its kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    FLOATS,
    full_precision,
    require_bool,
    require_device,
    require_float,
    require_int,
    require_strided,
    require_tensor,
)
from omniattn.functional.recurrences._common import widened
from omniattn.reference.precision import compute_dtype

__all__ = ["ssm_kernel", "ssm_recurrence"]


def ssm_recurrence(
    u: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    delayed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Discrete-time linear system with several inputs, states and outputs (MIMO).

    ``s_t = A s_{t-1} + B u_t``, ``y_t = C s_t + D u_t``.

    Args:
        u: (batch, T, inputs), float64, float32, bfloat16 or float16.
        A: (N, N), floating-point; computed in float32 (float64 for a float64 u), as the others are.
        B: (N, inputs).
        C: (outputs, N).
        D: (outputs, inputs), or None.
        initial_state: (batch, N), or None for zeros.
        delayed: ``y_t = C s_{t-1} + D u_t``: outputs use the state before the step's input.

    Returns:
        y (batch, T, outputs) of u's dtype, and the state (batch, N) after the last step.

    Raises:
        TypeError: a dtype that is unsupported.
        ValueError: a shape or device that does not fit.

    Note:
        log2 T products with powers of A, each for all steps at once. `s4d` and `s4` cost far less
        where A is diagonal or nearly so; `discretize` makes A and B from a system in continuous
        time.

    Reference:
        Gu et al., Combining Recurrent, Convolutional, and Continuous-time Models with Linear
        State-Space Layers, 2021, arXiv:2110.13985.

    Example:
        >>> one = torch.ones(1, 1)
        >>> y, s = ssm_recurrence(torch.ones(1, 3, 1), one / 2, one, one)
        >>> y.flatten(), s.flatten()
        (tensor([1.0000, 1.5000, 1.7500]), tensor([1.7500]))
    """
    op = "ssm_recurrence"
    require_float(op, "u", u)
    require_strided(op, "u", u)
    if u.ndim != 3:
        raise ValueError(
            f"{op}: u must have shape (batch, T, inputs), got u.shape={tuple(u.shape)}"
        )
    dtype = compute_dtype(u)
    A, B, C = _system(op, A, B, C, dtype, u, "u")
    if B.shape[1] != u.shape[2]:
        raise ValueError(
            f"{op}: B must have shape (N, inputs) with the inputs of u, "
            f"got B.shape={tuple(B.shape)}, u.shape={tuple(u.shape)}"
        )
    require_bool(op, "delayed", delayed)
    before = u.new_zeros(u.shape[0], A.shape[0], dtype=dtype)
    if initial_state is not None:
        before = widened(op, "initial_state", initial_state, u, (tuple(before.shape),), "u")
    if D is not None:
        D = widened(op, "D", D, u, ((C.shape[0], u.shape[2]),), "u")
    with full_precision(u):
        x = u.to(dtype)
        states = torch.cat((before[:, None], x @ B.mT), 1)  # of step t - 1 at t
        power, reach = A, 1
        while reach < states.shape[1]:
            states = torch.cat(
                (states[:, :reach], states[:, reach:] + states[:, :-reach] @ power.mT), 1
            )
            power, reach = power @ power, 2 * reach
        y = (states[:, :-1] if delayed else states[:, 1:]) @ C.mT
        if D is not None:
            y = y + x @ D.mT
    return y.to(u.dtype), states[:, -1]


def ssm_kernel(A: Tensor, B: Tensor, C: Tensor, length: int) -> Tensor:
    """Returns the impulse response of a linear system: ``K_l = C A^l B``.

    Without an initial state, `ssm_recurrence` is the convolution ``y_t = sum_{j<=t} K_{t-j} u_j``;
    `delayed`, it is ``sum_{j<t} K_{t-j-1} u_j``.

    Args:
        A, B, C: as in `ssm_recurrence`, of one dtype, float64 or float32.
        length: length of the kernel.

    Returns:
        K (length, outputs, inputs).

    Raises:
        TypeError: a dtype that is unsupported.
        ValueError: a shape or value is invalid.

    Reference:
        As `ssm_recurrence`.

    Example:
        >>> one = torch.ones(1, 1)
        >>> ssm_kernel(one / 2, one, one, 3).flatten()
        tensor([1.0000, 0.5000, 0.2500])
    """
    op = "ssm_kernel"
    require_int(op, "length", length, 0, 2**31 - 1)
    for name, t in (("A", A), ("B", B), ("C", C)):
        require_tensor(op, name, t)
        if t.dtype not in (torch.float64, torch.float32) or t.dtype != A.dtype:
            other = "" if name == "A" else f"A.dtype={A.dtype}, "
            raise TypeError(
                f"{op}: A, B and C must be float64 or float32, all the same, "
                f"got {other}{name}.dtype={t.dtype}"
            )
    A, B, C = _system(op, A, B, C, A.dtype, A, "A")
    with full_precision(A):
        columns, power = B[None], A  # A^l B
        while len(columns) < max(length, 2):  # so that A has a gradient
            columns = torch.cat((columns, power @ columns))
            power = power @ power
        return C @ columns[:length]


def _system(
    op: str, A: Tensor, B: Tensor, C: Tensor, dtype: torch.dtype, like: Tensor, like_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    for name, t in (("A", A), ("B", B), ("C", C)):
        require_tensor(op, name, t)
        require_strided(op, name, t)
        if t.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} must be floating-point, got {name}.dtype={t.dtype}")
        require_device(op, name, t, like, like_name)
    if A.ndim != 2 or A.shape[0] != A.shape[1]:
        raise ValueError(f"{op}: A must have shape (N, N), got A.shape={tuple(A.shape)}")
    if B.ndim != 2 or B.shape[0] != A.shape[0]:
        raise ValueError(
            f"{op}: B must have shape ({A.shape[0]}, inputs), got B.shape={tuple(B.shape)}"
        )
    if C.ndim != 2 or C.shape[1] != A.shape[0]:
        raise ValueError(
            f"{op}: C must have shape (outputs, {A.shape[0]}), got C.shape={tuple(C.shape)}"
        )
    return A.to(dtype), B.to(dtype), C.to(dtype)
