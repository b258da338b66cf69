"""TTT-Linear: gradient descent by autograd, states, mini-batches, errors."""

import itertools

import pytest
import torch
from recurrence_cases import draw
from torch.nn import functional as nnf

from omniattn import functional as F

B, T, H, D, C = 2, 21, 2, 8, 4
Q, V = draw(B, T, H, D), draw(B, T, H, D, seed=2)
K = nnf.normalize(draw(B, T, H, D, seed=1), dim=-1)
WEIGHT, BIAS = 1 + draw(H, D, seed=3) / 4, draw(H, D, seed=4)
ETA, LR = (draw(B, T, H, seed=n).sigmoid() / 4 for n in (5, 6))
ROWS = Q, K, V
STATE = tuple(draw(B, H, *size, seed=7) / 4 for size in ((D, D), (D,), (D, D), (D,)))
BACKENDS = [None, "reference"]


def test_gradient_descent():
    """By autograd, for one head: gradients of mini-batches at their first weights."""
    h, weights, bias = 1, STATE[0][0, 1].clone(), STATE[1][0, 1].clone()
    q, k, v = (t[0, :, h] for t in ROWS)
    out = []
    for first in range(0, T, C):
        dw, db = torch.zeros(D, D).double(), torch.zeros(D).double()
        for t in range(first, min(T, first + C)):
            leaves = [weights.requires_grad_(), bias.requires_grad_()]
            z = nnf.layer_norm(k[t] @ weights + bias, (D,), WEIGHT[h], BIAS[h], 1e-6)
            loss = (z - (v[t] - k[t])).square().sum() / 2
            more = torch.autograd.grad(loss, leaves)
            dw, db = dw + LR[0, t, h] * more[0], db + LR[0, t, h] * more[1]
            step = ETA[0, t, h]
            y = D**-0.5 * q[t] @ (weights - step * dw) + bias - step * db
            out.append(y + nnf.layer_norm(y, (D,), WEIGHT[h], BIAS[h], 1e-6))
        weights, bias = (weights - step * dw).detach(), (bias - step * db).detach()
    start = (*STATE[:2], 0 * STATE[2], 0 * STATE[3])
    o, (w, *_) = F.ttt_linear(*ROWS, WEIGHT, BIAS, ETA, LR, mini_batch_size=C, initial_state=start)
    torch.testing.assert_close(o[0, :, h], torch.stack(out).detach())
    last, _ = F.ttt_linear(
        *(t[:, :20] for t in ROWS), WEIGHT, BIAS, ETA[:, :20], LR[:, :20],
        mini_batch_size=C, initial_state=start,
    )[1][:2]  # fmt: skip
    torch.testing.assert_close(w, last)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_continues(backend):
    options = {"mini_batch_size": C, "backend": backend}
    o, final = F.ttt_linear(*ROWS, WEIGHT, BIAS, ETA, LR, **options)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 6, 7, 16, 18, 21)):
        q, k, v, eta, lr = (t[:, a:b] for t in (*ROWS, ETA, LR))
        place = None if state is None else torch.full((B,), a)
        part, state = F.ttt_linear(
            q, k, v, WEIGHT, BIAS, eta, lr, initial_state=state, position=place, **options
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o)
    torch.testing.assert_close(state, final)


def test_positions_of_each_sequence():
    place = torch.tensor([2, 7])
    given = {"mini_batch_size": C, "initial_state": STATE}
    o, state = F.ttt_linear(*ROWS, WEIGHT, BIAS, ETA, position=place, **given)
    for n in range(B):
        given["initial_state"] = tuple(t[n : n + 1] for t in STATE)
        rows = [t[n : n + 1] for t in ROWS]
        one, own = F.ttt_linear(
            *rows, WEIGHT, BIAS, ETA[n : n + 1], position=place[n : n + 1], **given
        )
        torch.testing.assert_close(o[n : n + 1], one)
        torch.testing.assert_close(tuple(t[n : n + 1] for t in state), own)


def test_residuals():
    given = {"mini_batch_size": C, "scale": 0.5}
    one, _ = F.ttt_linear(*ROWS, WEIGHT, BIAS, ETA, **given)
    two, _ = F.ttt_linear(*ROWS, WEIGHT, BIAS, ETA, residual="query", **given)
    normal = two - Q / 2
    torch.testing.assert_close(nnf.layer_norm(one - normal, (D,)) * WEIGHT + BIAS, normal)


ONE, GATE, WIDE = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1), torch.ones(1, 4)
GOOD = {"q": ONE, "k": ONE, "v": ONE, "w": WIDE, "b": WIDE, "eta": GATE}
ERRORS = {
    "values": ({"v": ONE[..., :2]}, r"v must have shape \(1, 2, 1, 4\)"),
    "weight": ({"w": WIDE[:, :2]}, r"w must have shape \(1, 4\)"),
    "lr": ({"lr": ONE}, r"lr must have shape \(1, 2, 1\)"),
    "size": ({"mini_batch_size": 0}, "mini_batch_size must be"),
    "residual": ({"residual": "x"}, "residual must be one of"),
    "position": ({"position": torch.zeros(1).long()}, "position must be None without"),
    "state": ({"initial_state": ONE}, "initial_state must be a tuple"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    wrong, message = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=f"ttt_linear: {message}"):
        F.ttt_linear(**GOOD | wrong)
