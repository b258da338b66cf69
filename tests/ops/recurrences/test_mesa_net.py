"""MesaNet: least squares, steps of conjugate gradients, states, gradients, errors."""

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
