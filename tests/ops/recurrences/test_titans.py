"""Titans' memories: gradient descent by autograd, states, strong gates, errors."""

import itertools

import pytest
import torch
from recurrence_cases import draw
from torch.nn import functional as nnf

from omniattn import functional as F

B, T, H, D, C = 2, 21, 2, 8, 4
Q, V = draw(B, T, H, D), draw(B, T, H, D, seed=2)
K = nnf.normalize(draw(B, T, H, D, seed=1), dim=-1)
NORM = {"w": 1 + draw(H, D, seed=3) / 4, "b": draw(H, D, seed=4)}
THETA, ALPHA, ETA = (draw(B, T, H, seed=n).sigmoid() / m for n, m in ((5, 8), (6, 2), (7, 1)))
ROWS = Q, K, V, THETA, ALPHA, ETA
STATE = tuple(draw(B, H, D, D, seed=n) / 4 for n in (8, 9, 10))
BACKENDS = [None, "reference"]


@pytest.mark.parametrize("size", [1, C])
@pytest.mark.parametrize("norm", [{}, NORM], ids=["plain", "norm"])
def test_gradient_descent(norm, size):
    """By autograd, for one head: equations 9, 10 and 14 of the paper."""
    h, (m, s) = 1, (t[0, 1] for t in STATE[:2])
    q, k, v, theta, alpha, eta = (t[0, :, h] for t in ROWS)
    weight = tuple(t[h] for t in norm.values())
    out = []
    for t in range(T):
        if t % size == 0:
            first = m.clone().requires_grad_()
        z = k[t] @ first
        gap = nnf.layer_norm(z, (D,), *weight, 1e-6) - (v[t] - k[t]) if norm else z - v[t]
        (slope,) = torch.autograd.grad(gap.square().sum(), first)
        s = eta[t] * s - theta[t] * slope
        m = (1 - alpha[t]) * m + s
        y = q[t] @ m
        out.append(y + nnf.layer_norm(y, (D,), *weight, 1e-6) if norm else y)
    o, (last, momentum, _) = F.titans_linear(
        *ROWS, **norm, mini_batch_size=size, initial_state=STATE
    )
    torch.testing.assert_close(o[0, :, h], torch.stack(out))
    torch.testing.assert_close((last[0, h], momentum[0, h]), (m, s))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_continues(backend):
    options = {"mini_batch_size": C, "backend": backend, **NORM}
    o, final = F.titans_linear(*ROWS, **options)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 6, 7, 16, 18, 21)):
        place = None if state is None else torch.full((B,), a)
        part, state = F.titans_linear(
            *(t[:, a:b] for t in ROWS), initial_state=state, position=place, **options
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o)
    torch.testing.assert_close(state, final)


def test_packed_sequences():
    boundaries = torch.tensor([0, 5, 5, 13, T], dtype=torch.int32)
    rows = [t[:1] for t in ROWS]
    o, state = F.titans_linear(*rows, mini_batch_size=C, cu_seqlens=boundaries)
    for n, (a, b) in enumerate(itertools.pairwise(boundaries.tolist())):
        one, own = F.titans_linear(*(t[:, a:b] for t in rows), mini_batch_size=C)
        torch.testing.assert_close(o[:, a:b], one)
        torch.testing.assert_close(tuple(t[n : n + 1] for t in state), own)


@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_strong_gates(gate):
    """Gates of exactly 0 and 1 in fp32, where quotients of products would be 0 / 0."""
    rows = [t.float() for t in (*ROWS[:4], 0 * ALPHA + gate, 0 * ETA + 1 - gate)]
    found, expected = [], []
    for out, backend in ((found, None), (expected, "reference")):
        given = [t.clone().requires_grad_() for t in rows]
        o, _ = F.titans_linear(*given, mini_batch_size=C, backend=backend)
        out += [o, *torch.autograd.grad(o.square().sum(), given)]
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


ONE, GATE, WIDE = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1), torch.ones(1, 4)
GOOD = {"q": ONE, "k": ONE, "v": ONE, "theta": GATE}
ERRORS = {
    "values": ({"v": ONE[..., :2], "w": WIDE, "b": WIDE}, r"v must have shape \(1, 2, 1, 4\)"),
    "norm": ({"w": WIDE}, "b must be given with w, got b=None"),
    "weight": ({"w": WIDE[:, :2], "b": WIDE}, r"w must have shape \(1, 4\)"),
    "eta": ({"eta": ONE}, r"eta must have shape \(1, 2, 1\)"),
    "size": ({"mini_batch_size": 0}, "mini_batch_size must be"),
    "position": ({"position": torch.zeros(1).long()}, "position must be None without"),
    "state": ({"initial_state": ONE}, "initial_state must be a tuple"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    wrong, message = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=f"titans_linear: {message}"):
        F.titans_linear(**GOOD | wrong)


HIDDEN = [6, 5]
SHAPES = list(itertools.pairwise([D, *HIDDEN, D]))
DEEP = tuple(draw(B, H, sum(a * b for a, b in SHAPES), seed=n) / 3 for n in (11, 12, 13))


def applied(flat, x):
    """The MLP of the matrices in `flat` (P,)."""
    for n, (a, b) in enumerate(SHAPES):
        matrix, flat = flat[: a * b].view(a, b), flat[a * b :]
        x = (nnf.gelu(x) if n > 0 else x) @ matrix
    return x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, C])
def test_descent_of_an_mlp(size, backend):
    """By autograd, for one head: equations 9, 10 and 14 of the paper with an MLP of 3 layers."""
    h, (m, s) = 1, (t[0, 1] for t in DEEP[:2])
    q, k, v, theta, alpha, eta = (t[0, :, h] for t in ROWS)
    out = []
    for t in range(T):
        if t % size == 0:
            first = m.clone().requires_grad_()
        (slope,) = torch.autograd.grad((applied(first, k[t]) - v[t]).square().sum(), first)
        s = eta[t] * s - theta[t] * slope
        m = (1 - alpha[t]) * m + s
        out.append(applied(m, 0.5 * q[t]))
    o, (last, momentum, _) = F.titans_mlp(
        *ROWS, scale=0.5, hidden=HIDDEN, mini_batch_size=size, initial_state=DEEP, backend=backend
    )
    torch.testing.assert_close(o[0, :, h], torch.stack(out))
    torch.testing.assert_close((last[0, h], momentum[0, h]), (m, s))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_deep_state_continues(backend):
    options = {"hidden": HIDDEN, "mini_batch_size": C, "backend": backend}
    start = DEEP[0], DEEP[1], DEEP[0]
    o, final = F.titans_mlp(*ROWS, initial_state=start, **options)
    state, parts = start, []
    for a, b in itertools.pairwise((0, 1, 1, 6, 7, 16, 18, 21)):
        place = torch.full((B,), a)
        rows = (t[:, a:b] for t in ROWS)
        part, state = F.titans_mlp(*rows, initial_state=state, position=place, **options)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o)
    torch.testing.assert_close(state, final)


def test_without_hidden_layers_it_is_the_linear_memory():
    linear, state = F.titans_linear(*ROWS, mini_batch_size=C, initial_state=STATE)
    flat = tuple(t.flatten(-2) for t in STATE)
    o, found = F.titans_mlp(*ROWS, mini_batch_size=C, initial_state=flat)
    torch.testing.assert_close(o, linear)
    torch.testing.assert_close(found, tuple(t.flatten(-2) for t in state))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"initial_state": None}, TypeError, "initial_state must be a tuple .*, got None"),
        ({"hidden": [4]}, ValueError, r"initial_state\[0\] must have shape"),
        ({"hidden": [6, 0]}, ValueError, r"hidden\[1\] must be"),
        ({"theta": THETA[..., :1]}, ValueError, "theta must have shape"),
        ({"mini_batch_size": 0}, ValueError, "mini_batch_size must be"),
    ],
)
def test_errors_of_deep_memories(wrong, error, message):
    given = dict(zip(("q", "k", "v", "theta"), ROWS, strict=False))
    given |= {"hidden": HIDDEN, "initial_state": DEEP}
    with pytest.raises(error, match=f"titans_mlp: {message}"):
        F.titans_mlp(**given | wrong)
