"""Discretisation, HiPPO, S4 and S4D against dense matrices in fp64; states; errors."""

import importlib
import math

import pytest
import torch

from omniattn import functional as F
from omniattn import reference as R

F64, C128 = torch.float64, torch.complex128
RULES = ("zoh", "bilinear", "euler", "mamba")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def both(t: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """With the conjugates."""
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
        (lambda: F.discretize(torch.ones(3), torch.ones(3), 1.0, "foh"), ValueError, "rule='foh'"),
        (lambda: F.hippo_legs(0), ValueError, "state_size=0"),
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
    module = importlib.import_module("omniattn.functional.s4")
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


# S4D and S4.

B, T, H, N = 2, 75, 3, 4


def s4d_system():
    """A, C, dt, D."""
    sizes = 0.02 + 0.1 * draw(H, seed=2).abs()
    return stable(H, N), draw(H, N, seed=1, dtype=C128), sizes, draw(H, seed=3)


def s4_system():
    """Lambda, P, B, C, dt, D, near that of HiPPO."""
    noise = 0.1 * draw(3, H, N, seed=4, dtype=C128)
    terms = [t + n for t, n in zip(F.nplr(2 * N, dtype=C128), noise, strict=False)]
    return (*terms, *s4d_system()[1:])


def s4d_dense(rule="zoh"):
    A, C, dt, D = s4d_system()
    whole = torch.diag_embed(both(A)), torch.ones_like(both(A))
    return (*F.discretize(*whole, dt, rule), both(C), D)


def s4_dense():
    Lambda, P, b, C, dt, D = s4_system()
    p = both(P)
    A = torch.diag_embed(both(Lambda)) - p[..., None] * p.conj()[..., None, :]
    return (*F.discretize(A, both(b), dt, "bilinear"), both(C).conj(), D)


SYSTEMS = [(F.s4d, s4d_system, s4d_dense), (F.s4, s4_system, s4_dense)]


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 131])
@pytest.mark.parametrize("rule", RULES)
def test_s4d_kernel_is_a_power(rule, length):
    A, C, dt, _ = s4d_system()
    expected = R.ssm_kernel(*s4d_dense(rule)[:3], length)
    torch.testing.assert_close(F.s4d_kernel(A, C, dt, length, rule=rule), expected.real)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 64, 131])
def test_s4_kernel_is_a_power(length):
    """Even lengths read the transform at -1, where its formula has no value."""
    expected = R.ssm_kernel(*s4_dense()[:3], length)
    torch.testing.assert_close(F.s4_kernel(*s4_system()[:-1], length), expected.real)


def test_powers_of_zero():
    """1 + dt A = 0: a filter of one tap."""
    A, one = torch.tensor([[-2 + 0j]]), torch.tensor([[1 + 0j]])
    A.requires_grad_()
    y = F.s4d_kernel(A, one, torch.tensor([0.5]), 4, rule="euler")
    torch.testing.assert_close(y.detach(), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert torch.autograd.grad(y.sum(), A)[0].isfinite().all()


@pytest.mark.parametrize("rule, size", [("euler", 1.0), ("bilinear", 2.0)])
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64])
def test_gradients_of_powers_of_zero(rule, size, dtype):
    """Where dt A = -size, all powers of Ab are 0, and only the first one has a derivative."""
    A = torch.full((1, 1), -size, dtype=dtype, requires_grad=True)
    dt = torch.ones(1, dtype=A.real.dtype, requires_grad=True)
    u = torch.arange(1.0, 5.0, dtype=dt.dtype).view(1, 4, 1)
    found = []
    for mode in ("conv", "recurrent"):
        y, state = F.s4d(
            u, A, torch.ones_like(A), dt, rule=rule, mode=mode, output_final_state=True
        )
        found.append(torch.autograd.grad(y.sum() + state.real.sum(), (A, dt)))
    for conv, recurrent in zip(*found, strict=True):
        torch.testing.assert_close(conv, recurrent, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [0, 1, 64, T, 130])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("function", "system", "dense"), SYSTEMS)
def test_both_modes_are_the_dense_recurrence(function, system, dense, with_state, steps):
    u, state = draw(B, steps, H), draw(B, H, N, seed=5, dtype=C128) if with_state else None
    matrices, whole = dense(), None if state is None else both(state)
    y, last = R.ssm_recurrence(*matrices, u + 0j, whole)
    for mode in ("conv", "recurrent"):
        options = {"initial_state": state, "mode": mode}
        found = function(u, *system(), output_final_state=True, **options)
        torch.testing.assert_close(found, (y.real, last[..., :N]))
        torch.testing.assert_close(function(u, *system(), **options), y.real)


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_s4d(rule):
    u, state = draw(B, T, H), draw(B, H, N, seed=5, dtype=C128)
    y, last = R.ssm_recurrence(*s4d_dense(rule), u + 0j, both(state))
    for mode in ("conv", "recurrent"):
        found = F.s4d(
            u,
            *s4d_system(),
            initial_state=state,
            output_final_state=True,
            mode=mode,
            rule=rule,
        )
        torch.testing.assert_close(found, (y.real, last[..., :N]))


@pytest.mark.parametrize(("function", "system", "dense"), SYSTEMS)
def test_single_steps(function, system, dense):
    u, parts, state = draw(B, 9, H), [], None
    whole = function(u, *system(), output_final_state=True)
    for t in range(9):
        y, state = function(
            u[:, t : t + 1],
            *system(),
            initial_state=state,
            output_final_state=True,
            mode="recurrent" if t % 2 else "conv",
        )
        parts.append(y)
    torch.testing.assert_close((torch.cat(parts, 1), state), whole)


@pytest.mark.parametrize("mode", ["conv", "recurrent"])
@pytest.mark.parametrize(("function", "system", "dense"), SYSTEMS)
def test_gradients(function, system, dense, mode):
    state = draw(1, H, N, seed=5, dtype=C128)
    inputs = [t.detach().requires_grad_() for t in (draw(1, 5, H), *system(), state)]

    def run(*tensors):
        options = {"output_final_state": True, "mode": mode}
        return function(*tensors[:-1], initial_state=tensors[-1], **options)

    assert torch.autograd.gradcheck(run, inputs)


def narrow(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex64 if t.is_complex() else torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("function", "system", "dense"), SYSTEMS)
def test_low_precision_inputs(function, system, dense, dtype):
    """Also under autocast, which must not touch the powers of matrices."""
    u = draw(B, T, H).to(dtype)
    exact = function(u.double(), *system())
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = function(u, *map(narrow, system()))
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-4)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("function", "system", "dense"), SYSTEMS)
def test_compiled_without_breaks(function, system, dense, backend):
    inputs = [narrow(t).requires_grad_() for t in (draw(1, 20, H), *system())]

    def run(*tensors):
        y, state = function(*tensors, output_final_state=True)
        return y.square().sum() + state.abs().square().sum()

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    loss, expected = compiled(*inputs), run(*inputs)
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss, inputs)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs))


def test_transforms():
    (A, C, dt, D), u = s4d_system(), draw(B, 12, H)
    whole = F.s4d(u, A, C, dt, D)
    mapped = torch.vmap(lambda each: F.s4d(each[None], A, C, dt, D)[0])(u)
    torch.testing.assert_close(mapped, whole)
    mapped = torch.vmap(lambda size: F.s4d(u, A, C, size, D))(torch.stack((dt, 2 * dt)))
    torch.testing.assert_close(mapped[1], F.s4d(u, A, C, 2 * dt, D))
    inputs = [t.clone().requires_grad_() for t in (u[:1, :4], dt)]
    assert torch.autograd.gradgradcheck(lambda u, size: F.s4d(u, A, C, size, D), inputs)
    _, slope = torch.func.jvp(lambda size: F.s4d(u, A, C, size, D), (dt,), (dt,))
    close = (F.s4d(u, A, C, dt * (1 + 1e-6), D) - F.s4d(u, A, C, dt * (1 - 1e-6), D)) / 2e-6
    torch.testing.assert_close(slope, close, rtol=1e-6, atol=1e-6)


def test_compiled_for_any_length():
    (A, C, dt, D) = s4d_system()
    compiled = torch.compile(lambda u: F.s4d(u, A, C, dt, D), fullgraph=True)
    for steps in (9, 20, 33):
        u = draw(B, steps, H)
        torch.testing.assert_close(compiled(u), F.s4d(u, A, C, dt, D))


def _wrong():
    u, (A, C, dt, D) = draw(B, T, H).float(), map(narrow, s4d_system())
    good = {"u": u, "A": A, "C": C, "dt": dt, "D": D}
    yield {**good, "u": u.long()}, TypeError, r"u must be float64.*u.dtype=torch.int64"
    yield {**good, "u": u[0]}, ValueError, r"u must have shape \(B, T, H\)"
    yield {**good, "u": u[..., :2]}, ValueError, r"A must have the H of u.*u.shape=\(2, 75, 2\)"
    yield {**good, "u": u.double()}, TypeError, r"dt must be torch.float64 with u.dtype"
    yield {**good, "A": A.real}, TypeError, r"A must be complex64 or complex128"
    yield {**good, "A": A[0]}, ValueError, r"A must have shape \(H, N\)"
    yield {**good, "A": A.conj() * -1}, ValueError, r"Re A must be at most 0, got max\(Re A\)="
    yield {**good, "C": C[:, :2]}, ValueError, r"C must have shape \(3, 4\)"
    yield {**good, "C": C.real}, TypeError, r"C must be torch.complex64.*C.dtype=torch.float32"
    yield {**good, "dt": dt[:2]}, ValueError, r"dt must have shape \(3,\)"
    yield {**good, "dt": -dt}, ValueError, r"dt must be >= 0, got dt.min\(\)=-"
    yield {**good, "dt": 0.1}, TypeError, r"dt must be a torch.Tensor"
    yield {**good, "D": D[:2]}, ValueError, r"D must have shape \(3,\)"
    yield {**good, "D": D.double()}, TypeError, r"D must be torch.float32"
    yield {**good, "mode": "scan"}, ValueError, r"mode='scan'"
    yield {**good, "rule": "foh"}, ValueError, r"rule='foh'"
    yield {**good, "output_final_state": 1}, TypeError, r"output_final_state must be True or False"
    state = torch.zeros(B, H, N, dtype=torch.complex64)
    yield {**good, "initial_state": state.real}, TypeError, r"initial_state must be torch.complex64"
    wanted = r"initial_state must have shape \(2, 3, 4\)"
    yield {**good, "initial_state": state[:1]}, ValueError, wanted


@pytest.mark.parametrize(("arguments", "error", "message"), list(_wrong()))
def test_errors_of_s4d(arguments, error, message):
    with pytest.raises(error, match=f"s4d: {message}|s4d: .*{message}"):
        F.s4d(**arguments)


def test_errors_of_s4_and_convolutions():
    u, (Lambda, P, b, C, dt, _) = draw(B, T, H).float(), map(narrow, s4_system())
    with pytest.raises(ValueError, match=r"s4: P must have shape \(3, 4\), got P.shape=\(3, 2\)"):
        F.s4(u, Lambda, P[:, :2], b, C, dt)
    with pytest.raises(TypeError, match=r"s4: Lambda must be complex64"):
        F.s4(u, Lambda.real, P, b, C, dt)
    with pytest.raises(ValueError, match=r"s4: Re Lambda must be at most 0, got max\(Re Lambda\)="):
        F.s4(u, -Lambda, P, b, C, dt)
    with pytest.raises(ValueError, match=r"s4_kernel: length must be an int >= 0, got length=-1"):
        F.s4_kernel(Lambda, P, b, C, dt, -1)
    with pytest.raises(ValueError, match=r"s4d_kernel: length must be an int >= 0, got length=-1"):
        F.s4d_kernel(Lambda, C, dt, -1)
    kernel = torch.ones(H, T)
    with pytest.raises(ValueError, match=r"kernel must have shape \(H, L\).*shape=\(2, 75\)"):
        F.fft_conv(u, kernel[:2])
    with pytest.raises(ValueError, match=r"or \(L, outputs, H\).*shape=\(3, 1, 75\)"):
        F.fft_conv(u, kernel[:, None])
    with pytest.raises(ValueError, match=r"D must have shape \(2, 3\), got D.shape=\(3,\)"):
        F.fft_conv(u, torch.ones(5, 2, H), torch.ones(H))
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


def test_s4_has_shapes_without_memory():
    z = torch.zeros(2, 3, dtype=torch.complex64, device="meta")
    dt = torch.ones(2, device="meta")
    assert F.s4_kernel(z, z, z, z, dt, 8).shape == (2, 8)
    y, state = F.s4(dt.view(1, 1, 2), z, z, z, z, dt, output_final_state=True)
    assert y.shape == (1, 1, 2) and state.shape == (1, 2, 3)
