"""Delta rules with several keys a token: special cases, states, both forms of Comba, errors."""

import functools
import itertools

import pytest
import torch
from recurrence_cases import decays, draw, qkv

from omniattn import functional as F

Q, K, V = qkv(21, v_heads=4)
G, BETA = decays(2, 21, 4, 8), draw(2, 21, 4, seed=4).sigmoid()
ERASED, WRITTEN = draw(2, 21, 4, 8, seed=5).sigmoid(), draw(2, 21, 4, 5, seed=6).sigmoid()
#: Two updates of each token: those of this token, and those of the token of the other row.
PAIRS = [torch.stack((t, t.flip(0)), 2) for t in (K, V, BETA)]
P = torch.nn.functional.normalize(K + draw(2, 21, 2, 8, seed=7) / 4, dim=-1)
#: Gates of the mean squares of keys.
ATK = decays(2, 21, 2), draw(2, 21, 2, seed=8).sigmoid()
BACKENDS = [None, "reference"]
#: Function, tensors by token.
CALLS = {
    "product": (F.gated_delta_product, (Q, *PAIRS[:2], G, PAIRS[2])),
    "comba": (F.comba, (Q, K, V, P, G[..., 0], BETA)),
    "comba, decayed": (
        functools.partial(F.comba, erase_decayed=True),
        (Q, K, V, P, G, BETA),
    ),
    "oja": (F.gated_oja_rule, (Q, K, torch.nn.functional.normalize(V, dim=-1), G[..., :5], BETA)),
    "gates": (F.gated_delta_rule_2, (Q, K, V, G, ERASED, WRITTEN)),
    "preconditioned": (F.preconditioned_delta_rule, (Q, K, V, G, BETA, *ATK)),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_cases(backend):
    gated = F.gated_delta_rule(Q, K, V, G[..., 0], BETA, l2norm=True)
    channels = F.kimi_delta_attention(Q, K, V, G, BETA)
    alone = (t[:, :, None] for t in (K, V))
    one = F.gated_delta_product(
        *(Q, *alone, G[..., 0], BETA[:, :, None]), l2norm=True, backend=backend
    )
    torch.testing.assert_close(one, gated)
    same = {"l2norm": True, "erase_decayed": True, "backend": backend}
    torch.testing.assert_close(F.comba(Q, K, V, K, G[..., 0], BETA, **same), gated)
    beta = BETA[..., None]
    gates = beta.expand(2, 21, 4, 8), beta.expand(2, 21, 4, 5)
    torch.testing.assert_close(F.gated_delta_rule_2(Q, K, V, G, *gates, backend=backend), channels)


def test_product_of_updates():
    """Tokens of the delta rule, of which each second decays nothing and is not read."""
    k, v, beta = (t.flatten(1, 2) for t in PAIRS)
    g = torch.stack((G, torch.zeros_like(G)), 2).flatten(1, 2)
    o, state = F.kimi_delta_attention(Q.repeat_interleave(2, 1), k, v, g, beta)
    found = F.gated_delta_product(Q, *PAIRS[:2], G, PAIRS[2])
    torch.testing.assert_close(found, (o[:, 1::2], state))
    without = F.gated_delta_product(Q, *PAIRS[:2], None, PAIRS[2])
    zeros = F.gated_delta_product(Q, *PAIRS[:2], 0 * G, PAIRS[2])
    torch.testing.assert_close(without, zeros)


def test_oja():
    """A kimi delta rule whose state is transposed, read from its other side."""
    v = torch.nn.functional.normalize(V, dim=-1)
    k = K.repeat_interleave(2, 2)
    _, turned = F.kimi_delta_attention(v, v, k, G[..., :5], BETA)
    o, state = F.gated_oja_rule(Q, K, v, G[..., :5], BETA)
    torch.testing.assert_close(state, turned.mT)
    read = torch.einsum("bhkv,bhk->bhv", state, Q[:, -1].repeat_interleave(2, 1)) * 8**-0.5
    torch.testing.assert_close(o[:, -1], read)


def test_reflections():
    """Beta = 2 and unit keys give an orthogonal transition, and two of them a rotation."""
    turn = torch.tensor([[1.0, 0.0], [2**-0.5, 2**-0.5]], dtype=torch.float64)
    k, v = turn.view(1, 1, 2, 1, 2), torch.zeros(1, 1, 2, 1, 2, dtype=torch.float64)
    state = torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2)
    beta = torch.full((1, 1, 2, 1), 2.0, dtype=torch.float64)
    _, after = F.gated_delta_product(k[:, :, 0], k, v, None, beta, initial_state=state)
    torch.testing.assert_close(after[0, 0], torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double())


@pytest.mark.parametrize("decayed", [False, True])
def test_comba_erases_one_of_two_states(decayed):
    q, k, v, p = Q[:1, :3, :1], K[:1, :3, :1], V[:1, :3, :1], P[:1, :3, :1]
    g, beta = G[:1, :3, :1, 0], BETA[:1, :3, :1]
    s, out = torch.zeros(8, 5).double(), []
    for t in range(3):
        before, s = s, g[0, t, 0].exp() * s
        u = v[0, t, 0] - (s if decayed else before).T @ p[0, t, 0]
        s = s + beta[0, t, 0] * torch.outer(k[0, t, 0], u)
        out.append(8**-0.5 * s.T @ q[0, t, 0])
    o, state = F.comba(q, k, v, p, g, beta, erase_decayed=decayed)
    torch.testing.assert_close(o[0, :, 0], torch.stack(out))
    torch.testing.assert_close(state[0, 0], s)


@pytest.mark.parametrize("channels", [False, True])
def test_preconditioner(channels):
    """Token by token, for one head; fla's definitions have the same formula."""
    q, k, v = Q[0, :5, 0], K[0, :5, 0], V[0, :5, 1]
    g, beta = G[0, :5, 1, :] if channels else G[0, :5, 1, :1], BETA[0, :5, 1]
    (decay, added), scale = (t[0, :5, 0] for t in ATK), torch.tensor([-2.0]).double()
    a, s, out = torch.zeros(8).double(), torch.zeros(8, 5).double(), []
    for t in range(5):
        a = decay[t].exp() * a + added[t] * k[t] ** 2
        r = torch.log(a + 1e-4) - scale
        m = torch.exp(-torch.log(torch.tensor(1.7).double()) * r / (1 + abs(r)))
        s = g[t, :, None].exp() * s
        s = s + beta[t] * torch.outer(m * k[t], v[t] - s.T @ k[t])
        out.append(8**-0.5 * s.T @ q[t])
    given = (q, k, v, g if channels else g[:, 0], beta, decay, added)
    given = [t[None, :, None] for t in given]
    o, (state, squares) = F.preconditioned_delta_rule(*given, scale, x=1.7, eps=1e-4)
    torch.testing.assert_close(o[0, :, 0], torch.stack(out))
    torch.testing.assert_close((state[0, 0], squares[0, 0]), (s, a))


def test_no_preconditioner():
    """With x = 1 the rule is that of `gated_delta_rule`."""
    found, _ = F.preconditioned_delta_rule(Q, K, V, G[..., 0], BETA, *ATK, x=1.0)
    torch.testing.assert_close(found, F.gated_delta_rule(Q, K, V, G[..., 0], BETA)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_state_continues(name, backend):
    function, tokens = CALLS[name]
    o, final = function(*tokens, backend=backend)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 18, 19, 21)):
        part, state = function(*(t[:, a:b] for t in tokens), initial_state=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_a_step(name):
    """Gradients of a call and a step after it are those of one call."""
    function, tokens = CALLS[name]
    leaves = [t.clone().requires_grad_() for t in tokens]
    expected = torch.autograd.grad(function(*leaves)[0].square().sum(), leaves)
    first, state = function(*(t[:, :-1] for t in leaves))
    last, _ = function(*(t[:, -1:] for t in leaves), initial_state=state)
    found = torch.autograd.grad(torch.cat((first, last), 1).square().sum(), leaves)
    torch.testing.assert_close(found, expected)


ONE = torch.ones(1, 2, 1, 4)
TWO = torch.ones(1, 2, 2, 1, 4)
BETAS = torch.ones(1, 2, 1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: F.gated_delta_product(ONE, ONE, TWO, None, BETAS),
            ValueError,
            r"gated_delta_product: k must have shape \(B, T, n, H, K\) with n >= 1",
        ),
        (
            lambda: F.gated_delta_product(ONE, TWO[:, :, :0], TWO, None, BETAS),
            ValueError,
            "gated_delta_product: k must have shape .* with n >= 1",
        ),
        (
            lambda: F.gated_delta_product(ONE, TWO, TWO[:, :, :1], None, BETAS),
            ValueError,
            "gated_delta_product: v must have shape .* with B, T and n of k",
        ),
        (
            lambda: F.gated_delta_product(ONE, TWO, TWO, BETAS, BETAS),
            ValueError,
            r"gated_delta_product: beta must have shape \(1, 2, 2, 1\)",
        ),
        (
            lambda: F.gated_delta_product(ONE, TWO, TWO, BETAS, TWO[..., 0]),
            ValueError,
            "gated_delta_product: g must be <= 0",
        ),
        (
            lambda: F.gated_delta_product(ONE, TWO.double(), TWO, None, TWO[..., 0]),
            TypeError,
            "gated_delta_product: k must",
        ),
        (
            lambda: F.comba(ONE, ONE, ONE, ONE[..., :2], -BETAS, BETAS),
            ValueError,
            r"comba: p must have shape \(1, 2, 1, 4\)",
        ),
        (
            lambda: F.comba(ONE, ONE, ONE, ONE, -BETAS, BETAS, erase_decayed=1),
            TypeError,
            "comba: erase_decayed must be",
        ),
        (
            lambda: F.gated_oja_rule(ONE, ONE, ONE, ONE, BETAS),
            ValueError,
            "gated_oja_rule: gv must be <= 0",
        ),
        (
            lambda: F.gated_delta_rule_2(ONE, ONE, ONE, ONE, ONE, ONE),
            ValueError,
            "gated_delta_rule_2: g must be <= 0",
        ),
        (
            lambda: F.gated_delta_rule_2(ONE, ONE, ONE, -ONE, ONE, ONE[..., :2]),
            ValueError,
            "gated_delta_rule_2: w must have shape",
        ),
        (
            lambda: F.preconditioned_delta_rule(ONE, ONE, ONE, -BETAS, BETAS, BETAS, BETAS),
            ValueError,
            "preconditioned_delta_rule: g_atk must be <= 0",
        ),
        (
            lambda: F.preconditioned_delta_rule(ONE, ONE, ONE, *[-BETAS, BETAS] * 2, x=0.5),
            ValueError,
            "preconditioned_delta_rule: x must be",
        ),
        (
            lambda: F.preconditioned_delta_rule(
                *(ONE, ONE, ONE, *[-BETAS, BETAS] * 2), initial_state=ONE
            ),
            TypeError,
            r"preconditioned_delta_rule: initial_state must be a tuple \(S, A\)",
        ),
        (
            lambda: F.preconditioned_delta_rule(
                *(ONE, ONE, ONE, *[-BETAS, BETAS] * 2, torch.ones(2))
            ),
            ValueError,
            r"preconditioned_delta_rule: log_atk_scale must have shape \(1,\)",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
