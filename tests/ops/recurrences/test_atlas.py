"""ATLAS' linear memory: the Omega rule by autograd, orthogonal steps, states, gates, errors."""

import itertools

import pytest
import torch
from recurrence_cases import draw
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn.compositions.recurrences import atlas

B, T, H, D, C, WINDOW = 2, 21, 2, 6, 4, 3
Q, V = draw(B, T, H, D), draw(B, T, H, D, seed=2)
K = nnf.normalize(draw(B, T, H, D, seed=1), dim=-1)
GAMMA = draw(B, T, H, WINDOW, seed=5).sigmoid() / 8
THETA, ALPHA, ETA = (draw(B, T, H, seed=n).sigmoid() / m for n, m in ((6, 1), (7, 2), (8, 1)))
ROWS = Q, K, V, GAMMA, THETA, ALPHA, ETA
STATE = (
    *(draw(B, H, D, D, seed=n) / 4 for n in (9, 10, 11)),
    nnf.normalize(draw(B, WINDOW - 1, H, D, seed=12), dim=-1),
    draw(B, WINDOW - 1, H, D, seed=13),
)
BACKENDS = [None, "reference"]


def orthogonal(x, steps):
    """The polynomial of each step, applied to the singular values."""
    if steps == 0:
        return x
    left, s, right = torch.linalg.svd(x)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return left @ s.diag() @ right


@pytest.mark.parametrize("size", [1, C])
@pytest.mark.parametrize("steps", [0, 2])
def test_omega_rule(steps, size):
    """By autograd, for one head: the sum of the losses of a window, at the mini-batch's start."""
    h, (m, s) = 1, (t[0, 1] for t in STATE[:2])
    q, k, v, gamma, theta, alpha, eta = (t[0, :, h] for t in ROWS)
    keys, values = (torch.cat((old[0, :, h], x)) for old, x in ((STATE[3], k), (STATE[4], v)))
    out = []
    for t in range(T):
        if t % size == 0:
            first = m.clone().requires_grad_()
        window = slice(t, t + WINDOW)  # the latest token is the last one
        losses = (keys[window] @ first - values[window]).square().sum(-1)
        (slope,) = torch.autograd.grad(gamma[t].flip(0) @ losses, first)
        s = eta[t] * s - slope
        m = (1 - alpha[t]) * m + theta[t] * orthogonal(s, steps)
        out.append(q[t] @ m)
    o, (last, momentum, _, past_keys, past_values) = F.atlas_linear(
        *ROWS, newton_schulz_steps=steps, mini_batch_size=size, initial_state=STATE
    )
    torch.testing.assert_close(o[0, :, h], torch.stack(out))
    torch.testing.assert_close((last[0, h], momentum[0, h]), (m, s))
    assert past_keys.equal(K[:, 1 - WINDOW :]) and past_values.equal(V[:, 1 - WINDOW :])


@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (8, 3)])
def test_five_steps_are_nearly_orthogonal(shape):
    """Singular values of the only step are about 1, as the paper's steps are meant to be."""
    k, v = nnf.normalize(draw(1, 9, 1, shape[0]), dim=-1), draw(1, 9, 1, shape[1], seed=1)
    gamma = torch.ones(1, 9, 1, 9, dtype=torch.float64)
    _, (m, *_) = F.atlas_linear(
        k, k, v, gamma, alpha=torch.ones_like(gamma[..., 0]), newton_schulz_steps=5
    )
    values = torch.linalg.svdvals(m[0, 0])
    assert float(values.min()) > 0.6 and float(values.max()) < 1.25


def test_a_window_of_one_token_is_titans():
    titans = F.titans_linear(Q, K, V, GAMMA[..., 0], ALPHA, ETA, mini_batch_size=C)
    o, state = F.atlas_linear(Q, K, V, GAMMA[..., :1], None, ALPHA, ETA, mini_batch_size=C)
    torch.testing.assert_close((o, state[:3]), titans)
    assert state[3].shape == state[4].shape == (B, 0, H, D)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_continues(steps, backend):
    options = {"newton_schulz_steps": steps, "mini_batch_size": C, "backend": backend}
    o, final = F.atlas_linear(*ROWS, **options)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 6, 7, 16, 18, 21)):
        place = None if state is None else torch.full((B,), a)
        part, state = F.atlas_linear(
            *(t[:, a:b] for t in ROWS), initial_state=state, position=place, **options
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o)
    torch.testing.assert_close(state, final)


def test_packed_sequences():
    """Windows end at boundaries; the second sequence has no tokens and the third one."""
    boundaries = torch.tensor([0, 5, 5, 6, T], dtype=torch.int32)
    rows = [t[:1] for t in ROWS]
    o, state = F.atlas_linear(*rows, mini_batch_size=C, cu_seqlens=boundaries)
    for n, (a, b) in enumerate(itertools.pairwise(boundaries.tolist())):
        one, own = F.atlas_linear(*(t[:, a:b] for t in rows), mini_batch_size=C)
        torch.testing.assert_close(o[:, a:b], one)
        torch.testing.assert_close(tuple(t[n : n + 1] for t in state), own)


@pytest.mark.parametrize(("steps", "window", "size"), [(70, 33, 200), (40, 45, 8), (3, 9, 4)])
def test_windows_reach_over_mini_batches(steps, window, size):
    """The kernel takes up to 64 tokens at a time; outputs, states and gradients as defined.

    Devices without the kernel run the composition."""
    rows = [draw(1, steps, H, 4, seed=n) / 4 for n in range(3)]
    rows += [draw(1, steps, H, window, seed=3).sigmoid() / window]
    rows += [draw(1, steps, H, seed=n).sigmoid() for n in (4, 5, 6)]
    state = [draw(1, H, 4, 4, seed=n) / 4 for n in (7, 8, 9)]
    state += [draw(1, window - 1, H, 4, seed=n) / 4 for n in (10, 11)]
    found, expected = [], []
    for out, backend in ((found, None), (expected, "reference")):
        given = [t.clone().requires_grad_() for t in (*rows, *state)]
        options = {"position": torch.tensor([3]), "mini_batch_size": size, "backend": backend}
        o, final = F.atlas_linear(*given[:7], initial_state=tuple(given[7:]), **options)
        total = sum((t * draw(*t.shape, seed=n)).sum() for n, t in enumerate((o, *final)))
        out += [o, *final, *torch.autograd.grad(total, given)]
    torch.testing.assert_close(found, expected)
    q, k, v, gamma, theta, alpha, eta, m, s, n, *past = (*rows, *state)
    o, last, momentum, *others = atlas._forward(
        *(q, k, v, 2 * gamma, theta, eta, 1 - alpha, m, -s, n, *past),
        *(torch.tensor([3]), None, 0, size, 1.0),
    )
    torch.testing.assert_close([o, last, -momentum, *others], found[:6])


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_strong_gates(gate, steps):
    """Gates of exactly 0 and 1 in fp32, where quotients of products would be 0 / 0."""
    rows = [t.float() for t in (*ROWS[:5], 0 * ALPHA + gate, 0 * ETA + 1 - gate)]
    found, expected = [], []
    for out, backend in ((found, None), (expected, "reference")):
        given = [t.clone().requires_grad_() for t in rows]
        o, _ = F.atlas_linear(*given, newton_schulz_steps=steps, mini_batch_size=C, backend=backend)
        out += [o, *torch.autograd.grad(o.square().sum(), given)]
    scale = max(float(t.detach().abs().max()) for t in expected)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5 * scale)


ONE, GATE = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1)
GOOD = {"q": ONE, "k": ONE, "v": ONE, "gamma": ONE[..., :2]}
MATRIX, PAST = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 1, 4)
ERRORS = {
    "heads": ({"v": ONE.expand(-1, -1, 2, -1)}, r"v must have shape \(1, 2, 1, 4\)"),
    "gamma": ({"gamma": GATE}, r"gamma must have shape \(1, 2, 1, 1\)"),
    "window": ({"gamma": ONE[..., :0]}, r"gamma must have shape \(1, 2, 1, 1\)"),
    "theta": ({"theta": ONE}, r"theta must have shape \(1, 2, 1\)"),
    "size": ({"mini_batch_size": 0}, "mini_batch_size must be"),
    "steps": ({"newton_schulz_steps": -1}, "newton_schulz_steps must be"),
    "position": ({"position": torch.zeros(1).long()}, "position must be None without"),
    "state": ({"initial_state": ONE}, "initial_state must be a tuple"),
    "past": (
        {"initial_state": (*(MATRIX,) * 3, PAST.expand(-1, 2, -1, -1), PAST)},
        r"initial_state\[3\] must have shape \(1, 1, 1, 4\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    wrong, message = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=f"atlas_linear: {message}"):
        F.atlas_linear(**GOOD | wrong)


def test_torch_func_has_gradients_of_orthogonal_steps():
    """torch.func forbids the hooks with which autograd saves memory."""

    def loss(k):
        rows = (Q, k, *ROWS[2:])
        return F.atlas_linear(*rows, newton_schulz_steps=2, mini_batch_size=C)[0].square().sum()

    k = K.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(K), torch.autograd.grad(loss(k), k)[0])
