"""Mamba-3's state space: pairs of tokens, special cases, states, errors."""

import math

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.functional import mamba3, ssd

B, T, H, G, P, N, A, R = 2, 11, 4, 2, 3, 6, 2, 3


def given(rank=0):
    torch.manual_seed(0)
    many = (rank,) if rank else ()

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    dt = nnf.softplus(normal(B, T, H))
    made = {
        "q": normal(B, T, *many, G, N),
        "k": normal(B, T, *many, G, N),
        "v": normal(B, T, H, P),
        "adt": -dt * normal(B, T, H).abs(),
        "dt": dt,
        "trap": normal(B, T, H),
        "q_bias": normal(H, *many, N),
        "k_bias": normal(H, *many, N),
        "angles": normal(B, T, H, A),
        "D": normal(H),
    }
    if rank:
        made |= {f"mimo_{name}": normal(H, R, P) for name in ("v", "z", "out")}
        made["z"] = normal(B, T, H, P)
    return made


@pytest.mark.parametrize("rank", [0, R])
def test_pairs_of_tokens(rank):
    """Weights of all pairs, with rotated pairs of channels as complex numbers.

    The formula is that of mamba3_siso_step_ref and mamba3_MIMO_step_ref in the tests of
    state-spaces/mamba, commit e9594ce1, with which both were compared: they differ by 6e-14.
    """
    made = given(rank)
    wide = {n: made[n] if rank else made[n][:, :, None] for n in "qk"}
    for name in "qk":
        bias = made[f"{name}_bias"] if rank else made[f"{name}_bias"][:, None]
        wide[name] = wide[name].repeat_interleave(H // G, 3) + bias.transpose(0, 1)
    theta = (math.pi * made["angles"].tanh() * made["dt"][..., None]).cumsum(1)
    turn = torch.polar(torch.ones_like(theta), theta)[:, :, None]
    turn = torch.cat((turn, turn.new_ones(B, T, 1, H, N // 2 - A)), -1)
    q, k = (
        torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn for t in wide.values()
    )
    dots = torch.einsum("bthrn->btrhn", q.transpose(2, 3))
    products = torch.einsum("btrhn,bsuhn->bhtrsu", dots, k.conj()).real
    x = made["v"][:, :, None]
    x = x * made["mimo_v"].transpose(0, 1) if rank else x
    share, sums = made["trap"].sigmoid(), made["adt"].cumsum(1)
    own, before = share * made["dt"], (1 - share) * made["dt"]
    y = torch.zeros_like(x) + made["D"][:, None] * x
    for t in range(T):
        for s in range(t + 1):
            weight = own[:, s] * (sums[:, t] - sums[:, s]).exp()
            if s < t:
                weight = weight + before[:, s + 1] * (sums[:, t] - sums[:, s]).exp()
            y[:, t] += torch.einsum("bh,bhru,buhp->brhp", weight, products[:, :, t, :, s], x[:, s])
    if rank:
        y = y * nnf.silu(made["z"][:, :, None] * made["mimo_z"].transpose(0, 1))
        y = (y * made["mimo_out"].transpose(0, 1)).sum(2)
    torch.testing.assert_close(mamba3(**made)[0], y if rank else y[:, :, 0])


def test_euler_steps_are_those_of_mamba_2():
    made = given() | {"trap": torch.full((B, T, H), 60.0)}
    made["angles"] = torch.zeros_like(made["angles"])
    made["q_bias"] = made["k_bias"] = torch.zeros(H, N, dtype=torch.float64)
    A = -torch.rand(H, dtype=torch.float64)
    made["adt"] = made["dt"] * A
    want, state = ssd(made["v"], made["dt"], A, made["k"], made["q"], D=made["D"])
    y, (_, h, _, _) = mamba3(**made)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(h, state)


@pytest.mark.parametrize("rank", [0, R])
def test_a_state_continues(rank):
    made = given(rank)
    names = ["q", "k", "v", "adt", "dt", "trap", "angles", *(["z"] if rank else [])]
    y, last = mamba3(**made)
    parts, state = [], None
    for a, b in ((0, 4), (4, 4), (4, 5), (5, T)):
        part, state = mamba3(**made | {n: made[n][:, a:b] for n in names}, initial_state=state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y)
    for a, b in zip(state, last, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rank", [0, R])
def test_gradients_of_a_step(rank):
    """Gradients of a call and a step after it are those of one call."""
    made = {n: t.requires_grad_() for n, t in given(rank).items()}
    names = ["q", "k", "v", "adt", "dt", "trap", "angles", *(["z"] if rank else [])]
    leaves = list(made.values())
    expected = torch.autograd.grad(mamba3(**made)[0].square().sum(), leaves)
    first, state = mamba3(**made | {n: made[n][:, :-1] for n in names})
    last, _ = mamba3(**made | {n: made[n][:, -1:] for n in names}, initial_state=state)
    found = torch.autograd.grad(torch.cat((first, last), 1).square().sum(), leaves)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_layouts_in_memory(backend):
    made = given()
    moved = {n: t.transpose(0, -1).contiguous().transpose(0, -1) for n, t in made.items()}
    wanted, found = (mamba3(**m, backend=backend)[0] for m in (made, moved))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("rank", [0, R])
def test_no_tokens(rank):
    over_time = {"q", "k", "v", "adt", "dt", "trap", "angles", "z"}
    made = {n: t[:, :0] if n in over_time else t for n, t in given(rank).items()}
    assert mamba3(**made)[0].shape == (B, 0, H, P)
    if rank:
        del made["mimo_out"]
        assert mamba3(**made)[0].shape == (B, 0, R, H, P)


def test_halves_are_pairs_in_another_order():
    made = given(R)
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # channel i and i + N / 2 become neighbours
    paired = {n: made[n][..., order] for n in ("q", "k", "q_bias", "k_bias")}
    y, state = mamba3(**made, interleaved=False)
    want, other = mamba3(**made | paired)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(state[1][..., order], other[1])


def test_angles_stay_exact_over_many_tokens():
    """In fp32, after 20,000 radians."""
    steps = 8192
    one = torch.ones(1, steps, 1, 2)
    dt = torch.full((1, steps, 1), 0.8)
    zero = torch.zeros(1, 2)
    rest = dt, dt, zero, zero, torch.full((1, steps, 1, 1), 5.0)
    y, (theta, *_) = mamba3(one, one, one, -100 * dt, *rest)
    exact = math.pi * math.tanh(5.0) * torch.full((steps,), 0.8).double().sum()
    assert abs(math.remainder(theta.item() - exact.item(), 2 * math.pi)) < 1e-2
    torch.testing.assert_close(y, (0.8 * torch.tensor(0.8).sigmoid() * 2).expand_as(y))


ERRORS = {
    "an odd N": ({"q": torch.ones(1, 2, 1, 3)}, r"q must have shape \(B, T, G, N\) and an even N"),
    "heads": ({"v": torch.ones(1, 2, 3, 2)}, "H a multiple of its G"),
    "growth": ({"adt": torch.ones(1, 2, 2)}, "adt must be <= 0"),
    "angles": ({"angles": torch.ones(1, 2, 2, 3)}, "angles must have at most N / 2 = 1 pairs"),
    "gate": ({"mimo_z": torch.ones(2, 1, 2)}, "mimo_z must be None without mimo_v"),
    "state": ({"initial_state": (1, 2)}, "initial_state must be a tuple"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    wrong, message = ERRORS[name]
    rows, gates = torch.ones(1, 2, 2, 2), torch.zeros(1, 2, 2)
    good = dict.fromkeys("qkv", rows) | dict.fromkeys(("adt", "dt", "trap"), gates)
    good |= {"q_bias": rows[0, 0], "k_bias": rows[0, 0], "angles": rows[..., :1]}
    with pytest.raises((ValueError, TypeError), match=message):
        mamba3(**good | wrong)
