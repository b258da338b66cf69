"""Routers and capacity: values of the papers, gradients, ties."""

import math

import pytest
import torch
from routing_cases import F64, logits

import omniattn.functional as F


def test_weights_of_the_softmax_routers():
    g = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert F.softmax_top_k(g, 2).experts.tolist() == [[0, 1]]
    torch.testing.assert_close(F.softmax_top_k(g, 2).weights, g.softmax(-1)[:, :2])
    expected = torch.tensor([[2.0, 1.0]]).softmax(-1)
    torch.testing.assert_close(F.softmax_top_k(g, 2, renormalize=True).weights, expected)
    torch.testing.assert_close(F.top_k_softmax(g, 2).weights, expected)
    torch.testing.assert_close(F.softmax_top_k(g, 1, scale=3).weights, 3 * g.softmax(-1)[:, :1])


def test_equal_scores_go_to_the_smaller_expert():
    for route in (F.softmax_top_k, F.top_k_softmax, F.sigmoid_top_k):
        assert route(torch.zeros(2, 7), 3).experts.tolist() == [[0, 1, 2]] * 2


def test_only_the_best_groups_take_part():
    # Softmax ranks groups by their best member, the sigmoid router by the sum of their two best.
    g = torch.tensor([[3.0, -5.0, 2.0, 2.0, 1.0, 1.0]])
    assert F.softmax_top_k(g, 2, groups=3, top_groups=1).experts.tolist() == [[0, 1]]
    assert F.sigmoid_top_k(g, 2, groups=3, top_groups=1).experts.tolist() == [[2, 3]]
    negative = torch.tensor([-2.0, -2.0, -2.0, -2.0, -9.0, -9.0])
    assert F.sigmoid_top_k(g, 2, bias=negative, groups=3, top_groups=1).experts.tolist() == [[2, 3]]


def test_bias_steers_the_choice_and_not_the_weights():
    g, bias = logits(), torch.linspace(-1, 1, 8, dtype=F64).requires_grad_()
    routing = F.sigmoid_top_k(g, 3, bias=bias, scale=2.5)
    chosen = g.sigmoid().gather(-1, routing.experts)
    torch.testing.assert_close(routing.weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))
    assert not routing.weights.requires_grad
    counts = F.expert_counts(routing.experts, 8)
    F.update_router_bias(bias.data, counts, 0.01)
    sign = (counts.double().mean() - counts).sign()
    torch.testing.assert_close(bias.data, torch.linspace(-1, 1, 8, dtype=F64) + 0.01 * sign)


@pytest.mark.parametrize(
    "route",
    [
        lambda g: F.llama4_top_k(g, 2).weights,
        lambda g: F.softmax_top_k(g, 3).weights,
        lambda g: F.softmax_top_k(g, 3, renormalize=True).weights,
        lambda g: F.top_k_softmax(g, 3).weights,
        lambda g: F.sigmoid_top_k(g, 3, groups=4, top_groups=2).weights,
        lambda g: F.expert_choice(g, 3).weights,
        lambda g: F.noisy_top_k(g, g.flip(-1), 2, seed=torch.tensor([3, 1]))[1],
        lambda g: F.router_z_loss(g),
    ],
)
def test_gradients_are_those_of_the_formula(route):
    assert torch.autograd.gradcheck(route, logits(5).requires_grad_())


def test_llama4_chooses_by_logits_that_its_sigmoid_cannot_tell_apart():
    g = torch.tensor([[90.0, 100.0, 95.0]])
    routing = F.llama4_top_k(g, 2)
    assert routing.experts.tolist() == [[1, 2]] and routing.weights.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("renormalize", "scale"), [(False, 1.0), (True, 3.0)])
def test_default_vectors_stand_in_for_the_experts_that_were_not_chosen(renormalize, scale):
    g, vectors = logits().requires_grad_(), torch.randn(8, 3, dtype=F64)
    outputs, grad = torch.randn(12, 2, 3, dtype=F64), torch.randn(12, 3, dtype=F64)
    options = {"renormalize": renormalize, "scale": scale, "router_grad": "default_vector"}
    routing = F.softmax_top_k(g, 2, **options)
    dropped = routing.experts.clone()
    dropped[0], dropped[1, 0] = -1, -1  # a token of padding, and one that lost an expert
    weights = routing.weights.masked_fill(dropped < 0, 0.0)
    routing = routing._replace(experts=dropped, weights=weights)
    plain = (outputs * weights[..., None]).sum(1)
    y = F.default_vector_gradient(plain, routing, vectors, scale=scale)
    assert torch.equal(y, plain)
    (dp,) = torch.autograd.grad(y, routing.scores, grad)
    for token in range(12):
        for e in range(8):
            slot = (dropped[token] == e).nonzero()
            given = outputs[token, slot[0, 0]] if len(slot) else vectors[e]
            expected = scale * grad[token] @ given if token else 0.0
            assert dp[token, e].item() == pytest.approx(float(expected))


def test_default_vectors_follow_the_mean_output_of_each_expert():
    vectors = torch.ones(4, 2)
    outputs = torch.arange(12.0).view(3, 2, 2)
    index = torch.tensor([[0, 2], [2, -1], [2, 0]])
    F.update_default_vectors(vectors, outputs, index, decay=0.75)
    for e in range(4):
        rows = outputs[index == e]
        expected = 0.75 + 0.25 * rows.mean(0) if len(rows) else torch.ones(2)
        torch.testing.assert_close(vectors[e], expected)


@pytest.mark.parametrize("scale", [1.0, 16.0])
@pytest.mark.parametrize("renormalize", [False, True])
def test_straight_through_gradients(renormalize, scale):
    g, outputs = logits().requires_grad_(), torch.randn(12, 8, dtype=F64)

    def grads(router_grad):
        routing = F.softmax_top_k(
            g, 2, renormalize=renormalize, scale=scale, router_grad=router_grad
        )
        y = (routing.weights * outputs.gather(-1, routing.experts)).sum()
        return y, torch.autograd.grad(y, g)[0]

    p, index = scale * g.softmax(-1), F.softmax_top_k(g, 2).experts
    sparse = torch.zeros_like(outputs).scatter(-1, index, outputs.gather(-1, index))
    exact, ste, dense = (grads(kind) for kind in ("exact", "ste", "ste_dense"))
    torch.testing.assert_close(ste[0], exact[0])
    torch.testing.assert_close(dense[0], exact[0])
    torch.testing.assert_close(
        ste[1], torch.autograd.grad((p * sparse).sum(), g, retain_graph=True)[0]
    )
    torch.testing.assert_close(dense[1], torch.autograd.grad((p * outputs).sum(), g)[0])
    assert torch.allclose(ste[1], exact[1]) is not renormalize


def test_dense_straight_through_trains_no_unselected_expert():
    g, x = logits(6, 4).requires_grad_(), torch.randn(6, 3, dtype=F64)
    up = torch.randn(4, 10, 3, dtype=F64, requires_grad=True)
    down = torch.randn(4, 3, 5, dtype=F64, requires_grad=True)
    routing = F.softmax_top_k(g, 1, router_grad="ste_dense")
    sparse = F.softmax_top_k(g, 1)
    dense_y = F.moe_experts(x, routing.experts, routing.weights, up, down)
    sparse_y = F.moe_experts(x, sparse.experts, sparse.weights, up, down)
    torch.testing.assert_close(dense_y, sparse_y)
    for a, b in zip(
        *(torch.autograd.grad(y.sum(), (up, down)) for y in (dense_y, sparse_y)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_noisy_gate():
    g = logits(500)
    seed = torch.tensor([7, 0])
    routing, load = F.noisy_top_k(g, torch.zeros_like(g), 2, seed=seed)
    again, _ = F.noisy_top_k(g, torch.zeros_like(g), 2, seed=seed)
    assert torch.equal(routing.experts, again.experts)
    quiet, _ = F.noisy_top_k(g, torch.zeros_like(g), 2)
    assert 0.2 < (routing.experts == quiet.experts).double().mean() < 0.95
    counts = F.expert_counts(routing.experts, 8)
    assert (load - counts).abs().max() < 5 * math.sqrt(500) * 0.5
    torch.testing.assert_close(load.sum(), torch.tensor(1000.0, dtype=F64), rtol=0.1, atol=0)
    everyone, load = F.noisy_top_k(g, g, 8, seed=seed)
    assert load.tolist() == [500.0] * 8 and everyone.experts.shape == (500, 8)


@pytest.mark.parametrize("seed", [None, torch.tensor([7, 0])])
def test_load_of_the_noisy_gate_counts_no_padding(seed):
    g, noise, mask = logits(9), logits(9, seed=1), torch.arange(9) < 5
    loads = [F.noisy_top_k(g[row], noise[row], 3, seed=seed)[1] for row in range(5)]
    if seed is None:  # the noise of a token depends on its place
        padded = F.noisy_top_k(g, noise, 3, seed=seed, token_mask=mask)[1]
        torch.testing.assert_close(padded, torch.stack(loads).sum(0))
    changed = [torch.where(mask[:, None], t, 7.0) for t in (g, noise)]
    padded = [
        F.noisy_top_k(*pair, k, seed=seed, token_mask=mask)[1]
        for k in (3, 8)
        for pair in ((g, noise), changed)
    ]
    assert torch.equal(padded[0], padded[1]) and torch.equal(padded[2], padded[3])
    assert padded[3].tolist() == [5.0] * 8


def test_a_noise_that_died_out_has_a_load_and_a_gradient():
    g = torch.tensor([[3.0, 1.0, 1.0]])
    for value in (-200.0, -80.0, -45.0):
        noise = torch.full((1, 3), value, requires_grad=True)
        load = F.noisy_top_k(g, noise, 1, seed=torch.tensor([1, 0]))[1]
        torch.testing.assert_close(load, torch.tensor([1.0, 0.0, 0.0]))
        assert torch.autograd.grad(load @ load, noise)[0].isfinite().all()


def test_importance_is_the_sum_of_an_experts_weights():
    routing = F.top_k_softmax(logits().requires_grad_(), 2)
    kept = F.drop_over_capacity(routing, 2)[0]
    weights = kept.weights.detach()
    expected = torch.stack([weights[kept.experts == e].sum() for e in range(8)])
    torch.testing.assert_close(F.expert_importance(kept), expected)
    assert F.expert_importance(kept).requires_grad


def test_expert_choice_fills_every_expert():
    g = logits(4 * 10, 5).view(4, 10, 5)
    routing = F.expert_choice(g, 3)
    for sequence, p in zip(routing.experts, g.softmax(-1), strict=True):
        assert F.expert_counts(sequence, 5).tolist() == [3] * 5
        for e in range(5):
            tokens = (sequence[:, e] == e).nonzero()[:, 0]
            assert set(tokens.tolist()) == set(p[:, e].topk(3).indices.tolist())


def test_no_expert_chooses_padding():
    g = logits(10, 5)
    mask = torch.arange(10) < 4
    for capacity in (3, 6):  # below and above the number of real tokens
        hidden = F.expert_choice(g, capacity, token_mask=mask)
        short = F.expert_choice(g[:4], min(capacity, 4))
        assert torch.equal(hidden.experts[:4], short.experts)
        assert (hidden.experts[4:] == -1).all() and (hidden.weights[4:] == 0).all()


@pytest.mark.parametrize("by_priority", [False, True])
def test_capacity_against_a_loop(by_priority):
    g = logits(40, 5).view(2, 20, 5)
    routing = F.softmax_top_k(g, 3)
    priority = g.softmax(-1).amax(-1) if by_priority else None
    for capacity in (0, 1, 7, 20):
        kept, dropped = F.drop_over_capacity(routing, capacity, priority=priority)
        expected = routing.experts.clone()
        for s in range(2):
            order = range(20)
            if by_priority:
                order = sorted(order, key=lambda n, s=s: -priority[s, n].item())
            taken = [0] * 5
            for slot in range(3):
                for n in order:
                    e = routing.experts[s, n, slot].item()
                    if taken[e] == capacity:
                        expected[s, n, slot] = -1
                    else:
                        taken[e] += 1
        assert torch.equal(kept.experts, expected)
        assert dropped == (expected < 0).sum()
        assert torch.equal(kept.weights, routing.weights.masked_fill(expected < 0, 0))
    assert F.expert_capacity(100, 8, 2, 1.0) == 25
    assert F.expert_capacity(100, 8, 2, 0.0, least=4) == 4
    assert F.expert_capacity(3, 2, 2, 9.0) == 3


def test_groups_may_have_capacities_of_their_own():
    g = torch.stack([logits(9, seed=seed) for seed in range(3)])
    tokens = torch.tensor([0, 4, 9])
    assert F.expert_capacity(tokens, 8, 2, 1e308).tolist() == [0, 4, 9]
    assert F.expert_capacity(10**18, 8, 2, 1e300) == 10**18
    capacity = F.expert_capacity(tokens, 8, 2, 1.25)
    assert capacity.tolist() == [F.expert_capacity(n, 8, 2, 1.25) for n in (0, 4, 9)]
    routing = F.softmax_top_k(g, 2)
    dropped, count = F.drop_over_capacity(routing, capacity)
    chosen = F.expert_choice(g, capacity)
    counts = 0
    for i, limit in enumerate(capacity.tolist()):
        one, number = F.drop_over_capacity(F.Routing(*(t[i] for t in routing)), limit)
        assert torch.equal(dropped.experts[i], one.experts)
        assert torch.equal(chosen.experts[i], F.expert_choice(g[i], limit).experts)
        counts += number
    assert count == counts > 0


def test_second_choice_is_dropped_by_its_weight():
    weights = torch.tensor([[0.9, 0.1], [0.6, 0.4]]).repeat(4000, 1)
    routing = F.Routing(torch.tensor([0, 1]).expand(8000, 2), weights, weights)
    kept = F.drop_second_at_random(routing, torch.tensor([5, 0]))
    assert (kept.experts[:, 0] == 0).all()
    for first, rate in ((0, 0.2), (1, 0.8)):
        assert abs((kept.experts[first::2, 1] == 1).float().mean() - rate) < 0.03


def test_jitter_stays_within_its_bounds():
    x = torch.full((5000,), 2.0)
    y = F.router_jitter(x, 0.01, torch.tensor([1, 2]))
    assert y.min() >= 2 * 0.99 and y.max() <= 2 * 1.01 and y.std() > 0.01
    assert torch.equal(y, F.router_jitter(x, 0.01, torch.tensor([1, 2])))
