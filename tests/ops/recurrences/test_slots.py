"""Memories of slots and LightNet: the public definitions, weights of any size, states, errors."""

import functools
import itertools
import math

import pytest
import torch
from recurrence_cases import decays, draw

from omniattn import functional as F

BACKENDS = [None, "reference"]
Q, K, V = draw(2, 21, 4, 8), draw(2, 21, 2, 8, seed=1), draw(2, 21, 2, 5, seed=2)
G, S = decays(2, 21, 2, 6), draw(2, 21, 2, 6, seed=4)
SHARES = 1 - G.exp()
FLOW = (Q[:, :, :2], K, V, decays(2, 21, 2), *(draw(2, 21, 2, seed=n).sigmoid() for n in (6, 7)))
READOUT = draw(2, 5, 5, seed=8)
#: Function, tensors by token.
CALLS = {
    "gsa": (F.gated_slot_attention, (Q, K, V, SHARES, G)),
    "abc": (F.abc_attention, (Q, K, V, S)),
    "cyfa": (functools.partial(F.cyclic_flow_attention, readout=READOUT), FLOW),
    "lightnet": (F.lightnet_attention, (K, Q[:, :, :2], draw(2, 21, 4, 5, seed=5))),
}


def pairs(k, v, weights):
    """Softmax attention to slots, which are sums over past tokens with weights (B, H, i, j, M)."""
    k, v, weights = (t.repeat_interleave(2, dim) for t, dim in ((k, 2), (v, 2), (weights, 1)))
    keys = torch.einsum("bhijm,bjhk->bihmk", weights, k)
    values = torch.einsum("bhijm,bjhv->bihmv", weights, v)
    share = torch.einsum("bihk,bihmk->bihm", Q, keys * 8**-0.5).softmax(-1)
    return torch.einsum("bihm,bihmv->bihv", share, values)


SEEN = torch.ones(21, 21, dtype=torch.bool).tril()[..., None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_over_pairs_of_tokens(backend):
    total = G.cumsum(1).transpose(1, 2)
    gap = total[:, :, :, None] - total[:, :, None]
    weights = gap.masked_fill(~SEEN, -torch.inf).exp() * SHARES.transpose(1, 2)[:, :, None]
    o = F.gated_slot_attention(Q, K, V, SHARES, G, backend=backend)[0]
    torch.testing.assert_close(o, pairs(K, V, weights))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 1000])
def test_means_of_past_tokens(backend, size):
    """The formula of the paper, with logits of slots that grow or fall by thousands, too."""
    logits = size * S.transpose(1, 2)[:, :, None].expand(-1, -1, 21, -1, -1)
    weights = logits.masked_fill(~SEEN, -torch.inf).softmax(3)
    o = F.abc_attention(Q, K, V, size * S, backend=backend)[0]
    torch.testing.assert_close(o, pairs(K, V, weights))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 1000])
def test_lightnet(backend, size):
    q, k, v = CALLS["lightnet"][1]
    logits = size * k.transpose(1, 2)[:, :, None].expand(-1, -1, 21, -1, -1)
    weights = logits.masked_fill(~SEEN, -torch.inf).softmax(3)
    scores = torch.einsum("bihk,bhijk->bhij", q, weights).repeat_interleave(2, 1) * 8**-0.5
    o = F.lightnet_attention(q, size * k, v, backend=backend)[0]
    torch.testing.assert_close(o, torch.einsum("bhij,bjhv->bihv", scores, v))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("speed", [1, 10])
def test_slots_of_relative_time(backend, speed):
    """The formula over pairs of tokens: pulses at their distance, which go around the circle."""
    q, k, v, g, delta, beta = FLOW
    o, _ = F.cyclic_flow_attention(q, k, v, g, speed * delta, beta, READOUT, backend=backend)
    distance, total = (
        t.cumsum(1).transpose(1, 2)[..., None] - t.cumsum(1).transpose(1, 2)[:, :, None]
        for t in (speed * delta, g)
    )
    places = torch.arange(5) - distance[..., None]
    pulses = (1 + sum(2 * torch.cos(2 * math.pi / 5 * n * places) for n in (1, 2))) / 5
    weights = total[..., None].masked_fill(~SEEN, -torch.inf).exp() * pulses
    weights = weights * beta.transpose(1, 2)[:, :, None, :, None]
    keys = torch.einsum("hrm,bhijm,bjhk->bihrk", READOUT, weights, k)
    values = torch.einsum("hrm,bhijm,bjhv->bihrv", READOUT, weights, v)
    share = torch.einsum("bihk,bihrk->bihr", q, keys * 8**-0.5).softmax(-1)
    torch.testing.assert_close(o, torch.einsum("bihr,bihrv->bihv", share, values))


def test_clocks_keep_their_place_after_many_tokens():
    """Sums in fp32 would be wrong by a hundredth of a slot."""
    token = [t[:1, :1].float().expand(1, 200_000, *t.shape[2:]) for t in FLOW]
    token[3], token[4] = token[3] * 0 - 1, token[4] * 0 + 0.9
    _, state = F.cyclic_flow_attention(*token, READOUT.float())
    turns = float(token[4][0, 0, 0].double()) * 200_000
    torch.testing.assert_close(state[2], torch.full((1, 2), turns % 5), rtol=0, atol=1e-4)


def test_gates_of_abc():
    """ABC is gated slot attention with gates that follow from the sums of weights."""
    z = S.logcumsumexp(1)
    g = torch.cat((z[:, :1], z[:, :-1]), 1) - z
    o, (keys, values) = F.gated_slot_attention(Q, K, V, (S - z).exp(), g)
    found, (sum_k, sum_v, n, m) = F.abc_attention(Q, K, V, S)
    torch.testing.assert_close(found, o)
    torch.testing.assert_close(sum_k / n[..., None, :], keys)
    torch.testing.assert_close(sum_v / n[..., None], values)
    torch.testing.assert_close(m + n.log(), z[:, -1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_state_continues(name, backend):
    function, tokens = CALLS[name]
    o, final = function(*tokens, backend=backend)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 0, 1, 1, 18, 19, 21)):
        part, state = function(*(t[:, a:b] for t in tokens), initial_state=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("name", CALLS)
def test_packed_sequences(name):
    """Sequences without tokens keep their state, or have an empty one."""
    function, tokens = CALLS[name]
    row = [t[:1] for t in tokens]
    bounds = (0, 0, 5, 20, 20, 21)
    o, final = function(*row, cu_seqlens=torch.tensor(bounds))
    after = function(*row, cu_seqlens=torch.tensor(bounds), initial_state=final)
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        part = [t[:, a:b] for t in row]
        alone, state = function(*part)
        torch.testing.assert_close(o[:, a:b], alone)
        torch.testing.assert_close([t[n : n + 1] for t in final], list(state))
        alone, state = function(*part, initial_state=state)
        torch.testing.assert_close(after[0][:, a:b], alone)
        torch.testing.assert_close([t[n : n + 1] for t in after[1]], list(state))


@pytest.mark.parametrize("size", [9, 20])
@pytest.mark.parametrize("name", ["abc", "cyfa", "lightnet"])
def test_gradients_through_states(name, size):
    """Gradients of two calls are those of one, although m has none."""
    function, tokens = CALLS[name]
    leaves = [t.clone().requires_grad_() for t in tokens]
    expected = torch.autograd.grad(function(*leaves)[0].square().sum(), leaves)
    first, state = function(*(t[:, :size] for t in leaves))
    last, _ = function(*(t[:, size:] for t in leaves), initial_state=state)
    found = torch.autograd.grad(torch.cat((first, last), 1).square().sum(), leaves)
    torch.testing.assert_close(found, expected)


ONE = torch.ones(1, 2, 1, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: F.gated_slot_attention(ONE, ONE, ONE, ONE, ONE),
            ValueError,
            "gated_slot_attention: g must be <= 0",
        ),
        (
            lambda: F.gated_slot_attention(ONE, ONE, ONE, ONE, -ONE[..., :2]),
            ValueError,
            r"gated_slot_attention: g must have shape \(1, 2, 1, 4\)",
        ),
        (
            lambda: F.gated_slot_attention(ONE, ONE.expand(1, 2, 2, 4), ONE, ONE, -ONE),
            ValueError,
            "gated_slot_attention: k must have shape .* H a divisor of its heads",
        ),
        (
            lambda: F.gated_slot_attention(ONE, ONE, ONE[:, :1], ONE, -ONE),
            ValueError,
            "gated_slot_attention: v must have shape .* with B, T and H of k",
        ),
        (
            lambda: F.gated_slot_attention(ONE, ONE, ONE, ONE.double(), -ONE),
            TypeError,
            "gated_slot_attention: s must",
        ),
        (
            lambda: F.gated_slot_attention(ONE, ONE, ONE, ONE, -ONE, initial_state=ONE),
            TypeError,
            r"initial_state must be a tuple \(K, V\), got type\(initial_state\)=Tensor",
        ),
        (
            lambda: F.abc_attention(ONE, ONE, ONE, ONE, initial_state=(ONE, ONE)),
            TypeError,
            r"abc_attention: initial_state must be a tuple \(K, V, n, m\), got len.*=2",
        ),
        (
            lambda: F.abc_attention(ONE, ONE, ONE, ONE[:, :, 0]),
            ValueError,
            "abc_attention: s must have shape",
        ),
        (
            lambda: F.cyclic_flow_attention(*[ONE] * 3, *[-ONE[..., 0]] * 3, torch.ones(1, 4, 4)),
            ValueError,
            r"cyclic_flow_attention: readout must have shape \(H, P, P\) with odd P, got",
        ),
        (
            lambda: F.cyclic_flow_attention(*[ONE] * 3, *[-ONE[..., 0]] * 3, torch.ones(1, 3, 5)),
            ValueError,
            r"cyclic_flow_attention: readout must have shape \(1, 5, 5\)",
        ),
        (
            lambda: F.cyclic_flow_attention(*[ONE] * 3, *[-ONE] * 3, torch.ones(1, 3, 3)),
            ValueError,
            r"cyclic_flow_attention: g must have shape \(1, 2, 1\)",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
