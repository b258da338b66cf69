"""S4 and S4D: state-space models as convolutions and as recurrences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from omniattn.checks.arguments import (
    full_precision,
    require_bool,
    require_choice,
    require_int,
    require_strided,
    require_tensor,
)
from omniattn.functional.state_space._s4 import (
    State,
    by_rank,
    by_recurrence,
    final_state,
    real_system,
    real_system_kernel,
    real_system_states,
    require_call,
    require_input,
    require_parameter,
    require_skip,
    require_terms,
)
from omniattn.functional.state_space.parameters import RULES, discretize, expm1
from omniattn.functional.state_space.structured import vandermonde
from omniattn.reference.empty import nothing_of

__all__ = ["fft_conv", "s4", "s4_kernel", "s4d", "s4d_kernel"]

#: Bytes of complex numbers per block of channels, for a level-2 cache.
_BLOCK_BYTES = 1 << 20


def fft_conv(
    u: Tensor, kernel: Tensor, D: Tensor | None = None, *, delayed: bool = False
) -> Tensor:
    """Causal convolution of each channel with a filter as long as the sequence, by FFT.

    ``y[t] = sum_{j <= t} kernel[:, j] u[t - j] + D u[t]``, or with a filter for each pair of output
    and input ``y[t] = sum_{j <= t} kernel[j] u[t - j] + D u[t]``.

    Args:
        u: (B, T, H), float64, float32, bfloat16 or float16.
        kernel: (H, L), or (L, outputs, H) as :func:`ssm_kernel` makes it; float32 (float64 for a
            float64 u); taps from T on are not used.
        D: (H,), or (outputs, H), of the kernel's dtype, or None.
        delayed: tap j multiplies ``u[t - 1 - j]``: outputs use the state before the step's input.

    Returns:
        y (B, T, H), or (B, T, outputs), of u's dtype.

    Raises:
        TypeError: a dtype is unsupported or does not match u's.
        ValueError: a shape or device that does not fit.

    Note:
        Transforms of length 2 T in fp32 (fp64 for fp64), of a few channels at a time, so that the
        complex numbers of a block stay in the caches. The result is rounded once. The transforms
        are torch's, whose bits may depend on the number of threads; so do `s4d` and `s4`.

    Reference:
        Gu, Goel and Re, Efficiently Modeling Long Sequences with Structured State Spaces, 2021,
        arXiv:2111.00396.

    Example:
        >>> u = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
        >>> fft_conv(u, torch.tensor([[1.0, 10.0]])).flatten().round()
        tensor([ 1., 12., 23.])
    """
    op = "fft_conv"
    dtype = require_input(op, u)
    steps, channels = u.shape[1:]
    require_tensor(op, "kernel", kernel)
    require_strided(op, "kernel", kernel)
    mixes = kernel.ndim == 3
    if kernel.ndim not in (2, 3) or kernel.shape[2 if mixes else 0] != channels:
        raise ValueError(
            f"{op}: kernel must have shape (H, L) or (L, outputs, H) with the H of u, "
            f"got kernel.shape={tuple(kernel.shape)}, u.shape={tuple(u.shape)}"
        )
    require_parameter(op, "kernel", kernel, u, dtype)
    require_skip(op, D, u, dtype, tuple(kernel.shape[1:]) if mixes else (channels,))
    require_bool(op, "delayed", delayed)
    if mixes:
        return _mixed(u.to(dtype), kernel, D, delayed).to(u.dtype)
    taps = kernel[:, :steps]
    if delayed:
        taps = torch.nn.functional.pad(taps[:, : max(steps - 1, 0)], (1, 0))
    x = u.to(dtype)
    if u.numel() == 0 or taps.shape[1] == 0:
        y = torch.zeros_like(x) + nothing_of(x, kernel)
    else:
        block = max(1, _BLOCK_BYTES // (2 * steps * u.shape[0] * x.element_size()))
        if is_compiling():  # a graph has a node for each operation of each block
            block = channels
        parts = zip(x.mT.split(block, 1), taps.split(block), strict=True)
        y = torch.cat([_convolved(*part) for part in parts], 1).mT
    if D is not None:
        y = y + D * x
    return y.to(u.dtype)


def _mixed(x: Tensor, kernel: Tensor, D: Tensor | None, delayed: bool) -> Tensor:
    """Convolves x (B, T, H) with kernel (L, outputs, H) and D (outputs, H): (B, T, outputs)."""
    steps = x.shape[1]
    taps = kernel[: max(steps - delayed, 0)]
    if x.numel() == 0 or taps.numel() == 0:
        y = x.new_zeros(*x.shape[:2], kernel.shape[1]) + nothing_of(x, kernel)
    else:
        size = 2 * steps
        inputs, filters = torch.fft.rfft(x, n=size, dim=1), torch.fft.rfft(taps, n=size, dim=0)
        y = torch.fft.irfft(torch.einsum("bfi,foi->bfo", inputs, filters), n=size, dim=1)
        y = y[:, : steps - delayed]
        if delayed:
            y = torch.nn.functional.pad(y, (0, 0, 1, 0))
    if D is None:
        return y
    with full_precision(x):
        return y + x @ D.mT


def _convolved(x: Tensor, taps: Tensor) -> Tensor:
    """Convolves x (B, C, T) with taps (C, L <= T)."""
    size = 2 * x.shape[-1]
    product = torch.fft.rfft(x, n=size) * torch.fft.rfft(taps, n=size)
    return torch.fft.irfft(product, n=size)[..., : x.shape[-1]]


def s4d_kernel(A: Tensor, C: Tensor, dt: Tensor, length: int, *, rule: str = "zoh") -> Tensor:
    """Returns the convolution kernel of a diagonal state-space model.

    ``K[h, l] = 2 Re sum_n C[h, n] Ab[h, n]^l Bb[h, n]``, with Ab and Bb from :func:`discretize` of
    A and B = 1.

    Args:
        A: (H, N) complex64 or complex128: of each pair of conjugates one, its real part at most 0,
            which is not checked on CUDA or in a trace.
        C: (H, N) of A's dtype.
        dt: (H,) float32 (float64 for complex128), the step sizes, at least 0, checked like A.
        length: L.
        rule: of :func:`discretize`.

    Returns:
        K (H, L) of dt's dtype.

    Raises:
        TypeError: a dtype is unsupported or does not match A's.
        ValueError: a shape, device or value is invalid.

    Note:
        By :func:`vandermonde`, which never stores (H, N, L) numbers.

    Reference:
        Gu et al., On the Parameterization and Initialization of Diagonal State Space Models, 2022,
        arXiv:2206.11893.

    Example:
        >>> A = torch.tensor([[-1 + 0j]])
        >>> s4d_kernel(A, A * 0 + 1, torch.tensor([2.0]).log(), 3)
        tensor([[1.0000, 0.5000, 0.2500]])
    """
    op = "s4d_kernel"
    require_terms(op, A, {"C": C}, dt)
    require_int(op, "length", length, 0, 2**31 - 1)
    x, ab, bb = _diagonal(op, A, dt, rule)
    return vandermonde(C * bb, _log(x, ab, rule), length)


def _diagonal(op: str, A: Tensor, dt: Tensor, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dt A, Ab and Bb."""
    require_choice(op, "rule", rule, RULES)
    return A * dt[:, None], *discretize(A, torch.ones_like(A), dt, rule)


def _growth(x: Tensor, rule: str) -> Tensor:
    """Computes ``Ab - 1`` of x = dt A, with the digits of dt that Ab itself loses."""
    if rule == "euler":
        return x
    return x / (1 - x / 2) if rule == "bilinear" else expm1(x)


def _log(x: Tensor, ab: Tensor, rule: str) -> Tensor:
    """Computes the logarithm of Ab without losing the digits of dt."""
    if rule in ("zoh", "mamba"):
        return x
    # Replaces 0, which has no logarithm; this number and its inverse, which occurs in gradients,
    # are far from overflow and underflow.
    tiny = torch.finfo(x.real.dtype).tiny ** 0.5
    log, small = (ab + (ab == 0).to(ab.dtype) * tiny).log(), x.abs() < 0.5
    near = torch.where(small, x, 0)
    near = _log1p(near) if rule == "euler" else _log1p(near / 2) - _log1p(-near / 2)
    return torch.where(small, near, log)


def _log1p(x: Tensor) -> Tensor:
    """Computes log(1 + x); torch's for complex numbers rounds 1 + x first."""
    re, im = x.real, x.imag
    return torch.complex((re * (2 + re) + im * im).log1p() / 2, torch.atan2(im, 1 + re))


def s4d(
    u: Tensor,
    A: Tensor,
    C: Tensor,
    dt: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    mode: str = "conv",
    rule: str = "zoh",
) -> Tensor | tuple[Tensor, Tensor]:
    """Diagonal state-space model per channel (S4D).

    ``s_t = Ab s_{t-1} + Bb u_t``, ``y_t = 2 Re sum_n C_n s_{t,n} + D u_t``, with Ab and Bb from
    :func:`discretize` of A and B = 1.

    Args:
        u: (B, T, H), float64, float32, bfloat16 or float16.
        A, C, dt: as in :func:`s4d_kernel`, for a u of float64 in complex128 and float64, else in
            complex64 and float32.
        D: (H,) of dt's dtype, or None.
        initial_state: (B, H, N) of A's dtype; None for zeros.
        output_final_state: if True, also returns the state after the last token.
        mode: "conv" computes the kernel and convolves by FFT, in O(T log T); "recurrent" runs step
            by step, for decoding. The results are equivalent.
        rule: of :func:`discretize`. With "euler" states grow where ``|1 + dt A| > 1``, though
            Re A is below 0: the largest A of "s4d-lin" allow a dt of (2 / (pi N))^2 at most.

    Returns:
        y of u's shape and dtype; with output_final_state the pair (y, state).

    Raises:
        TypeError: a dtype is unsupported or does not match u's.
        ValueError: a shape, device or value is invalid.

    Note:
        In "conv" an initial state adds ``2 Re sum_n C_n Ab_n^{t+1} s_n``, by :func:`vandermonde`.
        With states torch.export restricts T, while torch.compile takes any. Where Ab is 0
        (dt A is -1 with "euler", -2 with "bilinear") only "recurrent" has second derivatives.

    Reference:
        As :func:`s4d_kernel`.

    Example:
        >>> A, dt = torch.tensor([[-1 + 0j]]), torch.tensor([2.0]).log()
        >>> y, state = s4d(torch.ones(1, 2, 1), A, A * 0 + 1, dt, output_final_state=True)
        >>> y.flatten(), state.real.flatten()
        (tensor([1.0000, 1.5000]), tensor([0.7500]))
    """
    op = "s4d"
    require_call(op, u, A, {"C": C}, dt, D, initial_state, output_final_state, mode)
    x, ab, bb = _diagonal(op, A, dt, rule)
    if mode == "recurrent":
        growth = _growth(x, rule)

        def step(s: Tensor, v: Tensor) -> State:
            s = s + (growth * s + bb * v[..., None])
            return 2 * (C * s).real.sum(-1), s

        y, state = by_recurrence(u, D, step, initial_state, A)
        return (y, state) if output_final_state else y
    steps, log_ab = u.shape[1], _log(x, ab, rule)
    y = fft_conv(u, vandermonde(C * bb, log_ab, steps), D)
    if initial_state is not None:
        first = (C * ab * initial_state).flatten(0, 1)
        powers = log_ab.expand_as(initial_state).flatten(0, 1)
        decayed = vandermonde(first, powers, steps).unflatten(0, u.shape[::2])
        y = (y + decayed.mT).to(u.dtype)
    if not output_final_state:
        return y
    return y, final_state(u.to(dt.dtype), log_ab, bb, initial_state)


def s4_kernel(Lambda: Tensor, P: Tensor, B: Tensor, C: Tensor, dt: Tensor, length: int) -> Tensor:
    """Returns the convolution kernel of a state-space model with a diagonal-minus-low-rank matrix.

    ``K[h, l] = 2 Re sum_n conj(C[h, n]) (Ab^l Bb)[h, n]`` of the bilinear Ab and Bb of
    ``A = diag(Lambda) - P P*``, which is a matrix over both conjugates of each pair. Of R vectors
    P, the products are added.

    Args:
        Lambda: (H, N) complex64 or complex128: of each pair of conjugates one, its real part at
            most 0, which is not checked on CUDA or in a trace.
        P, B, C: (H, N) of Lambda's dtype, or P (H, R, N). C is conjugated, as in the paper;
            state-spaces/s4 has the conjugate of C.
        dt: (H,) float32 (float64 for complex128), the step sizes, at least 0, checked like Lambda.
        length: L.

    Returns:
        K (H, L) of dt's dtype.

    Raises:
        TypeError: a dtype is unsupported or does not match Lambda's.
        ValueError: a shape, device or value is invalid.

    Note:
        By dense powers of Ab, in O(N^3 log L + N L) time and O(N^2 log L + N sqrt(L)) memory for
        each channel, and as exact in fp32 for tiny dt and many taps as for others. The generating
        function of the paper, which :func:`cauchy` sums, takes Ab^L too, to cut K off after L taps;
        it is slower and loses digits where ``dt Lambda`` is tiny or huge.

    Reference:
        Gu, Goel and Re, Efficiently Modeling Long Sequences with Structured State Spaces, 2021,
        arXiv:2111.00396, section 4.

    Example:
        >>> Lambda, one = torch.tensor([[-1 + 0j]]), torch.tensor([[1 + 0j]])
        >>> s4_kernel(Lambda, one * 0, one, one, torch.tensor([2 / 3]), 3)
        tensor([[1.0000, 0.5000, 0.2500]])
    """
    op = "s4_kernel"
    require_terms(op, Lambda, {"P": P, "B": B, "C": C}, dt, "Lambda")
    require_int(op, "length", length, 0, 2**31 - 1)
    with full_precision(Lambda):
        return real_system_kernel(real_system(Lambda, P, B, C, dt), int(length))


def s4(
    u: Tensor,
    Lambda: Tensor,
    P: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    mode: str = "conv",
) -> Tensor | tuple[Tensor, Tensor]:
    """State-space model with a diagonal-minus-low-rank matrix per channel (S4).

    ``s_t = Ab s_{t-1} + Bb u_t``, ``y_t = 2 Re sum_n conj(C_n) s_{t,n} + D u_t``.

    Args:
        u: (B, T, H), float64, float32, bfloat16 or float16.
        Lambda, P, B, C, dt: as in :func:`s4_kernel`, for a u of float64 in complex128 and float64,
            else in complex64 and float32.
        D, initial_state, output_final_state, mode: as in :func:`s4d`.

    Returns:
        y of u's shape and dtype; with output_final_state the pair (y, state (B, H, N)).

    Raises:
        TypeError: a dtype is unsupported or does not match u's.
        ValueError: a shape, device or value is invalid.

    Note:
        A step costs O(N) by Woodbury's identity. In "conv" states go in and out by dense powers,
        64 tokens at a time. With states torch.export fixes T; torch.compile does not.

    Reference:
        As :func:`s4_kernel`.

    Example:
        >>> Lambda, one = torch.tensor([[-1 + 0j]]), torch.tensor([[1 + 0j]])
        >>> dt = torch.tensor([2 / 3])
        >>> s4(torch.ones(1, 2, 1), Lambda, one * 0, one, one, dt).flatten()
        tensor([1.0000, 1.5000])
    """
    op = "s4"
    vectors = {"P": P, "B": B, "C": C}
    require_call(op, u, Lambda, vectors, dt, D, initial_state, output_final_state, mode, "Lambda")
    if mode == "recurrent":
        # s + X dt (A s + B v) keeps the digits of dt, with X, the inverse of 1 - dt A / 2, by
        # Woodbury's identity; P* s over both conjugates is a real number.
        size, P = dt[:, None], by_rank(P)
        diagonal = 1 - size * Lambda / 2
        turned = P / diagonal[:, None]
        factor = _woodbury(P, turned, dt)

        def along(s: Tensor) -> Tensor:
            return (P.conj() * s[..., None, :]).real.sum(-1, keepdim=True)

        def step(s: Tensor, v: Tensor) -> State:
            slope = Lambda * s - (2 * P * along(s)).sum(-2) + B * v[..., None]
            found = size * slope / diagonal
            s = s + found - (turned * (factor * along(found).mT).sum(-1, keepdim=True)).sum(-2)
            return 2 * (C.conj() * s).real.sum(-1), s

        y, state = by_recurrence(u, D, step, initial_state, Lambda)
        return (y, state) if output_final_state else y
    with full_precision(u):
        system = real_system(Lambda, P, B, C, dt)
        y = fft_conv(u, real_system_kernel(system, u.shape[1]), D)
        if initial_state is None and not output_final_state:
            return y
        decayed, state = real_system_states(u.to(dt.dtype), system, initial_state)
    if decayed is not None:
        y = (y + decayed).to(u.dtype)
    return (y, state) if output_final_state else y


def _woodbury(P: Tensor, turned: Tensor, dt: Tensor) -> Tensor:
    """Computes ``dt (1 + dt Re(P* turned))^-1`` (H, R, R) of P and turned (H, R, N)."""
    size = dt[:, None, None]
    product = size * (P.conj()[:, :, None] * turned[:, None]).real.sum(-1)
    one = torch.eye(P.shape[1], dtype=dt.dtype, device=dt.device)
    if P.shape[1] == 1:
        return size / (one + product)
    return torch.linalg.solve(one + product, size * one)
