"""Losses of routers: values of the papers, padding, empty batches."""

import math

import pytest
import torch
from routing_cases import logits

import omniattn.functional as F


def test_balance_losses():
    g = logits(30)
    routing = F.softmax_top_k(g, 2)
    p, index = routing.scores, routing.experts
    n, k, experts = 30, 2, 8
    mean = p.mean(0)
    counts = torch.stack([(index == e).sum() for e in range(experts)]).double()
    first = torch.stack([(index[:, 0] == e).sum() for e in range(experts)]).double()
    base = (counts / n * mean).sum()
    expected = {
        "switch": experts * base,
        "seed": base,
        "gshard": (first / n * mean).sum() / experts,
        "deepseek_v2": experts / k * base,
    }
    for kind, value in expected.items():
        torch.testing.assert_close(F.load_balance_loss(p, index, kind=kind), value)
    f = experts / (k * n) * counts
    device = sum(f[d : d + 2].mean() * mean[d : d + 2].sum() for d in range(0, 8, 2))
    options = {"groups": 4, "top_groups": 3}
    ours = F.load_balance_loss(p, index, kind="deepseek_v2_device", **options)
    torch.testing.assert_close(ours, device)
    sent = [sum(bool((row // 2 == d).any()) for row in index) for d in range(4)]
    communication = sum(4 / (3 * n) * sent[d] * mean[2 * d : 2 * d + 2].sum() for d in range(4))
    ours = F.load_balance_loss(p, index, kind="deepseek_v2_communication", **options)
    torch.testing.assert_close(ours, communication)
    s = g.sigmoid().view(3, 10, 8)
    each = []
    for scores, chosen in zip(s, index.view(3, 10, 2), strict=True):
        fraction = torch.stack([(chosen == e).sum() for e in range(8)]) * experts / (k * 10)
        each.append((fraction * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum())
    ours = F.load_balance_loss(s, index.view(3, 10, 2), kind="deepseek_v3")
    torch.testing.assert_close(ours, torch.stack(each).mean())


def test_losses_of_half_scores_are_computed_in_float32():
    p = logits(3000).softmax(-1).bfloat16()
    index = F.top_k(p, 2)[1]
    for kind in F.routing.BALANCE_LOSSES:
        low, high = (F.load_balance_loss(t, index, kind=kind) for t in (p, p.float()))
        assert torch.equal(low, high)
    values = torch.rand(8).bfloat16()
    assert torch.equal(F.cv_squared(values), F.cv_squared(values.float()))


def test_padding_is_in_no_statistic():
    g = logits(30)
    mask = torch.arange(30) < 20
    routing = F.softmax_top_k(g, 2)
    index = routing.experts.masked_fill(~mask[:, None], -1)
    short = F.softmax_top_k(g[:20], 2)
    for kind in ("switch", "gshard", "deepseek_v2"):
        torch.testing.assert_close(
            F.load_balance_loss(routing.scores, index, kind=kind, token_mask=mask),
            F.load_balance_loss(short.scores, short.experts, kind=kind),
        )
    torch.testing.assert_close(F.router_z_loss(g, token_mask=mask), F.router_z_loss(g[:20]))


@pytest.mark.parametrize("kind", F.routing.BALANCE_LOSSES)
def test_no_tokens_give_no_loss(kind):
    for shape in ((0, 8), (2, 0, 8), (0, 3, 8)):
        routing = F.softmax_top_k(torch.zeros(shape), 2)
        assert F.load_balance_loss(routing.scores, routing.experts, kind=kind) == 0
        assert F.router_z_loss(torch.zeros(shape)) == 0


@pytest.mark.parametrize("kind", F.routing.BALANCE_LOSSES)
def test_losses_of_one_token_and_of_scores_that_are_zero(kind):
    g = logits(1)
    one, row = F.softmax_top_k(g[0], 2), F.softmax_top_k(g, 2)
    expected = F.load_balance_loss(row.scores, row.experts, kind=kind)
    assert F.load_balance_loss(one.scores, one.experts, kind=kind) == expected
    g = torch.full((3, 8), -300.0, requires_grad=True)  # whose sigmoid is 0
    routing = F.sigmoid_top_k(g, 2)
    loss = F.load_balance_loss(routing.scores, routing.experts, kind=kind)
    assert loss == 0 and not torch.autograd.grad(loss, g)[0].any()


def test_uniform_values():
    routing = F.softmax_top_k(torch.zeros(16, 8), 2)
    index = torch.arange(32).view(16, 2) % 8
    assert math.isclose(F.load_balance_loss(routing.scores, index).item(), 2, rel_tol=1e-6)
    assert math.isclose(F.load_balance_loss(routing.scores, index, kind="seed").item(), 0.25)
    z = F.router_z_loss(torch.tensor([[2.0, 1.0, 0.0, -1.0]]))
    assert math.isclose(z.item(), 5.9546, abs_tol=1e-3)
    assert F.cv_squared(torch.ones(4)) == 0
