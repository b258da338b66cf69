"""Linear time-invariant state-space models: discretisation and initialisation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    FLOATS,
    require_choice,
    require_derivative,
    require_device,
    require_int,
    require_number,
    require_range,
    require_strided,
    require_tensor,
)

__all__ = ["discretize", "hippo", "hippo_legs", "nplr", "ssm_init"]

RULES = ("zoh", "bilinear", "euler", "mamba")
INITS = ("s4d-lin", "s4d-inv", "s4d-real", "legs")
MEASURES = ("legs", "legt", "lagt", "fout")
#: Below this, (e^x - 1) / x is a power series, whose derivative does not cancel either.
_SMALL, _POWERS = 0.3, 13
_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def discretize(
    A: Tensor, B: Tensor, dt: Tensor | float, rule: str = "zoh"
) -> tuple[Tensor, Tensor]:
    """Discretises the system h' = A h + B u to the steps h_t = Ab h_{t-1} + Bb u_t of size dt.

    ============  =======================================  ====================================
    rule          Ab                                       Bb
    ============  =======================================  ====================================
    "zoh"         ``exp(dt A)``                            ``A^-1 (Ab - I) B``
    "bilinear"    ``(I - dt A / 2)^-1 (I + dt A / 2)``     ``(I - dt A / 2)^-1 dt B``
    "euler"       ``I + dt A``                             ``dt B``
    "mamba"       ``exp(dt A)``                            ``dt B``
    ============  =======================================  ====================================

    "zoh" holds u over a step and is exact for such inputs, also where A has no inverse. "mamba" is
    Mamba's rule. "euler" grows where ``|1 + dt A| > 1``, even if Re A is below 0.

    Args:
        A: (..., N), the diagonal of a matrix, or (..., N, N), complex128, complex64, float64 or
            float32.
        B: (..., N) of A's dtype. A is dense where it has one dimension more than B.
        dt: a number above 0, or a real tensor (...) of numbers that are at least 0; NaN
            in it gives NaN.
        rule: see above.

    Returns:
        Ab like A and Bb like B, of the common leading sizes of all arguments.

    Raises:
        TypeError: a dtype is unsupported or differs from A's.
        ValueError: a shape or value is invalid.

    Reference:
        Gu, Goel and Re, Efficiently Modeling Long Sequences with Structured State Spaces, 2021,
        arXiv:2111.00396; "mamba": Gu and Dao, Mamba, 2023, arXiv:2312.00752.

    Example:
        >>> A, B = torch.tensor([-1.0, 0.0]), torch.ones(2)
        >>> discretize(A, B, math.log(2))
        (tensor([0.5000, 1.0000]), tensor([0.5000, 0.6931]))
    """
    op = "discretize"
    for name, t in (("A", A), ("B", B)):
        require_tensor(op, name, t)
        require_strided(op, name, t)
    if A.dtype not in _DTYPES or B.dtype != A.dtype:
        raise TypeError(
            f"{op}: A and B must be complex128, complex64, float64 or float32, both the same, "
            f"got A.dtype={A.dtype}, B.dtype={B.dtype}"
        )
    if A.is_complex():
        require_derivative(op, A=A, B=B, dt=dt if isinstance(dt, Tensor) else None)
    dense = A.ndim == B.ndim + 1
    sizes = A.shape[A.ndim - 1 - dense :]
    if B.ndim < 1 or A.ndim < 1 + dense or any(n != B.shape[-1] for n in sizes):
        raise ValueError(
            f"{op}: A must have shape (..., N) or (..., N, N), and B (..., N), "
            f"got A.shape={tuple(A.shape)}, B.shape={tuple(B.shape)}"
        )
    require_choice(op, "rule", rule, RULES)
    require_device(op, "B", B, A, "A")
    if isinstance(dt, Tensor):
        if dt.dtype not in FLOATS:
            raise TypeError(f"{op}: dt must be real, got dt.dtype={dt.dtype}")
        require_strided(op, "dt", dt)
        require_device(op, "dt", dt, A, "A")
        require_range(op, "dt", dt, 0.0)
        dt = dt.to(A.real.dtype)
    elif isinstance(dt, bool):
        raise TypeError(f"{op}: dt must be a number or a real tensor, got {dt=}")
    else:
        require_number(op, "dt", dt, above=0)
        dt = torch.as_tensor(dt, dtype=A.real.dtype, device=A.device)
    try:
        torch.broadcast_shapes(A.shape[: A.ndim - 1 - dense], B.shape[:-1], dt.shape)
    except RuntimeError:
        raise ValueError(
            f"{op}: A, B and dt must have leading sizes that fit together, got "
            f"A.shape={tuple(A.shape)}, B.shape={tuple(B.shape)}, dt.shape={tuple(dt.shape)}"
        ) from None
    if dense:
        return _dense(A * dt[..., None, None], B * dt[..., None], rule)
    x, b = A * dt[..., None], B * dt[..., None]
    if rule == "bilinear":
        below = 1 - x / 2
        return (1 + x / 2) / below, b / below
    if rule == "euler":
        return 1 + x, b.expand(torch.broadcast_shapes(x.shape, b.shape))
    return x.exp(), b * growth(x) if rule == "zoh" else b.expand(
        torch.broadcast_shapes(x.shape, b.shape)
    )


def growth(x: Tensor) -> Tensor:
    """Computes (e^x - 1) / x, 1 at 0."""
    small = x.abs() < _SMALL
    away = torch.where(small, 1, x)
    near, series = torch.where(small, x, 0), torch.ones_like(x)
    for n in range(_POWERS, 1, -1):
        series = 1 + near / n * series
    return torch.where(small, series, expm1(away) / away)


def expm1(x: Tensor) -> Tensor:
    """Computes e^x - 1; torch's for complex numbers subtracts 1 from the rounded exponential."""
    if not x.is_complex():
        return x.expm1()
    grown, half = x.real.expm1(), (x.imag / 2).sin()
    return torch.complex(grown * x.imag.cos() - 2 * half * half, (grown + 1) * x.imag.sin())


def _dense(a: Tensor, b: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Discretises a dense system, given dt A and dt B."""
    size = a.shape[-1]
    one = torch.eye(size, dtype=a.dtype, device=a.device)
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-1])
    a, b = a.expand(*lead, size, size), b.expand(*lead, size)
    if size == 0:  # not supported by torch.linalg
        return a, b
    if rule == "bilinear":
        right = torch.cat((one + a / 2, b[..., None]), -1)
        found = torch.linalg.solve(one - a / 2, right)
        return found[..., :-1], found[..., -1]
    if rule == "euler":
        return one + a, b
    if rule == "mamba":
        return torch.matrix_exp(a), b
    # exp of [[A, B], [0, 0]] is [[Ab, Bb], [0, 1]] and needs no inverse of A.
    upper = torch.cat((a, b[..., None]), -1)
    whole = torch.matrix_exp(torch.cat((upper, torch.zeros_like(upper[..., :1, :])), -2))
    return whole[..., :-1, :-1], whole[..., :-1, -1]


def hippo_legs(
    state_size: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns HiPPO-LegS, whose state holds the Legendre coefficients of all past input.

    ``A[n, k] = -sqrt((2 n + 1) (2 k + 1))`` for n > k, ``-(n + 1)`` for n = k, else 0, and
    ``B[n] = sqrt(2 n + 1)``, n, k = 0, ..., N - 1. The eigenvalues are -1, ..., -N.

    Args:
        state_size: N.
        dtype, device: of the results; default torch's.

    Returns:
        A (N, N) and B (N,).

    Raises:
        ValueError: a state_size below 1.

    Reference:
        Gu et al., HiPPO: Recurrent Memory with Optimal Polynomial Projections, 2020,
        arXiv:2008.07669.

    Example:
        >>> A, B = hippo_legs(2)
        >>> A, B
        (tensor([[-1.0000,  0.0000],
                [-1.7321, -2.0000]]), tensor([1.0000, 1.7321]))
    """
    return _hippo("hippo_legs", "legs", state_size, dtype, device)


def hippo(
    measure: str,
    state_size: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns HiPPO's system h' = A h + B u, whose state holds coefficients of the past input.

    "legs" is :func:`hippo_legs`. Of the others, h_n is the integral of u(t - x) g_n(x) over the
    age x with the weight of the measure, n, k = 0, ..., N - 1:

    =======  ======================================  =====================================
    measure  A[n, k], B[n]                           g_n(x), weight
    =======  ======================================  =====================================
    "legt"   ``-r_n r_k / 2``, times ``(-1)^(n-k)``  ``r_n P_n(1 - x)``, 1/2 up to x = 2;
             for n < k; ``r_n / 2``                  ``r_n = sqrt(2 n + 1)``
    "lagt"   -1/2 for n = k, -1 for n > k, else 0;   ``exp(-x / 2) L_n(x)``, 1
             1
    "fout"   ``D - B B^T``; 1, 0, then sqrt(2) for   1, 0, then ``sqrt(2) cos(pi m x)`` and
             cosines and 0 for sines                 ``sqrt(2) sin(pi m x)``, 1/2 up to x = 2
    =======  ======================================  =====================================

    P and L are polynomials of Legendre and Laguerre, and D has ``-pi m`` and ``pi m`` between the
    cosine and the sine of m = 1, ..., N / 2 - 1. "lagt" is exact. "legt" and "fout" replace the
    input that leaves the window by what the state says of it, and are exact for inputs that the
    state holds: polynomials of degrees below N, and these waves.

    Args:
        measure: see above.
        state_size: N, even for "fout".
        dtype, device: of the results; default torch's.

    Returns:
        A (N, N) and B (N,).

    Raises:
        ValueError: an unknown measure; a state_size below 1, or odd for "fout".

    Note:
        Windows have the length 2, as in state-spaces/s4; a step dt makes them 2 / dt tokens long.

    Reference:
        Gu et al., HiPPO, 2020, arXiv:2008.07669; Gu et al., How to Train Your HiPPO, 2022,
        arXiv:2206.12037. Verified against src/models/hippo/hippo.py of state-spaces/s4 at commit
        e757cef.

    Example:
        >>> hippo("lagt", 2)
        (tensor([[-0.5000,  0.0000],
                [-1.0000, -0.5000]]), tensor([1., 1.]))
    """
    require_choice("hippo", "measure", measure, MEASURES)
    return _hippo("hippo", measure, state_size, dtype, device)


def _hippo(
    op: str,
    measure: str,
    state_size: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:
    if measure == "fout":
        _require_even(op, state_size)
    require_int(op, "state_size", state_size, 1)
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"{op}: dtype must be floating-point, got dtype={dtype}")
    A, B = _transition(measure, state_size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return A.to(device, dtype), B.to(device, dtype)


def _transition(measure: str, state_size: int) -> tuple[Tensor, Tensor]:
    """Computes A and B in fp64."""
    n = torch.arange(state_size, dtype=torch.float64)
    if measure == "lagt":
        one = torch.ones(state_size, state_size, dtype=torch.float64)
        return one.diag().diag() / 2 - one.tril(), one[0]
    if measure == "fout":
        B = (1 - n % 2) * math.sqrt(2)
        B[0] = 1
        between = math.pi * (n // 2 * (n % 2))[1:]
        return between.diag(-1) - between.diag(1) - B[:, None] * B, B
    root = (2 * n + 1).sqrt()
    if measure == "legs":
        return (root[:, None] * -root).tril(-1) - torch.diag(n + 1), root
    A = root[:, None] * root / -2
    return torch.where(n[:, None] < n, (-1.0) ** (n[:, None] - n) * A, A), root / 2


def nplr(
    state_size: int,
    *,
    measure: str = "legs",
    dtype: torch.dtype = torch.complex64,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns HiPPO's system as diagonal minus low rank, in the basis V of its normal part.

    ``A = V (diag(Lambda) - P P*) V*`` and ``B = V B'``, where Re Lambda is -1/2 for "legs" and 0
    for others. Of each pair of conjugates only the one with Im Lambda >= 0 is given; the other one
    is conjugate in all results. The rank is one, and two for "legt".

    Args:
        state_size: N, even.
        measure: of :func:`hippo`.
        dtype: complex64 or complex128. device: of the results.

    Returns:
        Lambda, P, B' (N / 2,), Lambda ascending in its imaginary part, and V (N, N / 2); for "legt"
        P (2, N / 2).

    Raises:
        TypeError: a dtype that is not complex.
        ValueError: an unknown measure; a state_size that is odd or below 2.

    Reference:
        Gu, Goel and Re, Efficiently Modeling Long Sequences with Structured State Spaces, 2021,
        arXiv:2111.00396, section 3 and appendix C. Verified against nplr of
        src/models/hippo/hippo.py in state-spaces/s4 at commit e757cef, which clips B'.

    Example:
        >>> Lambda, P, B, V = nplr(4)
        >>> Lambda
        tensor([-0.5000+0.5565j, -0.5000+4.6033j])
    """
    op = "nplr"
    _require_even(op, state_size)
    _require_complex(op, dtype)
    require_choice(op, "measure", measure, MEASURES)
    A, B = _transition(measure, state_size)
    P, real = _correction(measure, B), -0.5 if measure == "legs" else 0.0
    if measure == "fout":  # a cosine and a sine make a pair, also those of frequency 0
        upper = math.pi * torch.arange(state_size // 2, dtype=torch.float64)
        pair = torch.tensor([[1.0], [-1j]], dtype=torch.complex128) / math.sqrt(2)
        V = torch.kron(torch.eye(state_size // 2, dtype=torch.complex128), pair)
    else:
        # A + P P^T - real is skew-symmetric: -i times it is Hermitian.
        skew = A + P.mT @ P - real * torch.eye(state_size, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(skew * -1j)
        upper, V = values[state_size // 2 :], vectors[:, state_size // 2 :]
    turned = (P + 0j) @ V.conj()
    results = torch.complex(torch.full_like(upper, real), upper), turned, V.mH @ (B + 0j)
    Lambda, P, B, V = (t.to(device, dtype) for t in (*results, V))
    return Lambda, P[0] if len(P) == 1 else P, B, V


def _correction(measure: str, B: Tensor) -> Tensor:
    """Returns P (rank, N) in fp64, by which A + P^T P is normal."""
    if measure == "legt":
        even = torch.arange(len(B)) % 2 == 0
        return B * math.sqrt(2) * torch.stack((~even, even))
    if measure == "fout":
        return B[None]
    return B[None] * math.sqrt(0.5)


def ssm_init(
    kind: str,
    state_size: int,
    *,
    dtype: torch.dtype = torch.complex64,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns the initial A of a diagonal state-space model, one of each conjugate pair.

    For n = 0, ..., N / 2 - 1: "s4d-lin" ``-1/2 + i pi n``, "s4d-inv"
    ``-1/2 + i N / pi (N / (2 n + 1) - 1)``, "s4d-real" ``-(n + 1)``, and "legs" the Lambda of
    :func:`nplr`, the normal part of HiPPO-LegS.

    Args:
        kind: see above.
        state_size: N, even.
        dtype: complex64 or complex128. device: of the result.

    Returns:
        A (N / 2,).

    Raises:
        TypeError: a dtype that is not complex.
        ValueError: an unknown kind; a state_size that is odd or below 2.

    Reference:
        Gu et al., On the Parameterization and Initialization of Diagonal State Space Models, 2022,
        arXiv:2206.11893.

    Example:
        >>> ssm_init("s4d-lin", 4)
        tensor([-0.5000+0.0000j, -0.5000+3.1416j])
    """
    op = "ssm_init"
    require_choice(op, "kind", kind, INITS)
    _require_even(op, state_size)
    _require_complex(op, dtype)
    if kind == "legs":
        return nplr(state_size, dtype=dtype, device=device)[0]
    n = torch.arange(state_size // 2, dtype=torch.float64)
    if kind == "s4d-real":
        A = torch.complex(-(n + 1), torch.zeros_like(n))
    else:
        inverse = state_size / math.pi * (state_size / (2 * n + 1) - 1)
        A = torch.complex(torch.full_like(n, -0.5), math.pi * n if kind == "s4d-lin" else inverse)
    return A.to(device, dtype)


def _require_even(op: str, state_size: int) -> None:
    require_int(op, "state_size", state_size, 2)
    if state_size % 2:
        raise ValueError(f"{op}: state_size must be even, got state_size={state_size}")


def _require_complex(op: str, dtype: torch.dtype) -> None:
    if dtype not in (torch.complex64, torch.complex128):
        raise TypeError(f"{op}: dtype must be complex64 or complex128, got dtype={dtype}")
