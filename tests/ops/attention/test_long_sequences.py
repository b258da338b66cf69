"""Errors of state-space models after 64k steps, against fp64, and conjugate systems."""

import pytest
import torch

from omniattn import functional as F

LONG, HEAD = 1 << 16, 1 << 12


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def selective(*, is_complex: bool):
    A = -draw(8, 4, seed=0).exp()
    rows = {name: draw(1, LONG, 4, seed=i) for i, name in enumerate("BC")}
    u, delta = draw(2, 1, LONG, 8, seed=2)
    given = {"u": u, "delta": delta - 4, "A": A, **rows}
    if is_complex:
        given["A"] = torch.complex(A, 3 * draw(8, 4, seed=3))
    return lambda x: F.selective_scan(**x, delta_softplus=True)[0], given


def ssd():
    x, dt = draw(1, LONG, 2, 4, seed=0), draw(1, LONG, 2, seed=1) - 4
    rows = {name: draw(1, LONG, 1, 8, seed=i) for i, name in enumerate("BC", 2)}
    given = {"x": x, "dt": dt, "A": -torch.tensor([0.3, 2.0], dtype=torch.float64), **rows}
    return lambda x: F.ssd(**x, dt_softplus=True)[0], given


def s4d(mode: str = "conv"):
    given = {
        "u": draw(1, LONG, 2, seed=0),
        "A": F.ssm_init("s4d-lin", 8, dtype=torch.complex128).expand(2, -1),
        "C": torch.complex(draw(2, 4, seed=1), draw(2, 4, seed=2)),
        "dt": torch.tensor([1e-3, 0.1], dtype=torch.float64),
    }
    return lambda x: F.s4d(**x, mode=mode), given


def s4(mode: str = "conv"):
    Lambda, P, B, _ = F.nplr(8, dtype=torch.complex128)
    _, given = s4d()
    given |= {"Lambda": Lambda.expand(2, -1), "P": P.expand(2, -1), "B": B.expand(2, -1)}
    del given["A"]
    return lambda x: F.s4(**x, mode=mode), given


CASES = {
    "selective": lambda: selective(is_complex=False),
    "complex": lambda: selective(is_complex=True),
    "ssd": ssd,
    "s4d": s4d,
    "s4": s4,
}


def narrow(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex64 if t.is_complex() else torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_errors_do_not_grow_with_time(name):
    """The error of the last steps of 64k is that of the first 4k: below sqrt(T) eps of the largest
    output, as that of T random roundings."""
    function, given = CASES[name]()
    rounded = {key: narrow(t) for key, t in given.items()}
    y = function(rounded).double()
    exact = function({key: t.to(given[key].dtype) for key, t in rounded.items()})
    error, largest = (y - exact).abs(), exact.abs().max()
    for part in (slice(0, HEAD), slice(LONG - HEAD, LONG)):
        bound = torch.finfo(torch.float32).eps * HEAD**0.5 * largest
        assert error[:, part].max() <= bound


@pytest.mark.slow
@pytest.mark.parametrize("make", [s4d, s4])
def test_steps_and_convolutions_agree_after_64k_steps(make):
    (convolve, given), (step, _) = make("conv"), make("recurrent")
    torch.testing.assert_close(convolve(given), step(given), rtol=1e-8, atol=1e-9)


def test_conjugate_systems_have_the_same_kernels():
    """Either of a conjugate pair may be kept; values and gradients are conjugate."""
    _, given = s4()
    names = ("Lambda", "P", "B", "C")

    def run(system: dict[str, torch.Tensor]):
        leaves = [system[name].clone().requires_grad_() for name in names]
        kernel = F.s4_kernel(*leaves, given["dt"], 33)
        return kernel, *torch.autograd.grad(kernel.square().sum(), leaves)

    one = run({name: given[name] for name in names})
    other = run({name: given[name].conj().resolve_conj() for name in names})
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b.conj().resolve_conj(), rtol=1e-8, atol=1e-9)


def test_the_other_one_of_a_pair_of_poles():
    """cauchy and vandermonde sum both poles of a pair."""
    v, w = draw(2, 3, 5, 2, seed=0)
    w[..., 0] = -w[..., 0].exp()
    z, signs = draw(9, 2, seed=1), torch.tensor([1.0, -1.0])
    torch.testing.assert_close(F.cauchy(v * signs, z, w * signs), F.cauchy(v, z, w))
    torch.testing.assert_close(F.cauchy(v, z * signs, w), F.cauchy(v, z, w) * signs)
    c, x = torch.view_as_complex(v), torch.view_as_complex(w)
    torch.testing.assert_close(
        F.vandermonde(c.conj().resolve_conj(), x.conj().resolve_conj(), 9), F.vandermonde(c, x, 9)
    )


def test_gradients_of_complex_parameters():
    Lambda, P, B, _ = F.nplr(4, dtype=torch.complex128)
    C, dt = torch.complex(draw(1, 2, seed=0), draw(1, 2, seed=1)), torch.tensor([0.1]).double()
    system = [t.expand(1, -1).clone().requires_grad_() for t in (Lambda, P, B)]
    assert torch.autograd.gradcheck(
        lambda *terms: F.s4_kernel(*terms, 6), [*system, C.requires_grad_(), dt.requires_grad_()]
    )
    A = F.ssm_init("s4d-lin", 4, dtype=torch.complex128)[None].clone().requires_grad_()
    for rule in ("zoh", "bilinear"):
        kernel = lambda A, C, dt, rule=rule: F.s4d_kernel(A, C, dt, 6, rule=rule)  # noqa: E731
        assert torch.autograd.gradcheck(kernel, [A, C, dt])
