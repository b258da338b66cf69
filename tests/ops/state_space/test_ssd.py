"""ssd: the pairwise formula, states, packed sequences, other people's code, errors."""

import math

import pytest
import torch
from recurrence_cases import decays, draw, pairwise, qkv
from tile_cases import VECTORS
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn import testing
from omniattn.encoding.sequences import Sequences
from omniattn.functional.recurrences._common import run
from omniattn.functional.recurrences._steps import ssd_inplace

BACKENDS = [None, "reference"]


def sizes(steps=70, heads=4, groups=2, p=5, n=8, batch=2):
    """x, dt, A, B, C in fp64."""
    return (
        draw(batch, steps, heads, p),
        nnf.softplus(draw(batch, steps, heads, seed=1) - 2),
        -draw(heads, seed=2).exp(),
        draw(batch, steps, groups, n, seed=3),
        draw(batch, steps, groups, n, seed=4),
    )


def dual(x, dt, A, B, C):
    """Y = (L * C B^T) diag(dt) X of the paper, L_ij = exp(sum_{j < s <= i} dt_s A)."""
    per_group = x.shape[2] // B.shape[2]
    B, C = (t.repeat_interleave(per_group, 2) for t in (B, C))
    total = (dt * A).cumsum(1)
    gap = total[:, :, None] - total[:, None]
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[:, :, None]
    weight = gap.masked_fill(~seen, -torch.inf).exp() * torch.einsum("bihn,bjhn->bijh", C, B)
    return torch.einsum("bijh,bjh,bjhp->bihp", weight, dt, x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_dual_form(backend, groups):
    tensors = sizes(groups=groups)
    y, _ = F.ssd(*tensors, backend=backend)
    torch.testing.assert_close(y, dual(*tensors))


@pytest.mark.parametrize("steps", [3, 70])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_factors_of_values_and_skips(decay, steps):
    """o = sum_s R_ts beta_s v_s + skip * v_t by itself, with each kind of decay."""
    q, k, v = (t[:, :steps] for t in qkv())
    beta, skip = draw(2, 70, 2, seed=4)[:, :steps], draw(2, 2, v.shape[-1], seed=5)
    g = decays(2, 70, 2, 8)[:, :steps]
    given = {"none": None, "head": g[..., 0].contiguous(), "channel": g}[decay]
    exact = {"none": torch.zeros_like(g), "head": g[..., :1].expand_as(g), "channel": g}[decay]
    leaves = [t.requires_grad_() for t in (q, k, v, beta, skip)]
    o, _ = run("op", q, k, v, given, None, Sequences(), beta=beta, skip=skip)
    expected = pairwise(q, k, beta[..., None] * v, exact) + 8**-0.5 * skip[:, None] * v
    torch.testing.assert_close(o, expected)
    ours, theirs = (torch.autograd.grad(t.square().sum(), leaves) for t in (o, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_below_zero_are_zero(backend):
    """As in mamba-ssm, by the least of dt_limit."""
    x, dt, *rest = sizes(steps=9)
    dt = dt - dt.median()
    y, _ = F.ssd(x, dt, *rest, backend=backend)
    torch.testing.assert_close(y, dual(x, dt.clamp(min=0), *rest))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_limits_of_steps(backend):
    """A softplus is above 0 without one."""
    x, dt, *rest = sizes(steps=9)
    dt = dt - dt.median()
    for largest in (0.8, math.inf):
        given = {"dt_softplus": True, "dt_limit": (-math.inf, largest)}
        y, _ = F.ssd(x, dt, *rest, **given, backend=backend)
        torch.testing.assert_close(y, dual(x, nnf.softplus(dt).clamp(max=largest), *rest))


@pytest.mark.parametrize("backend", BACKENDS)
def test_options(backend):
    x, dt, A, B, C = sizes()
    bias, z = draw(4, seed=5), draw(*x.shape, seed=6)
    for D in (draw(4, seed=7), draw(4, 5, seed=7)):
        given = {"D": D, "z": z, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, 1.5)}
        step = nnf.softplus(dt + bias).clamp(0.1, 1.5)
        expected = dual(x, step, A, B, C) + x * (D if D.ndim == 2 else D[:, None])
        y, _ = F.ssd(x, dt, A, B, C, **given, backend=backend)
        torch.testing.assert_close(y, expected * nnf.silu(z))


@pytest.mark.parametrize("backend", BACKENDS)
def test_states(backend):
    x, dt, A, B, C = sizes()
    start = draw(2, 4, 5, 8, seed=8)
    whole, end = F.ssd(x, dt, A, B, C, initial_state=start, backend=backend)
    parts, state = [], start
    for piece in (slice(0, 1), slice(1, 34), slice(34, 70)):
        rows = (x[:, piece], dt[:, piece], A, B[:, piece], C[:, piece])
        y, state = F.ssd(*rows, initial_state=state, backend=backend)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, end)
    assert state.shape == (2, 4, 5, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed(backend):
    x, dt, A, B, C = sizes(batch=1)
    start, bounds = draw(3, 4, 5, 8, seed=8), torch.tensor([0, 20, 20, 70])
    y, state = F.ssd(x, dt, A, B, C, initial_state=start, cu_seqlens=bounds, backend=backend)
    for i, (first, last) in enumerate(((0, 20), (20, 20), (20, 70))):
        part = slice(first, last)
        rows = (x[:, part], dt[:, part], A, B[:, part], C[:, part])
        own, end = F.ssd(*rows, initial_state=start[i : i + 1])
        torch.testing.assert_close(y[:, part], own)
        torch.testing.assert_close(state[i], end[0])


def test_half_inputs_are_rounded_once():
    """Steps, decays, the state, D and the gate are not rounded to the dtype of x."""
    x, dt, A, B, C = sizes(steps=130)
    z, D = draw(*x.shape, seed=6), draw(4, seed=7)
    half = [t.bfloat16() for t in (x, B, C, z)]
    exact, _ = F.ssd(half[0].double(), dt, A, *(t.double() for t in half[1:3]), D=D,
                     z=half[3].double())  # fmt: skip
    y, state = F.ssd(half[0], dt.float(), A.float(), *half[1:3], D=D.float(), z=half[3])
    assert state.dtype == torch.float32 and y.dtype == torch.bfloat16

    def error(found):
        return (found.double() - exact).norm() / exact.norm()

    assert error(y) < error(exact.bfloat16()) + 2**-15  # what tiles leave out
    with testing.isa(VECTORS):
        y, _ = F.ssd(half[0], dt.float(), A.float(), *half[1:3], D=D.float(), z=half[3])
    torch.testing.assert_close(y, exact.bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dt_size", [1e-6, 1e4])
def test_strong_and_vanishing_steps(dt_size):
    x, dt, A, B, C = (t.float() for t in sizes(steps=130))
    dt = (dt * dt_size).requires_grad_()
    A = (A * (1 if dt_size < 1 else 1e4)).requires_grad_()
    y, state = F.ssd(x, dt, A, B, C)
    grads = torch.autograd.grad(y.sum() + state.sum(), (dt, A))
    double = [t.detach().double().requires_grad_() for t in (x, dt, A, B, C)]
    y64, state64 = F.ssd(*double, backend="reference")
    expected = torch.autograd.grad(y64.sum() + state64.sum(), (double[1], double[2]))
    scale = y64.abs().max().item()
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-5 * scale)
    for own, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(
            own.double(), theirs, rtol=1e-3, atol=1e-5 * theirs.abs().max().item()
        )


def test_chunks_and_steps_of_transformers():
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x, dt, A, B, C = (t.float() for t in sizes())
    options = {"D": draw(4, seed=7).float(), "dt_bias": draw(4, seed=5).float()}
    options |= {"dt_softplus": True, "dt_limit": (0.1, 2.0)}
    start = draw(2, 4, 5, 8, seed=8).float()
    ours = F.ssd(x, dt, A, B, C, **options, initial_state=start)
    theirs = module.mamba2_chunk_scan(
        x, dt, A, B, C, 16, **options, initial_states=start, return_final_states=True
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def call(**changed):
    x, dt, A, B, C = sizes(steps=4)
    return F.ssd(**({"x": x, "dt": dt, "A": A, "B": B, "C": C} | changed))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": draw(2, 4, 4)}, ValueError, r"x must have shape \(B, T, H, P\), got x.shape=\(2, 4"),
        ({"dt": draw(2, 4, 3)}, ValueError, r"dt must have shape \(2, 4, 4\), got dt.shape="),
        ({"A": draw(3)}, ValueError, r"A must have shape \(4,\), got A.shape=\(3,\)"),
        ({"A": draw(4).abs()}, ValueError, r"A must be at most 0, got max\(A\)="),
        ({"B": draw(2, 4, 3, 8)}, ValueError, r"G a divisor of its heads, got B.shape=\(2, 4, 3"),
        ({"B": draw(2, 4, 0, 8)}, ValueError, r"B must have groups, got B.shape=\(2, 4, 0, 8\)"),
        ({"C": draw(2, 4, 2, 7)}, ValueError, r"C must have shape \(2, 4, 2, 8\), got C.shape="),
        ({"C": draw(2, 4, 2, 8).float()}, TypeError, r"C must have the dtype of x, got C.dtype"),
        ({"D": draw(5)}, ValueError, r"D must have shape \(4,\) or \(4, 5\), got D.shape=\(5,\)"),
        ({"z": draw(2, 4, 4, 4)}, ValueError, r"z must have shape \(2, 4, 4, 5\), got z.shape"),
        ({"dt_bias": draw(1)}, ValueError, r"dt_bias must have shape \(4,\), got dt_bias.shape"),
        ({"dt_softplus": 1}, TypeError, r"dt_softplus must be True or False, got dt_softplus=1"),
        ({"dt_limit": 0.1}, TypeError, r"dt_limit must be \(least, largest\), got dt_limit=0.1"),
        ({"dt_limit": (2.0, 1.0)}, ValueError, r"dt_limit must be .*, got dt_limit=\(2.0, 1.0\)"),
        ({"dt_limit": (math.inf, math.inf)}, ValueError, r"dt_limit must be .*\(inf, inf\)"),
        ({"dt_limit": (0.0, math.nan)}, ValueError, r"dt_limit must be .*, got dt_limit=nan"),
        ({"dt_limit": (-math.inf, math.inf)}, ValueError, r"begin at 0 or above without dt_softp"),
        ({"dt_limit": (-math.inf,) * 2, "dt_softplus": True}, ValueError, r"dt_limit=-inf"),
        ({"initial_state": draw(2, 4, 8, 5)}, ValueError, r"initial_state must have shape \(2, 4"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, r"B must be 1 with cu_seqlens, got x"),
        ({"backend": "fast"}, ValueError, r"backend must be one of .*, got backend='fast'"),
    ],
)  # fmt: skip
def test_errors(changed, error, message):
    with pytest.raises(error, match=rf"^ssd: .*{message}"):
        call(**changed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bounds", [[0, 5], [0, 3, 2], [-1, 4]])
def test_boundaries(bounds, backend):
    """With either backend; kernels check those that cannot be read here."""
    x, dt, A, B, C = sizes(steps=4, batch=1)
    with pytest.raises(ValueError, match=r"^ssd: cu_seqlens must grow from 0 to the number of"):
        F.ssd(x, dt, A, B, C, cu_seqlens=torch.tensor(bounds), backend=backend)


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_in_place(isa, dtype):
    """States are laid out as (P, N), and as (N, P) in memory."""
    wide = torch.promote_types(dtype, torch.float32)
    for p, n, groups in ((5, 8, 2), (70, 45, 1)):
        x, dt, A, B, C = sizes(1, 4, groups, p, n)
        x, dt, B, C, z = (t.to(dtype) for t in (x, dt, B, C, draw(*x.shape, seed=6)))
        A, bias, start = A.to(wide), draw(4, seed=5).to(wide), draw(2, 4, p, n, seed=8).to(wide)
        for D in (None, draw(4, seed=7).to(wide), draw(4, p, seed=7).to(wide)):
            with testing.isa(isa):
                given = {"D": D, "z": z, "dt_bias": bias, "dt_softplus": True}
                y, after = F.ssd(x, dt, A, B, C, **given, dt_limit=(0.1, 1.5), initial_state=start)
                for state in (start.clone(), start.mT.contiguous().mT):
                    found = ssd_inplace(x, dt, A, B, C, D, z, bias, state, True, 0.1, 1.5)
                    torch.testing.assert_close(found, y)
                    torch.testing.assert_close(state, after)


def test_the_backward_keeps_no_copies_of_groups():
    """All heads of a group read the same B and C, by parts of them on several threads."""
    x, dt, A, B, C = (t.float().requires_grad_() for t in sizes(64, 16, 1, 4, 32, batch=1))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.ssd(x, dt, A, B, C)
    assert max(t.numel() for t in kept if t.shape[:2] == B.shape[:2]) == x.numel()
