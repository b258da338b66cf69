"""Sums of powers and of poles: complex arguments, long sums, errors."""

import pytest
import torch

from omniattn import functional as F
from omniattn import testing

C64, C128 = torch.complex64, torch.complex128


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = C128) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [C64, C128])
def test_complex_arguments_and_pairs_are_the_same(dtype):
    c, x, z = draw(2, 3, dtype=dtype), draw(2, 3, seed=1, dtype=dtype), draw(5, seed=2, dtype=dtype)
    pairs = [torch.view_as_real(t) for t in (c, x, z)]
    assert torch.equal(F.vandermonde(c, x, 7), F.vandermonde(*pairs[:2], 7))
    y = F.cauchy(c, z, x)
    assert y.dtype == dtype
    assert torch.equal(torch.view_as_real(y), F.cauchy(pairs[0], pairs[2], pairs[1]))
    conjugate = F.vandermonde(c.conj(), x.conj(), 7)
    torch.testing.assert_close(conjugate, F.vandermonde(c, x, 7))


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("length", [63, 64, 65, 4095, 4097])
def test_blocks_of_powers(isa, length):
    c, x = draw(2, 3), 0.01 * draw(2, 3, seed=1)
    x = torch.complex(-x.real.abs(), 100 * x.imag)
    powers = (x[..., None] * torch.arange(length)).exp()
    with testing.isa(isa):
        y = F.vandermonde(c, x, length)
    torch.testing.assert_close(y, 2 * (c[..., None] * powers).real.sum(1))


def test_the_error_does_not_grow_with_the_length():
    """Phases of 10^5 radians, of which fp32 knows no better than 0.01."""
    c, x = draw(1, 4, dtype=C64), draw(1, 4, seed=1, dtype=C64)
    x = torch.complex(-1e-6 * x.real.abs(), x.imag)
    y, exact = F.vandermonde(c, x, 200_000), F.vandermonde(c.to(C128), x.to(C128), 200_000)
    eager = F.vandermonde(c, x, 200_000, backend="reference")
    assert (eager - exact).abs().max() > 1e-3
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("op", ["vandermonde", "cauchy"])
def test_memory_is_that_of_the_results(op):
    """A number for each of 8 channels, 64 terms and 20000 places would take 80 MiB."""
    v, w = (draw(8, 64, seed=s, dtype=C64).requires_grad_() for s in (0, 1))
    x = torch.complex(-w.real.detach().abs(), w.imag.detach()).requires_grad_()
    with torch.profiler.profile(profile_memory=True) as profile:
        if op == "vandermonde":
            y = F.vandermonde(v, 1e-3 * x, 20_000)
        else:
            y = F.cauchy(v, draw(20_000, seed=2, dtype=C64) + 3, x)
        torch.autograd.grad(y.abs().sum(), (v, x))
    taken = [event.self_cpu_memory_usage for event in profile.key_averages()]
    assert 0 < sum(n for n in taken if n > 0) < 16 * y.nbytes


def test_powers_that_grow_stay_within_the_length():
    """Powers past the end would be infinite."""
    c, x = draw(1, 2, dtype=C64), torch.full((1, 2), 3 + 1j, dtype=C64)
    c.requires_grad_(), x.requires_grad_()
    y = F.vandermonde(c, x, 20)
    assert y.isfinite().all()
    for grad in torch.autograd.grad(y.sum(), (c, x)):
        assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"c": [1.0]}, TypeError, r"c must be a torch.Tensor"),
        ({"c": torch.ones(2, 3, 2, dtype=torch.bfloat16)}, TypeError, r"c.dtype=torch.bfloat16"),
        (
            {"c": torch.ones(2, 3)},
            ValueError,
            r"c must be complex of shape \(H, N\).*c.shape=\(2, 3\)",
        ),
        ({"c": torch.ones(2, 3, 3)}, ValueError, r"c.shape=\(2, 3, 3\)"),
        ({"x": torch.ones(2, 3, 2, dtype=torch.float64)}, TypeError, r"x.dtype=torch.float64"),
        ({"x": torch.ones(2, 4, 2)}, ValueError, r"x must have shape \(2, 3, 2\)"),
        ({"x": torch.ones(2, 3, 2, device="meta")}, ValueError, r"x.device=meta"),
        ({"length": -1}, ValueError, r"length must be an int .*, got length=-1"),
        ({"length": 1.5}, TypeError, r"length must be an int .*, got length=1.5"),
        ({"backend": "gpu"}, ValueError, r"backend='gpu'"),
    ],
)
def test_vandermonde_errors(change, error, message):
    arguments = {"c": torch.ones(2, 3, 2), "x": torch.ones(2, 3, 2), "length": 4}
    with pytest.raises(error, match=f"vandermonde: .*{message}"):
        F.vandermonde(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v": torch.ones(2, 3, dtype=torch.int64)}, TypeError, r"v.dtype=torch.int64"),
        ({"z": torch.ones(4)}, ValueError, r"z must have shape \(L,\).* \(4,\)"),
        ({"z": torch.ones(4, 2, dtype=torch.float64)}, TypeError, r"z.dtype=torch.float64"),
        ({"w": torch.ones(1, 3, 2)}, ValueError, r"w must have shape \(2, 3, 2\)"),
        ({"z": torch.ones(4, 2).requires_grad_()}, NotImplementedError, r"z gets no gradient"),
    ],
)
def test_cauchy_errors(change, error, message):
    arguments = {"v": torch.ones(2, 3, 2), "z": torch.ones(4, 2), "w": torch.zeros(2, 3, 2)}
    with pytest.raises(error, match=f"cauchy: .*{message}"):
        F.cauchy(**(arguments | change))


def test_the_definition_of_cauchy_has_a_gradient_of_z():
    v, w, z = draw(2, 3), draw(2, 3, seed=1), draw(4, seed=2).requires_grad_()

    def function(z):
        return F.cauchy(v, z, w, backend="reference")

    assert torch.autograd.gradcheck(function, z)
    with pytest.raises(NotImplementedError, match="z gets no gradient"):
        torch.func.grad(lambda z: F.cauchy(v, z, w).abs().sum())(z.detach())
