"""MesaNet and Gated KalmaNet: least squares, conjugate gradients, states, errors."""

import itertools

import pytest
import torch
from recurrence_cases import decays, draw, qkv
from torch.nn import functional as nnf

from omniattn import functional as F

Q, K, V = qkv(21)
K = nnf.normalize(K, dim=-1)
G, BETA = decays(2, 21, 2), draw(2, 21, 2, seed=4).sigmoid()
LAMB = draw(2, 8, seed=5).abs() + 0.25
BACKENDS = [None, "reference"]


def test_least_squares():
    """The output of the weighted ridge regression of values on keys, one token and head."""
    t, h = 13, 1
    weights = (G[0, : t + 1, h].flip(0).cumsum(0) - G[0, : t + 1, h].flip(0)).flip(0).exp()
    weights = (weights * BETA[0, : t + 1, h]).sqrt()[:, None]
    rows = torch.cat((weights * K[0, : t + 1, h], LAMB[h].sqrt().diag()))
    right = torch.cat((weights * V[0, : t + 1, h], torch.zeros(8, 5).double()))
    best = torch.linalg.lstsq(rows, right).solution
    o, _ = F.mesa_net(Q, K, V, G, BETA, LAMB)
    torch.testing.assert_close(o[0, t, h], best.mT @ Q[0, t, h])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_continues(backend):
    tokens = Q, K, V, G, BETA
    o, final = F.mesa_net(*tokens, LAMB, backend=backend)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 18, 19, 21)):
        rows = (t[:, a:b] for t in tokens)
        part, state = F.mesa_net(*rows, LAMB, initial_state=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o)
    torch.testing.assert_close(state, final)


def test_more_steps_are_closer_and_end_by_themselves():
    exact, _ = F.mesa_net(Q, K, V, G, BETA, LAMB, backend="reference")
    gaps = []
    for count in (1, 3, 6):
        o, _ = F.mesa_net(Q, K, V, G, BETA, LAMB, max_iterations=count)
        gaps.append((o - exact).norm().item())
    assert gaps[0] > 5 * gaps[1] > 25 * gaps[2]
    found = [F.mesa_net(Q, K, V, G, BETA, LAMB, max_iterations=n)[0] for n in (30, 1000)]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], exact)
    zero, _ = F.mesa_net(0 * Q, K, V, G, BETA, LAMB)
    assert not zero.any()


@pytest.mark.parametrize("tokens", [1, 21])
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20])
@pytest.mark.parametrize("op", ["mesa_net", "gated_kalmanet"])
def test_small_and_large_right_hand_sides(op, size, tokens):
    """Outputs are linear in q and gradients in those of outputs, also where squares vanish."""
    q, k, v, g, beta = (t[:, :tokens].float() for t in (Q, K, V, G, BETA))

    def run(q, k, factor):
        q, k = q.requires_grad_(), k.clone().requires_grad_()
        rest = (g, beta, LAMB.float()) if op == "mesa_net" else (g, g)
        o, _ = getattr(F, op)(q, k, v, *rest)
        return o, *torch.autograd.grad(o, (q, k), torch.full_like(o, factor))

    o, dq, dk = run(q.clone(), k, 1.0)
    scaled, *_ = run(q * size, k, 1.0)
    torch.testing.assert_close(scaled / size, o, rtol=1e-4, atol=1e-5)
    _, dq_scaled, dk_scaled = run(q.clone(), k, size)
    torch.testing.assert_close(dq_scaled / size, dq, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dk_scaled / size, dk, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", ["mesa_net", "gated_kalmanet"])
def test_gradient_of_an_initial_state(op):
    q, k, v, g = (t[:, :5] for t in (Q, K, V, G))
    rest = (g, BETA[:, :5], LAMB) if op == "mesa_net" else (g, g)
    half = draw(2, 2, 8, 8, seed=7)
    start, other = half @ half.mT, draw(2, 2, 8, 5, seed=8)

    def gradient(backend):
        h = start.clone().requires_grad_()
        o, _ = getattr(F, op)(q, k, v, *rest, initial_state=(h, other), backend=backend)
        return torch.autograd.grad(o.sin().sum(), h)[0]

    torch.testing.assert_close(gradient(None), gradient("reference"))


def test_nan_stays_in_its_row():
    q = Q.clone()
    q[0, 3, 1, 0] = torch.nan
    o, _ = F.mesa_net(q, K, V, G, BETA, LAMB)
    want, _ = F.mesa_net(Q, K, V, G, BETA, LAMB)
    assert o[0, 3, 1].isnan().all()
    o[0, 3, 1] = want[0, 3, 1]
    torch.testing.assert_close(o, want)


ROWS, GATES = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1)
ERRORS = {
    "heads": ({"v": torch.ones(1, 2, 2, 4)}, r"v must have shape \(1, 2, 1, 4\)"),
    "growth": ({"g": GATES}, "g must be <= 0"),
    "lamb": ({"lamb": torch.ones(2, 4)}, r"lamb must have shape \(1, 4\)"),
    "negative": ({"lamb": -torch.ones(1, 4)}, "lamb must be >= 0"),
    "steps": ({"max_iterations": 0}, "max_iterations must be"),
    "state": ({"initial_state": ROWS}, r"initial_state must be a tuple \(H, G\)"),
    "matrix": (
        {"initial_state": (torch.ones(1, 1, 4, 3), torch.ones(1, 1, 4, 4))},
        r"initial_state\[0\] must have shape \(1, 1, 4, 4\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    wrong, message = ERRORS[name]
    good = dict.fromkeys("qkv", ROWS) | {"g": -GATES, "beta": GATES, "lamb": torch.ones(1, 4)}
    with pytest.raises((ValueError, TypeError), match=f"mesa_net: {message}"):
        F.mesa_net(**good | wrong)


GK, ALPHA = decays(2, 21, 2).roll(1, 1), draw(2, 21, 2, seed=6).sigmoid()


def naive_kalmanet(q, k, v, g, gk, alpha, ridge_ratio=0.02):
    """fla's naive_recurrent_gka as a sum over tokens; also returns H and U of the last one."""
    out = []
    for t in range(q.shape[1]):
        past = slice(0, t + 1)
        u, w = ((d[:, past].flip(1).cumsum(1).flip(1) - d[:, past]).exp() for d in (g, gk))
        kk = torch.einsum("bsh,bshk,bshl->bhkl", w, k[:, past], k[:, past])
        kv = torch.einsum("bsh,bshk,bshv->bhkv", u, k[:, past], v[:, past])
        ridge = ridge_ratio * torch.linalg.matrix_norm(kk)[..., None, None] * torch.eye(k.shape[3])
        x = torch.linalg.solve(kk + ridge, q[:, t])
        x = q[:, t] + alpha[:, t, :, None] * (x - q[:, t])
        out.append(torch.einsum("bhk,bhkv->bhv", x, kv) / k.shape[3] ** 0.5)
    return torch.stack(out, 1), kk, kv


@pytest.mark.parametrize("backend", BACKENDS)
def test_kalmanet_is_that_of_fla(backend):
    o, states = F.gated_kalmanet(Q, K, V, G, GK, ALPHA, ridge_ratio=0.1, backend=backend)
    want = naive_kalmanet(Q, K, V, G, GK, ALPHA, 0.1)
    torch.testing.assert_close((o, *states), want)
    none, ones = torch.zeros_like(G), torch.ones_like(G)
    o, states = F.gated_kalmanet(Q, K, V, backend=backend)
    torch.testing.assert_close((o, *states), naive_kalmanet(Q, K, V, none, none, ones))


@pytest.mark.parametrize("backend", BACKENDS)
def test_kalmanet_without_its_regression_is_linear_attention(backend):
    o, (_, u) = F.gated_kalmanet(Q, K, V, G, GK, 0 * ALPHA, scale=0.7, backend=backend)
    want = F.gated_linear_attention(Q, K, V, G, scale=0.7, backend=backend)
    torch.testing.assert_close((o, u), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_of_kalmanet_continues(backend):
    tokens = Q, K, V, G, GK, ALPHA
    o, final = F.gated_kalmanet(*tokens, backend=backend)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 18, 19, 21)):
        rows = (t[:, a:b] for t in tokens)
        part, state = F.gated_kalmanet(*rows, initial_state=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o)
    torch.testing.assert_close(state, final)


def test_first_keys_of_zero_write_and_read_nothing():
    k = K.clone()
    k[:, :4] = 0
    rows = [t.clone().requires_grad_() for t in (Q, k, V, G, GK, ALPHA)]
    (o, _), (want, _) = (F.gated_kalmanet(*rows, backend=backend) for backend in BACKENDS)
    assert not o[:, :4].any()
    later, _ = F.gated_kalmanet(*(t[:, 4:] for t in rows))
    torch.testing.assert_close(o[:, 4:], later)
    found, expected = (torch.autograd.grad(y.sum(), rows) for y in (o, want))
    torch.testing.assert_close(found, expected)


KALMANET_ERRORS = {
    "ridge": ({"ridge_ratio": 0.0}, "ridge_ratio must be > 0, got ridge_ratio=0.0"),
    "steps": ({"max_iterations": 0}, "max_iterations must be"),
    "growth": ({"gk": GATES}, "gk must be <= 0"),
    "alpha": ({"alpha": torch.ones(1, 2, 2)}, r"alpha must have shape \(1, 2, 1\)"),
    "state": ({"initial_state": ROWS}, r"initial_state must be a tuple \(H, U\)"),
}


@pytest.mark.parametrize("name", KALMANET_ERRORS)
def test_errors_of_kalmanet(name):
    wrong, message = KALMANET_ERRORS[name]
    good = dict.fromkeys("qkv", ROWS) | {"g": -GATES}
    with pytest.raises((ValueError, TypeError), match=f"gated_kalmanet: {message}"):
        F.gated_kalmanet(**good | wrong)
