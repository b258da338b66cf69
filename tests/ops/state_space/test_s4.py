"""S4 and S4D against dense matrices in fp64: modes, states, rules, rounding, transforms, errors."""

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
    """Appends the conjugates."""
    return torch.cat((t, t.conj()), dim)


def stable(*shape: int, seed: int = 0) -> torch.Tensor:
    x = draw(*shape, seed=seed, dtype=C128)
    return torch.complex(-0.2 - x.real.abs(), 4 * x.imag)


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


def s4_legt_system():
    """P (H, 2, N)."""
    noise = 0.1 * draw(4, H, 1, N, seed=4, dtype=C128)
    Lambda, P, b, _ = F.nplr(2 * N, measure="legt", dtype=C128)
    terms = Lambda + noise[0, :, 0] - 0.3, P + noise[1:3, :, 0].transpose(0, 1), b + noise[3, :, 0]
    return (*terms, *s4d_system()[1:])


def s4_legt_dense():
    Lambda, P, b, C, dt, D = s4_legt_system()
    p = both(P)
    A = torch.diag_embed(both(Lambda)) - p.mT @ p.conj()
    return (*F.discretize(A, both(b), dt, "bilinear"), both(C).conj(), D)


SYSTEMS = [
    (F.s4d, s4d_system, s4d_dense),
    (F.s4, s4_system, s4_dense),
    (F.s4, s4_legt_system, s4_legt_dense),
]


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 131])
@pytest.mark.parametrize("rule", RULES)
def test_s4d_kernel_is_a_power(rule, length):
    A, C, dt, _ = s4d_system()
    expected = R.ssm_kernel(*s4d_dense(rule)[:3], length)
    torch.testing.assert_close(F.s4d_kernel(A, C, dt, length, rule=rule), expected.real)


@pytest.mark.parametrize("system, dense", [row[1:] for row in SYSTEMS[1:]])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 64, 131])
def test_s4_kernel_is_a_power(length, system, dense):
    expected = R.ssm_kernel(*dense()[:3], length)
    torch.testing.assert_close(F.s4_kernel(*system()[:-1], length), expected.real)


def test_s4_kernel_has_the_generating_function_of_the_paper():
    """Four sums of poles at roots w of -1, which avoid 1 and -1, and Woodbury's identity."""
    length = 64
    Lambda, P, b, C, dt, _ = s4_system()
    ab, _, c = s4_dense()[:3]
    C = (c + (c[:, None] @ torch.linalg.matrix_power(ab, length))[:, 0])[:, :N]
    taps = torch.arange(length, dtype=F64)
    tan = ((taps + 0.5) * (math.pi / length)).tan()
    sums = [
        dt[:, None] * F.cauchy(v, 2j * tan, dt[:, None] * Lambda)
        for v in (C * b, C * P, P.conj() * P, P.conj() * b)
    ]
    transform = (1 + 1j * tan) * (sums[0] - sums[1] * sums[3] / (1 + sums[2]))
    turned = torch.polar(torch.ones_like(tan), taps * (math.pi / length))
    expected = (torch.fft.ifft(transform) * turned).real
    torch.testing.assert_close(F.s4_kernel(*s4_system()[:-1], length), expected)


@pytest.mark.parametrize("mode", ["conv", "recurrent"])
@pytest.mark.parametrize(
    "size, limit",
    [(0.0, 5e-5), (1e-6, 5e-5), (1e-3, 5e-5), (1e-1, 5e-5), (1e3, 5e-4), (1e5, 5e-2)],
)
@pytest.mark.parametrize("steps", [1, 4, 65])
def test_s4_in_single_precision(mode, size, limit, steps):
    """HiPPO with 64 states from vanishing to strong steps, with a Lambda of 0 but in the latter,
    where the gradient of dt is as good as 0 and has the largest error."""
    terms = [t[None] for t in F.nplr(64, dtype=C128)[:3]]
    if size <= 0.1:
        terms[0][0, 0] = 0
    given = [t.to(torch.complex64) for t in (*terms, draw(1, 32, seed=1, dtype=C128))]
    given += [torch.tensor([size]), draw(2, steps, 1).float()]
    found = []
    for exact in (True, False):
        leaves = [(t.to(C128 if t.is_complex() else F64) if exact else t).clone() for t in given]
        *leaves, u = [t.requires_grad_() for t in leaves]
        y = F.s4(u, *leaves, mode="recurrent" if exact else mode)
        weights = draw(2, steps, 1, seed=2).to(y.dtype)
        found.append((y, *torch.autograd.grad((y * weights).sum(), (u, *leaves))))
    for exact, rounded in zip(*found, strict=True):
        error = (rounded - exact).abs().max() / exact.abs().max().clamp_min(1e-30)
        assert error <= limit


def widened(given):
    return [t.to(C128) if t.is_complex() else t.double() for t in given]


@pytest.mark.parametrize("size, length", [(1e-4, 2**16), (1.0, 1024), (1e2, 4096), (1e4, 4096)])
def test_powers_of_s4_in_single_precision(size, length):
    """The digits of dt survive in powers of a matrix that is nearly 1, or -1."""
    C = draw(1, 32, seed=1, dtype=C128).to(torch.complex64)
    given = *(t[None] for t in F.nplr(64)[:3]), C, torch.tensor([size])
    exact = F.s4_kernel(*widened(given), length)
    error = (F.s4_kernel(*given, length) - exact).abs().max()
    assert error <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size, length", [(1e-7, 2**16), (1e-5, 2**14), (1e-3, 4096)])
def test_small_steps_of_s4d_in_single_precision(rule, size, length):
    given = F.ssm_init("s4d-lin", 64)[None], draw(1, 32, dtype=C128).to(torch.complex64)
    given = *given, torch.tensor([size])
    exact = F.s4d_kernel(*widened(given), length, rule=rule)
    error = (F.s4d_kernel(*given, length, rule=rule) - exact).abs().max()
    assert error <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("function", [F.s4d, F.s4])
def test_single_steps_do_not_drift(function):
    """Rounded once, Ab would add the same error in each of them."""
    A, *vectors = (t[None] for t in F.nplr(16)[:3])
    C, u = draw(1, 8, dtype=C128).to(torch.complex64), draw(1, 2000, 1).float()
    given = A, *(vectors if function is F.s4 else ()), C, torch.tensor([1e-5])
    exact = function(u.double(), *widened(given))
    error = (function(u, *given, mode="recurrent") - exact).abs().max()
    assert error <= 5e-6 * exact.abs().max()


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


@pytest.mark.parametrize("mode", ["conv", "recurrent"])
@pytest.mark.parametrize(("function", "system", "dense"), SYSTEMS)
def test_no_tokens_have_gradients_of_zero(function, system, dense, mode):
    leaves = [t.clone().requires_grad_() for t in system()]
    state = draw(B, H, N, dtype=C128)
    options = {"initial_state": state, "mode": mode, "output_final_state": True}
    u = draw(B, 0, H).requires_grad_()
    y, last = function(u, *leaves, **options)
    assert all(g.count_nonzero() == 0 for g in torch.autograd.grad(y.sum(), [u, *leaves]))
    assert torch.equal(last, state) and last is not state


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
    """Checks one channel, since the time grows with the square of their number."""
    state = draw(1, 1, N, seed=5, dtype=C128)
    given = draw(1, 5, 1), *(t[:1] for t in system()), state
    inputs = [t.detach().requires_grad_() for t in given]

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
    hidden = torch.tensor([float("nan"), -1, 1])
    yield {**good, "dt": hidden}, ValueError, r"dt must be >= 0, got dt.min\(\)=-1"
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


def test_errors_of_s4():
    u, (Lambda, P, b, C, dt, _) = draw(B, T, H).float(), map(narrow, s4_system())
    with pytest.raises(ValueError, match=r"s4: P must have shape \(3, 4\), got P.shape=\(3, 2\)"):
        F.s4(u, Lambda, P[:, :2], b, C, dt)
    with pytest.raises(TypeError, match=r"s4: Lambda must be complex64"):
        F.s4(u, Lambda.real, P, b, C, dt)
    with pytest.raises(ValueError, match=r"s4: Re Lambda must be at most 0, got max\(Re Lambda\)="):
        F.s4(u, -Lambda, P, b, C, dt)
    with pytest.raises(ValueError, match=r"s4_kernel: length must be an int >= 0 .*got length=-1"):
        F.s4_kernel(Lambda, P, b, C, dt, -1)
    with pytest.raises(ValueError, match=r"s4d_kernel: length must be an int >= 0 .*got length=-1"):
        F.s4d_kernel(Lambda, C, dt, -1)


def test_s4_has_shapes_without_memory():
    z = torch.zeros(2, 3, dtype=torch.complex64, device="meta")
    dt = torch.ones(2, device="meta")
    assert F.s4_kernel(z, z, z, z, dt, 8).shape == (2, 8)
    y, state = F.s4(dt.view(1, 1, 2), z, z, z, z, dt, output_final_state=True)
    assert y.shape == (1, 1, 2) and state.shape == (1, 2, 3)
