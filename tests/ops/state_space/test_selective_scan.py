"""The selective scan: its direct sum, states, packed sequences, complex A, errors, other code."""

import itertools

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn import testing
from omniattn.functional.recurrences._steps import selective_scan_inplace

BACKENDS = [None, "reference"]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(steps=70, channels=21, states=5, batch=2, groups=None) -> dict[str, torch.Tensor]:
    rows = (batch, steps, states) if groups is None else (batch, steps, groups, states)
    return {
        "u": draw(batch, steps, channels),
        "delta": draw(batch, steps, channels, seed=1),
        "A": -draw(channels, states, seed=2).exp(),
        "B": draw(*rows, seed=3),
        "C": draw(*rows, seed=4),
        "D": draw(channels, seed=5),
        "z": draw(batch, steps, channels, seed=6),
        "delta_bias": draw(channels, seed=7),
    }


def direct(u, delta, A, B, C, D, z, delta_bias) -> torch.Tensor:
    """sum_{j<=t} (C_t . e^(A (S_t - S_j)) B_j) dt_j u_j with S the sums of dt."""
    dt = nnf.softplus(delta + delta_bias)
    total = dt.cumsum(1)
    later = total[:, :, None] - total[:, None]  # (B, t, j, D)
    decay = (later[..., None] * A).exp() * torch.ones(u.shape[1], u.shape[1]).tril()[
        ..., None, None
    ]
    each = torch.einsum("btjdn,btn,bjn->btjd", decay, C, B)
    y = torch.einsum("btjd,bjd->btd", each, dt * u)
    return (y + D * u) * nnf.silu(z)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_a_sum_over_the_past(backend):
    made = inputs(9)
    y, _ = F.selective_scan(**made, delta_softplus=True, backend=backend)
    torch.testing.assert_close(y, direct(**made))


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize(
    ("shift", "size"), [(0, 1.0), (0, 1e4), (0, 1e-4), (30, 1.0), (-40, 1.0), (-100, 1e4)]
)
def test_ends_of_the_number_range(isa, shift, size):
    """Decays of 0 and of 1 to the last digit, steps that are linear or vanish."""
    made = inputs(200)
    made["delta"], made["A"] = made["delta"] + shift, made["A"] * size
    narrow = {name: t.float().requires_grad_() for name, t in made.items()}
    wide = {name: t.detach().double().requires_grad_() for name, t in narrow.items()}
    with testing.isa(isa):
        y, state = F.selective_scan(**narrow, delta_softplus=True)
        grads = torch.autograd.grad(y.square().sum() + state.sum(), list(narrow.values()))
    expected, last = F.selective_scan(**wide, delta_softplus=True, backend="reference")
    exact = torch.autograd.grad(expected.square().sum() + last.sum(), list(wide.values()))
    for name, ours, theirs in zip(("y", "state"), (y, state), (expected, last), strict=True):
        error, most = (ours - theirs).abs().max(), theirs.abs().max()
        assert error <= 3e-6 * most + 1e-36, name
    for name, ours, theirs in zip(made, grads, exact, strict=True):
        error, most = (ours - theirs).abs().max(), theirs.abs().max()
        assert error <= 1e-5 * most + 1e-34, name  # e^-104, the smallest steps, are 0 in fp32


def test_a_decay_of_a_step_of_zero_is_one():
    made = inputs(100)
    made = {name: t.float() for name, t in made.items()} | {"delta_bias": None}
    start = draw(2, 21, 5).float()
    _, state = F.selective_scan(**made | {"delta": torch.zeros(2, 100, 21)}, initial_state=start)
    assert torch.equal(state, start)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [(0, 1, 2, 70), (0, 33, 64, 70), (0, 0, 70)])
def test_a_state_continues(backend, splits):
    made = inputs(groups=3)
    y, final = F.selective_scan(**made, delta_softplus=True, backend=backend)
    state, parts = None, []
    for a, b in itertools.pairwise(splits):
        some = {name: t[:, a:b] if t.dim() > 2 else t for name, t in made.items()}
        part, state = F.selective_scan(
            **some, delta_softplus=True, initial_state=state, backend=backend
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_gives_the_states_of_the_scan(isa, dtype):
    """A token alone has a kernel of its own, and updates states in place; packed sequences of one
    token run the scan. Infinity meets no state that is not there, which would make it NaN."""
    wide = torch.promote_types(dtype, torch.float32)
    for channels, states, groups in ((21, 5, 3), (70, 16, 1), (70, 40, 2)):
        made = inputs(1, channels, states, groups=groups)
        made["u"][0, 0, 4] = torch.inf
        made |= {name: made[name].abs() for name in "BCD"}
        made = {name: t.to(dtype if t.dim() > 2 else wide) for name, t in made.items()}
        start = draw(2, channels, states, seed=8).to(wide)
        rows = {name: t.transpose(0, 1) if t.dim() > 2 else t for name, t in made.items()}
        with testing.isa(isa):
            y, after = F.selective_scan(**made, delta_softplus=True, initial_state=start)
            expected, last = F.selective_scan(
                **rows, delta_softplus=True, initial_state=start, cu_seqlens=torch.arange(3)
            )
            state = start.clone()
            found = selective_scan_inplace(*made.values(), state, True)
            fresh, begun = F.selective_scan(**made, delta_softplus=True)
            zeros = F.selective_scan(
                **made, delta_softplus=True, initial_state=torch.zeros_like(start)
            )
            trained = F.selective_scan(
                **made | {"u": made["u"].clone().requires_grad_()},
                delta_softplus=True,
                initial_state=start,
            )
        assert torch.equal(after, last) and torch.equal(state, after) and torch.equal(found, y)
        torch.testing.assert_close(y.transpose(0, 1), expected)
        assert torch.equal(fresh, zeros[0]) and torch.equal(begun, zeros[1])
        assert torch.equal(trained[0], y) and torch.equal(trained[1], after)


@pytest.mark.parametrize("edges", [(0, 20, 20, 65, 70), (0, 0, 20, 65, 70)])
@pytest.mark.parametrize("constant", [False, True])
def test_packed_sequences_are_apart(edges, constant):
    made = inputs(batch=1)
    if constant:
        made |= {"B": draw(21, 5, seed=3), "C": draw(21, 5, seed=4)}
    leaves = {name: t.requires_grad_() for name, t in made.items()}
    start = draw(4, 21, 5, seed=8).requires_grad_()
    y, final = F.selective_scan(
        **leaves, delta_softplus=True, initial_state=start, cu_seqlens=torch.tensor(edges)
    )
    parts = [
        F.selective_scan(
            **{name: t[:, a:b] if t.dim() > 2 else t for name, t in leaves.items()},
            delta_softplus=True,
            initial_state=start[n : n + 1],
        )
        for n, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    alone = torch.cat([part for part, _ in parts], 1)
    ends = torch.cat([state for _, state in parts])
    torch.testing.assert_close(y, alone)
    torch.testing.assert_close(final, ends)
    of = [*leaves.values(), start]
    found = torch.autograd.grad(y.square().sum() + final.square().sum(), of)
    expected = torch.autograd.grad(alone.square().sum() + ends.square().sum(), of)
    torch.testing.assert_close(found, expected)


def test_groups_are_scans_of_their_own():
    made = inputs(groups=3)
    y, state = F.selective_scan(**made, delta_softplus=True)
    for g in range(3):
        part = slice(7 * g, 7 * g + 7)
        some = {name: t[..., part] for name, t in made.items() if name in ("u", "delta", "z")}
        some |= {name: made[name][part] for name in ("A", "D", "delta_bias")}
        some |= {name: made[name][:, :, g] for name in ("B", "C")}
        alone, last = F.selective_scan(**some, delta_softplus=True)
        torch.testing.assert_close(y[..., part], alone)
        torch.testing.assert_close(state[:, part], last)


@pytest.mark.parametrize("is_complex", [False, True])
def test_results_do_not_depend_on_threads(is_complex):
    made = (complex_inputs if is_complex else inputs)(100, 300)
    made = {
        name: t.to(torch.complex64 if t.is_complex() else torch.float32).requires_grad_()
        for name, t in made.items()
    }
    results = []
    for threads in (1, 3):
        with testing.threads(threads):
            y, state = F.selective_scan(**made, delta_softplus=True)
            loss = y.square().sum() + state.abs().square().sum()
            results.append((y, state, *torch.autograd.grad(loss, list(made.values()))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def complex_inputs(steps=70, channels=21, states=5, batch=2, groups=None, constant=False):
    made = inputs(steps, channels, states, batch, groups)
    if constant:
        made |= {"B": draw(channels, states, seed=3), "C": draw(channels, states, seed=4)}
    parts = {name: draw(*made[name].shape, seed=20 + i) for i, name in enumerate("ABC")}
    return made | {name: torch.complex(made[name], part) for name, part in parts.items()}


def real_parts(t: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("constant", [False, True])
def test_a_complex_scan_and_its_gradients(isa, constant):
    made = complex_inputs(batch=1, constant=constant, groups=None if constant else 3)
    made["initial_state"] = torch.complex(draw(4, 21, 5, seed=8), draw(4, 21, 5, seed=9))
    edges = torch.tensor([0, 20, 20, 65, 70])

    def run(backend: str | None, dtype: torch.dtype) -> list[torch.Tensor]:
        narrow = {
            name: t.to(dtype.to_complex() if t.is_complex() else dtype) for name, t in made.items()
        }
        leaves = {name: t.detach().requires_grad_() for name, t in narrow.items()}
        y, state = F.selective_scan(
            **leaves, delta_softplus=True, cu_seqlens=edges, backend=backend
        )
        loss = y.square().sum() + (state.real * 2 + state.imag).square().sum()
        return [y, state, *torch.autograd.grad(loss, list(leaves.values()))]

    expected = run("reference", torch.float64)
    with testing.isa(isa):
        exact, narrow = run(None, torch.float64), run(None, torch.float32)
    eager = run("reference", torch.float32)
    torch.testing.assert_close(exact, expected)
    for ours, theirs, best in zip(narrow, eager, expected, strict=True):
        error, allowed = ((real_parts(t) - real_parts(best)).abs().max() for t in (ours, theirs))
        rounding = torch.finfo(torch.float32).eps * 70**0.5  # of sums over 70 steps
        assert error <= 3 * (allowed + rounding * real_parts(best).abs().max())


@pytest.mark.parametrize("isa", testing.isas())
def test_large_angles_keep_their_digits(isa):
    """The rounding of dt Im A, 1e6 here, would lose six of seven digits of its sine, as it does
    where there is no fused multiply-add."""
    A = torch.complex(torch.full((8, 4), -0.5), 1e6 * draw(8, 4).float())
    given = {"u": draw(1, 3, 8, seed=1).float(), "delta": draw(1, 3, 8, seed=2).float().abs()}
    given |= {"A": A, "B": draw(8, 4, seed=3).float(), "C": draw(8, 4, seed=4).float()}
    exact, _ = F.selective_scan(
        **{
            name: t.to(torch.complex128 if t.is_complex() else torch.float64)
            for name, t in given.items()
        }
    )
    with testing.isa(isa):
        y, _ = F.selective_scan(**given)
    limit = 1e-1 if isa == "baseline" else 1e-5
    torch.testing.assert_close(y.double(), exact, rtol=limit, atol=limit)


def test_conjugates_give_the_same_output():
    """y is twice a real part, so that a system and its conjugate have the same y and gradients of
    real inputs, bit for bit, and conjugate states and gradients."""
    made = {
        name: t.to(torch.complex64 if t.is_complex() else torch.float32)
        for name, t in complex_inputs().items()
    }

    def run(made: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = {name: t.detach().requires_grad_() for name, t in made.items()}
        y, state = F.selective_scan(**leaves, delta_softplus=True)
        loss = y.square().sum() + state.abs().square().sum()
        return (y, state, *torch.autograd.grad(loss, list(leaves.values())))

    one = run(made)
    other = run({name: t.conj() for name, t in made.items()})
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b.conj().resolve_conj())


def test_derivatives_of_a_complex_scan():
    made = complex_inputs(3, 3, 2, 1)
    leaves = [t.requires_grad_() for t in made.values()]

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.selective_scan(**dict(zip(made, values, strict=True)), delta_softplus=True)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_a_complex_scan_compiles():
    made = complex_inputs(9)
    compiled = torch.compile(F.selective_scan, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**made)[0], F.selective_scan(**made)[0])


@pytest.mark.parametrize("splits", [(0, 1, 2, 70), (0, 33, 64, 70)])
def test_a_complex_state_continues(splits):
    made = complex_inputs()
    y, final = F.selective_scan(**made, delta_softplus=True)
    state, parts = None, []
    for a, b in itertools.pairwise(splits):
        some = {name: t[:, a:b] if t.dim() > 2 else t for name, t in made.items()}
        part, state = F.selective_scan(**some, delta_softplus=True, initial_state=state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y)
    torch.testing.assert_close(state, final)


def test_real_and_complex_weights_of_a_complex_scan_agree():
    made = complex_inputs()
    wide = made | {name: made[name].real + 0j for name in "BC"}
    narrow = made | {name: made[name].real for name in "BC"}
    torch.testing.assert_close(F.selective_scan(**narrow), F.selective_scan(**wide))


@pytest.mark.parametrize("constant", [False, True])
def test_a_complex_A_is_two_scans(constant):
    """Re A = a and Im A = 0, and a state of the imaginary part apart."""
    made = inputs(12)
    if constant:
        made |= {"B": draw(21, 5, seed=3), "C": draw(21, 5, seed=4)}
    y, state = F.selective_scan(**made, delta_softplus=True)
    twice, both = F.selective_scan(**made | {"A": made["A"] + 0j}, delta_softplus=True)
    skip = made["D"] * made["u"] * nnf.silu(made["z"])
    torch.testing.assert_close(twice - skip, 2 * (y - skip))
    torch.testing.assert_close(both, state + 0j)
    turned = made["A"] + 1j * draw(21, 5, seed=9)
    start = torch.complex(draw(2, 21, 5, seed=10), draw(2, 21, 5, seed=11))
    found, last = F.selective_scan(**made | {"A": turned}, initial_state=start)
    dt = made["delta"] + made["delta_bias"]
    h = start
    for t in range(12):
        b, c = (made[name] if constant else made[name][:, t, None] for name in "BC")
        h = (dt[:, t, :, None] * turned).exp() * h + (dt * made["u"])[:, t, :, None] * b
        expected = 2 * (h * c).sum(-1).real + made["D"] * made["u"][:, t]
        torch.testing.assert_close(found[:, t], expected * nnf.silu(made["z"][:, t]))
    torch.testing.assert_close(last, h)


@pytest.mark.parametrize("is_complex", [False, True])
def test_the_backward_keeps_few_states(is_complex):
    """The states of all tokens would be 5 times as many elements as all that is kept."""
    made = {name: t.float() for name, t in inputs(512, 64, 16, 1).items()}
    if is_complex:
        made["A"] = torch.complex(made["A"], draw(64, 16, seed=9).float())
    made = {name: t.requires_grad_() for name, t in made.items()}
    kept = 0

    def pack(t: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        F.selective_scan(**made, delta_softplus=True)
    assert kept < 512 * 64 * 16 / 3


def test_the_scan_of_transformers():
    module = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    made = {name: t.float() for name, t in inputs(9).items()}
    rows = ("u", "delta", "B", "C", "z")
    theirs, state = module.mamba_selective_scan(
        *(t.transpose(1, 2) if name in rows else t for name, t in made.items()),
        delta_softplus=True,
        return_last_state=True,
    )
    y, final = F.selective_scan(**made, delta_softplus=True)
    torch.testing.assert_close(y, theirs.transpose(1, 2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final, state)


X, A, ROWS = torch.ones(1, 3, 4), -torch.ones(4, 2), torch.ones(1, 3, 2)
VALID = {"u": X, "delta": X, "A": A, "B": ROWS, "C": ROWS}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"u": X[0]}, ValueError, r"u must have shape \(B, T, D\), got u.shape=\(3, 4\)"),
        ({"u": X.long()}, TypeError, "u must be float64"),
        ({"delta": X.double()}, TypeError, "delta must have the dtype of u"),
        ({"delta": X[:, :2]}, ValueError, r"delta must have shape \(1, 3, 4\)"),
        ({"z": X[:, :2]}, ValueError, r"z must have shape \(1, 3, 4\)"),
        ({"A": A[:3]}, ValueError, r"A must have shape \(4, N\), got A.shape=\(3, 2\)"),
        ({"A": A.long()}, TypeError, "A must be floating-point"),
        ({"A": -A}, ValueError, r"A must be at most 0, got max\(A\)=1.0"),
        ({"A": 2 - A * 1j}, ValueError, r"Re A must be at most 0, got max\(Re A\)=2.0"),
        ({"A": A + 0j, "backend": "cuda"}, ValueError, "backend must match the device"),
        ({"A": A + 0j, "backend": "fast"}, ValueError, "backend must be one of"),
        ({"B": ROWS[:, :2]}, ValueError, r"B must have shape \(1, 3, 2\), \(1, 3, G, 2\) with G"),
        ({"B": A.mT}, ValueError, r"B must have shape \(4, 2\), got B.shape=\(2, 4\)"),
        ({"C": torch.ones(1, 3, 3, 2)}, ValueError, "G groups of the 4 channels"),
        ({"C": torch.ones(1, 3, 2, 2)}, ValueError, r"C must have the groups of B"),
        ({"C": ROWS.double()}, TypeError, "C must have the dtype of u"),
        ({"B": ROWS + 0j}, TypeError, "B must have the dtype of u"),
        ({"D": torch.ones(3)}, ValueError, r"D must have shape \(4,\), got D.shape=\(3,\)"),
        ({"delta_bias": X}, ValueError, r"delta_bias must have shape \(4,\)"),
        ({"delta_softplus": 1}, TypeError, "delta_softplus must be True or False, got"),
        ({"initial_state": X}, ValueError, r"initial_state must have shape \(1, 4, 2\)"),
        ({"initial_state": torch.ones(1, 4, 2) + 0j}, TypeError, "must be floating-point"),
        (
            {"cu_seqlens": torch.tensor([0, 5])},
            ValueError,
            "must grow from 0 to the number of tokens, 3, got cu",
        ),
        ({"cu_seqlens": torch.tensor([2, 1])}, ValueError, r"got cu_seqlens=\[2, 1\]"),
        ({"cu_seqlens": torch.tensor([0.0])}, TypeError, "cu_seqlens must be integers"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=f"selective_scan: .*{message}"):
        F.selective_scan(**(VALID | arguments))
