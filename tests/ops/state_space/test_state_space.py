"""Discretisation and HiPPO against dense matrices in fp64; convolutions; errors."""

import importlib
import math

import numpy
import pytest
import torch

from omniattn import functional as F

F64, C128 = torch.float64, torch.complex128
RULES = ("zoh", "bilinear", "euler", "mamba")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def both(t: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Appends the conjugates."""
    return torch.cat((t, t.conj()), dim)


def stable(*shape: int, seed: int = 0) -> torch.Tensor:
    x = draw(*shape, seed=seed, dtype=C128)
    return torch.complex(-0.2 - x.real.abs(), 4 * x.imag)


def dense_rule(A, B, dt, rule):
    """As the definition says, of (N, N) matrices with an inverse."""
    one, x = torch.eye(len(A), dtype=A.dtype), dt * A
    if rule == "bilinear":
        inverse = torch.linalg.inv(one - x / 2)
        return inverse @ (one + x / 2), inverse @ (dt * B)
    if rule == "euler":
        return one + x, dt * B
    power = torch.matrix_exp(x)
    return power, dt * B if rule == "mamba" else torch.linalg.solve(A, (power - one) @ B)


@pytest.mark.parametrize("rule", RULES)
def test_discretize(rule):
    A, B = draw(5, 5) - 2 * torch.eye(5, dtype=F64), draw(5, seed=1)
    torch.testing.assert_close(F.discretize(A, B, 0.3, rule), dense_rule(A, B, 0.3, rule))
    sizes = torch.tensor([0.1, 0.7], dtype=F64)
    for i, (ab, bb) in enumerate(zip(*F.discretize(A, B, sizes, rule), strict=True)):
        torch.testing.assert_close((ab, bb), dense_rule(A, B, sizes[i], rule))

    A, B = stable(2, 5), draw(2, 5, seed=1, dtype=C128)
    ab, bb = F.discretize(A, B, sizes, rule)
    for i in range(2):
        expected, vector = dense_rule(torch.diag(A[i]), B[i], sizes[i], rule)
        torch.testing.assert_close((torch.diag(ab[i]), bb[i]), (expected, vector))


def test_zoh_where_a_has_no_inverse():
    """u held over a step adds dt B to an integrator."""
    A, B = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64)
    ab, bb = F.discretize(A, B, 0.5)
    torch.testing.assert_close(ab, torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=F64))
    torch.testing.assert_close(bb, torch.tensor([0.125, 0.5], dtype=F64))
    a = torch.zeros(3, dtype=C128, requires_grad=True)
    ab, bb = F.discretize(a, torch.ones(3, dtype=C128), 0.5)
    torch.testing.assert_close(bb.detach(), torch.full((3,), 0.5 + 0j, dtype=C128))
    (grad,) = torch.autograd.grad(bb.real.sum(), a)
    torch.testing.assert_close(grad, torch.full((3,), 0.125 + 0j, dtype=C128))


@pytest.mark.parametrize("size", [1e-8, 9e-5, 1.1e-4, 1e-2, 1.0, 5.0])
def test_zoh_of_small_steps(size):
    A = torch.polar(torch.full((16,), size, dtype=F64), torch.linspace(1.6, 4.7, 16, dtype=F64))
    A = A.to(torch.complex64)
    exact = torch.linalg.solve(
        torch.diag(A.to(C128)), torch.expm1(A.to(C128)) if size >= 1 else _series(A.to(C128))
    )
    bb = F.discretize(A, torch.ones_like(A), 1.0)[1]
    torch.testing.assert_close(bb.to(C128), exact, rtol=5e-7, atol=0)


def _series(x: torch.Tensor) -> torch.Tensor:
    return sum(x**k / math.factorial(k) for k in range(1, 20))


def test_hippo_legs():
    A, B = F.hippo_legs(8, dtype=F64)
    torch.testing.assert_close(
        torch.linalg.eigvals(A).real.sort().values, -torch.arange(8, 0, -1, dtype=F64)
    )
    assert A.triu(1).count_nonzero() == 0
    torch.testing.assert_close(A[3, 1], -torch.tensor(7 * 3, dtype=F64).sqrt())
    torch.testing.assert_close(B, torch.tensor([2 * n + 1 for n in range(8)], dtype=F64).sqrt())
    P = (torch.arange(8, dtype=F64) + 0.5).sqrt()
    normal = A + P[:, None] * P
    torch.testing.assert_close(normal + normal.T, -torch.eye(8, dtype=F64))


def test_nplr_is_hippo():
    A, B = F.hippo_legs(8, dtype=F64)
    Lambda, P, b, V = F.nplr(8, dtype=C128)
    assert (Lambda.imag > 0).all() and torch.equal(Lambda.real, torch.full_like(Lambda.real, -0.5))
    basis, p = both(V), both(P)
    torch.testing.assert_close(basis.mH @ basis, torch.eye(8, dtype=C128))
    matrix = basis @ (torch.diag(both(Lambda)) - p[:, None] * p.conj()) @ basis.mH
    torch.testing.assert_close(matrix, A + 0j)
    torch.testing.assert_close(basis @ both(b), B + 0j)
    assert torch.equal(F.ssm_init("legs", 8, dtype=C128), Lambda)


def laguerre(n, x):
    """exp(-x / 2) L_n(x)."""
    return (-x / 2).exp() * torch.special.laguerre_polynomial_l(x, n)


def legendre(n, x):
    return math.sqrt(2 * n + 1) * torch.special.legendre_polynomial_p(1 - x, n)


def wave(n, x):
    if n < 2:
        return torch.full_like(x, 1 - n)
    return math.sqrt(2) * (torch.sin if n % 2 else torch.cos)(math.pi * (n // 2) * x)


def test_the_state_of_lagt_is_of_laguerre():
    A, B = F.hippo("lagt", 8, dtype=F64)
    for age in (0.0, 0.3, 2.0, 7.0):
        expected = torch.stack([laguerre(n, torch.tensor(age, dtype=F64)) for n in range(8)])
        torch.testing.assert_close(torch.matrix_exp(age * A) @ B, expected)


@pytest.mark.parametrize("measure", ["legt", "fout"])
def test_projections_of_a_window_obey_the_system(measure):
    """By Gauss' rule: h' = A h + B u for all inputs that the state can hold, 8 of them."""
    A, B = F.hippo(measure, 8, dtype=F64)
    basis = legendre if measure == "legt" else wave
    nodes, weights = (torch.from_numpy(t) for t in numpy.polynomial.legendre.leggauss(60))
    x, t = nodes + 1, torch.tensor(0.7, dtype=F64)

    def state(u, t):
        return torch.stack([(basis(n, x) * u(t - x) * weights).sum() / 2 for n in range(8)])

    for n in range(8):

        def u(time, n=n):
            return basis(n, time) if measure == "fout" else (time / 2) ** n

        _, slope = torch.func.jvp(lambda t, u=u: state(u, t), (t,), (torch.ones_like(t),))
        torch.testing.assert_close(slope, A @ state(u, t) + B * u(t))


def public_transition(measure, size):
    """Formulas of transition in src/models/hippo/hippo.py of state-spaces/s4, commit e757cef."""
    n, k = numpy.arange(size)[:, None], numpy.arange(size)
    if measure == "lagt":
        return numpy.eye(size) / 2 - (n >= k), numpy.ones(size)
    root = (2.0 * k + 1) ** 0.5
    if measure == "legt":
        signs = numpy.where(n < k, (-1.0) ** (n - k), 1)
        return -root[:, None] * signs * root / 2, root / 2
    A, B = numpy.zeros((size, size)), numpy.where(k % 2 == 0, 2**0.5, 0)
    B[0] = 1
    for m in range(1, size // 2):
        A[2 * m, 2 * m + 1], A[2 * m + 1, 2 * m] = -math.pi * m, math.pi * m
    return A - B[:, None] * B, B


@pytest.mark.parametrize("size", [2, 4, 10])
@pytest.mark.parametrize("measure", ["legt", "lagt", "fout"])
def test_nplr_of_other_measures(measure, size):
    A, B = F.hippo(measure, size, dtype=F64)
    for found, expected in zip((A, B), public_transition(measure, size), strict=True):
        torch.testing.assert_close(found, torch.from_numpy(expected))
    Lambda, P, b, V = F.nplr(size, measure=measure, dtype=C128)
    assert P.shape == ((2, size // 2) if measure == "legt" else (size // 2,))
    assert (Lambda.real == 0).all() and (Lambda.imag >= 0).all()
    assert torch.equal(Lambda.imag.sort().values, Lambda.imag)
    if measure == "lagt":  # of the skew-symmetric matrix of signs
        angles = math.pi * (torch.arange(size // 2, dtype=F64) + 0.5) / size
        torch.testing.assert_close(Lambda.imag, (0.5 / angles.tan()).sort().values)
    basis, p = both(V), both(P).reshape(-1, size)
    torch.testing.assert_close(basis.mH @ basis, torch.eye(size, dtype=C128))
    matrix = basis @ (torch.diag(both(Lambda)) - p.mT @ p.conj()) @ basis.mH
    torch.testing.assert_close(matrix, A + 0j)
    torch.testing.assert_close(basis @ both(b), B + 0j)


def test_ssm_init():
    n = torch.arange(4, dtype=F64)
    lin, inv, real = (F.ssm_init(k, 8, dtype=C128) for k in ("s4d-lin", "s4d-inv", "s4d-real"))
    torch.testing.assert_close(lin, torch.complex(0 * n - 0.5, math.pi * n))
    torch.testing.assert_close(inv, torch.complex(0 * n - 0.5, 8 / math.pi * (8 / (2 * n + 1) - 1)))
    torch.testing.assert_close(real, -(n + 1) + 0j)
    assert F.ssm_init("s4d-lin", 2).dtype == torch.complex64


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: F.discretize(torch.ones(3).half(), torch.ones(3).half(), 1.0), TypeError, "A.dty"),
        (lambda: F.discretize(torch.ones(3), torch.ones(3).double(), 1.0), TypeError, "B.dtype"),
        (lambda: F.discretize(torch.ones(3), torch.ones(4), 1.0), ValueError, r"B.shape=\(4,\)"),
        (lambda: F.discretize(torch.ones(2, 3), torch.ones(3), 1.0), ValueError, r"A.shape=\(2, "),
        (lambda: F.discretize(torch.ones(3), torch.ones(()), 1.0), ValueError, r"B.shape=\(\)"),
        (lambda: F.discretize(torch.ones(3), torch.ones(3), 0.0), ValueError, "dt must be .* > 0"),
        (lambda: F.discretize(torch.ones(3), torch.ones(3), torch.ones(1) + 0j), TypeError, "real"),
        (
            lambda: F.discretize(torch.ones(3), torch.ones(3), torch.ones(1) > 0),
            TypeError,
            "dt must",
        ),
        (lambda: F.discretize(torch.ones(3), torch.ones(3), True), TypeError, "dt must .*dt=True"),
        (lambda: F.discretize(torch.ones(3), torch.ones(3), math.nan), ValueError, "got dt=nan"),
        (lambda: F.discretize(torch.ones(3), torch.ones(3), 1.0, "foh"), ValueError, "rule='foh'"),
        (lambda: F.hippo_legs(0), ValueError, "hippo_legs: .* state_size=0"),
        (lambda: F.hippo("legt", 0), ValueError, "hippo: .* state_size=0"),
        (lambda: F.hippo("fout", 3), ValueError, "hippo: state_size must be even"),
        (lambda: F.hippo("lmu", 4), ValueError, "hippo: measure must be .* measure='lmu'"),
        (lambda: F.nplr(4, measure="lmu"), ValueError, "nplr: measure must be .* measure='lmu'"),
        (lambda: F.nplr(3), ValueError, "state_size must be even, got state_size=3"),
        (lambda: F.nplr(4, dtype=torch.float32), TypeError, "dtype=torch.float32"),
        (lambda: F.ssm_init("hippo", 4), ValueError, "kind='hippo'"),
        (lambda: F.ssm_init("legs", 1), ValueError, "state_size=1"),
    ],
)
def test_errors_of_systems(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Convolutions.


def convolved(u, kernel):
    """The sum over pairs of times."""
    out = torch.zeros_like(u)
    for t in range(u.shape[1]):
        for j in range(min(t + 1, kernel.shape[1])):
            out[:, t] += kernel[:, j] * u[:, t - j]
    return out


@pytest.mark.parametrize("taps", [1, 5, 9, 20])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_fft_conv(monkeypatch, taps, block):
    module = importlib.import_module("omniattn.functional.state_space.s4")
    monkeypatch.setattr(module, "_BLOCK_BYTES", block)
    u, kernel, D = draw(2, 9, 3), draw(3, taps, seed=1), draw(3, seed=2)
    expected = convolved(u, kernel)
    torch.testing.assert_close(F.fft_conv(u, kernel), expected)
    torch.testing.assert_close(F.fft_conv(u, kernel, D), expected + D * u)
    shifted = torch.nn.functional.pad(expected[:, :-1], (0, 0, 1, 0))
    torch.testing.assert_close(F.fft_conv(u, kernel, delayed=True), shifted)
    inputs = [t.requires_grad_() for t in (u, kernel, D)]
    assert torch.autograd.gradcheck(F.fft_conv, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fft_conv_rounds_once(dtype):
    u, kernel = draw(2, 40, 3).to(dtype), draw(3, 40, seed=1).float()
    y = F.fft_conv(u, kernel)
    assert y.dtype == dtype
    exact = convolved(u.double(), kernel.double())
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_nothing_to_convolve(shape):
    kernel = draw(shape[2], 5).requires_grad_()
    y = F.fft_conv(draw(*shape), kernel)
    assert y.shape == shape
    assert not torch.autograd.grad(y.sum(), kernel)[0].any()


def test_errors_of_convolutions():
    u, kernel = torch.ones(2, 75, 3), torch.ones(3, 75)
    with pytest.raises(ValueError, match=r"kernel must have shape \(H, L\).*shape=\(2, 75\)"):
        F.fft_conv(u, kernel[:2])
    with pytest.raises(ValueError, match=r"or \(L, outputs, H\).*shape=\(3, 1, 75\)"):
        F.fft_conv(u, kernel[:, None])
    with pytest.raises(ValueError, match=r"D must have shape \(2, 3\), got D.shape=\(3,\)"):
        F.fft_conv(u, torch.ones(5, 2, 3), torch.ones(3))
    with pytest.raises(TypeError, match=r"kernel must be torch.float32 with u.dtype=torch.float32"):
        F.fft_conv(u, kernel.double())
    with pytest.raises(TypeError, match=r"fft_conv: delayed must be True or False"):
        F.fft_conv(u, kernel, delayed=1)
    with pytest.raises(ValueError, match=r"fft_conv: kernel must be on the device of u"):
        F.fft_conv(u, kernel.to("meta"))


@pytest.mark.parametrize("size", [1e-5, 1e-4, 10**-3.5, 1e-2, 0.29, 0.31, 2.0])
def test_gradients_of_zero_order_hold_are_exact_in_fp32(size):
    for phase in (0.0, 1.0, 3.0):
        a = torch.polar(torch.tensor([size]), torch.tensor([torch.pi - phase])).requires_grad_()
        (grad,) = torch.autograd.grad(F.discretize(a, torch.ones_like(a), 1.0)[1].real.sum(), a)
        x = a.detach().to(torch.complex128)
        terms = [(n - 1) * x ** (n - 2) / float(math.factorial(n)) for n in range(2, 30)]
        torch.testing.assert_close(grad.conj(), sum(terms).to(grad), rtol=3e-6, atol=0)


def test_leading_sizes_devices_and_dtypes_are_named():
    A, B = torch.ones(3, 2), torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"discretize: A, B and dt must have leading sizes"):
        F.discretize(A, B, 0.1)
    with pytest.raises(ValueError, match="discretize: B must be on the device of A"):
        F.discretize(A.to("meta"), A, 0.1)
    with pytest.raises(TypeError, match=r"hippo_legs: dtype must be floating-point, got dtype="):
        F.hippo_legs(2, dtype=torch.int32)
    Ab, Bb = F.discretize(torch.ones(0, 0), torch.ones(0), 0.1)
    assert Ab.shape == (0, 0) and Bb.shape == (0,)
