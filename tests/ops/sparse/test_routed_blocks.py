"""Attention to blocks that a learned router selects: loops, its three gradients, its errors."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from omniattn.functional import attention, moba_attention, routed_block_attention
from omniattn.models.presets import TRAINED
from omniattn.modules import RoutedBlockAttention


def normal(*shape: int) -> torch.Tensor:
    seed = sum(n * 7**i for i, n in enumerate(shape))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TQ, TK, SIZE, ROWS, HEADS = 20, 26, 6, 2, 4


def tensors() -> list[torch.Tensor]:
    """q, k, v, router_q of each list of 2 queries and group of 2 heads, router_k of each block."""
    shapes = ((1, TQ, HEADS, 8), (1, TK, 2, 8), (1, TK, 2, 3), (1, 10, 2, 5), (1, 5, 1, 5))
    return [normal(*shape).requires_grad_() for shape in shapes]


def chosen_blocks(router_q: torch.Tensor, router_k: torch.Tensor, topk: int, i: int, h: int):
    """Returns the own block of query i and head h, the earlier blocks it chooses, and the scores r
    of all blocks."""
    own = (i + TK - TQ) // SIZE
    r = router_k[0, :, 0] @ router_q[0, i // ROWS, h // 2] / math.sqrt(5)
    best = sorted(range(own), key=lambda n: -float(r[n].detach()))[: topk - 1]
    return own, best, r


@pytest.mark.parametrize("grad", ["none", "gate"])
def test_routed_blocks_are_the_loop_over_queries(grad: str) -> None:
    q, k, v, router_q, router_k = given = tensors()
    sizes = {"block_size": SIZE, "query_block": ROWS, "topk": 3}
    out = routed_block_attention(*given, **sizes, router_grad=grad)
    rows = []
    for i in range(TQ):
        for h in range(HEADS):
            own, best, r = chosen_blocks(router_q, router_k, 3, i, h)
            keys = [j for j in range(i + TK - TQ + 1) if j // SIZE in (*best, own)]
            logits = k[0, keys, h // 2] @ q[0, i, h] / math.sqrt(8)
            if grad == "gate":
                blocks = torch.tensor([j // SIZE for j in keys])
                logits = logits + torch.where(blocks < own, r.sigmoid().log()[blocks], 0.0)
            rows.append(logits.softmax(0) @ v[0, keys, h // 2])
    want = torch.stack(rows).view(1, TQ, HEADS, 3)
    torch.testing.assert_close(out, want)
    weight = normal(*out.shape)
    trained = given if grad == "gate" else given[:3]
    got = torch.autograd.grad((out * weight).sum(), trained)
    torch.testing.assert_close(got, torch.autograd.grad((want * weight).sum(), trained))
    if grad == "gate":
        assert all(g.abs().max() > 0 for g in got)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("grad", ["none", "gate"])
def test_routed_blocks_are_causal_with_means_of_keys(grad: str, backend: str | None) -> None:
    """A query does not read the mean of its own block, which holds keys after it."""
    q, k, v = (normal(1, 12, 2, size) for size in (8, 8, 3))

    def out(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        means = k.unflatten(1, (3, 4)).mean(2)
        sizes = {"block_size": 4, "topk": 2, "router_grad": grad, "backend": backend}
        return routed_block_attention(q, k, v, q, means, **sizes)

    for t in range(1, 12):
        later = torch.arange(12).view(1, -1, 1, 1) >= t
        changed = out(*(torch.where(later, x + 1 + x.square(), x) for x in (k, v)))
        assert torch.equal(changed[:, :t], out(k, v)[:, :t])


def test_the_loss_of_distillation_is_the_divergence_from_full_attention() -> None:
    q, k, _, router_q, router_k = given = tensors()
    sizes = {"block_size": SIZE, "query_block": ROWS, "topk": 2}
    out, loss = routed_block_attention(*given, **sizes, router_grad="distill")
    torch.testing.assert_close(out, routed_block_attention(*given, **sizes), rtol=0, atol=0)
    want = torch.zeros(1, 2, 10, dtype=torch.float64)
    for g in range(2):
        for n in range(10):
            own, _, r = chosen_blocks(router_q, router_k, 2, ROWS * n, 2 * g)
            shares = torch.zeros(own + 1, dtype=torch.float64)
            for i in (ROWS * n, ROWS * n + 1):
                for h in (2 * g, 2 * g + 1):
                    keys = k[0, : i + TK - TQ + 1, g]
                    p = (keys @ q[0, i, h] / math.sqrt(8)).softmax(0).detach()
                    shares.index_add_(0, torch.arange(len(p)) // SIZE, p)
            shares = shares / shares.sum()
            logs = r[: own + 1].log_softmax(0)
            want[0, g, n] = (shares * (shares.log() - logs)).sum()
    torch.testing.assert_close(loss, want)
    weight = normal(*loss.shape)
    got = torch.autograd.grad((loss * weight).sum(), given[3:])
    torch.testing.assert_close(got, torch.autograd.grad((want * weight).sum(), given[3:]))
    _, loss = routed_block_attention(*given, **sizes, router_grad="distill")
    assert torch.autograd.grad(loss.sum(), q, allow_unused=True) == (None,)


def test_distillation_by_parts_is_that_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import omniattn.functional.sparse.routed_blocks as module
    from omniattn.functional.sparse import selected_blocks

    sizes = {"block_size": SIZE, "query_block": ROWS, "topk": 2, "router_grad": "distill"}
    _, whole = routed_block_attention(*tensors(), **sizes)
    shapes = []
    weigh = module.attention_weights

    def watched(q, k, *rest, **options):
        shapes.append((q.shape[1], k.shape[1]))
        return weigh(q, k, *rest, **options)

    monkeypatch.setattr(selected_blocks, "SCORES", 3 * ROWS * HEADS * TK)
    monkeypatch.setattr(module, "attention_weights", watched)
    _, parts = routed_block_attention(*tensors(), **sizes)
    torch.testing.assert_close(parts, whole)
    assert shapes == [(6, 12), (6, 18), (6, 24), (2, 26)]


def test_a_router_with_the_scores_of_moba_is_moba() -> None:
    q, k, v = normal(1, 24, 4, 8), normal(1, 24, 2, 8).flip(1), normal(1, 24, 2, 8)
    means = k.unflatten(1, (4, 6)).mean(2)
    got = routed_block_attention(q, k, v, q, means, block_size=6, topk=2)
    torch.testing.assert_close(got, moba_attention(q, k, v, block_size=6, topk=2))
    got = routed_block_attention(q, k, v, q, means, block_size=6, topk=4)
    torch.testing.assert_close(got, attention(q, k, v, causal=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_block": 4}, "query_block must divide block_size and Tk - Tq"),
        ({"topk": 0}, "topk must be an int >= 1"),
        ({"router_grad": "straight"}, "router_grad must be one of"),
        ({"router_q": torch.ones(1, 20, 3, 5)}, "router_q must have shape"),
        ({"router_q": torch.ones(1, 19, 2, 5)}, "router_q must have shape"),
        ({"router_k": torch.ones(1, 4, 1, 5)}, "router_k must have shape"),
        ({"router_k": torch.ones(1, 5, 1, 4)}, "router_k must have shape"),
        ({"router_k": torch.ones(1, 5, 2, 5).double()}, "router_k must have the dtype"),
        ({"dropout_p": 2.0}, "dropout_p must be"),
        ({"backend": "tpu"}, "backend must be one of"),
    ],
)
def test_wrong_arguments_of_the_router(change: dict, message: str) -> None:
    given = {"q": torch.ones(1, TQ, HEADS, 8), "k": torch.ones(1, TK, 2, 8)}
    given |= {"v": torch.ones(1, TK, 2, 8), "router_q": torch.ones(1, TQ, 2, 5)}
    given |= {"router_k": torch.ones(1, 5, 1, 5), "block_size": SIZE, "topk": 2}
    with pytest.raises((ValueError, TypeError), match="routed_block_attention: " + message):
        routed_block_attention(**given | change)


@pytest.mark.parametrize("grad", ["none", "gate", "distill"])
def test_what_trains_the_router_of_a_layer(grad: str) -> None:
    torch.manual_seed(0)
    sizes = {"block_size": 4, "topk": 2, "query_block": 2, "router_dim": 3, "init_std": 0.5}
    layer = RoutedBlockAttention(dim=16, num_heads=4, num_kv_heads=2, router_grad=grad, **sizes)
    out = layer(torch.randn(1, 18, 16))
    router = list(layer.router_q_proj.parameters()) + list(layer.router_k_proj.parameters())
    others = [p for p in layer.parameters() if not any(p is each for each in router)]
    got = torch.autograd.grad(out.square().sum(), router, allow_unused=True, retain_graph=True)
    assert [g is not None and bool(g.any()) for g in got] == [grad == "gate"] * 2
    assert (layer.auxiliary is not None) == (grad == "distill")
    if grad == "distill":
        got = torch.autograd.grad(layer.auxiliary, router, retain_graph=True)
        assert all(bool(g.any()) for g in got)
        assert set(torch.autograd.grad(layer.auxiliary, others, allow_unused=True)) == {None}
        assert copy.deepcopy(layer).auxiliary is None
    layer.eval()(torch.randn(1, 18, 16))
    assert layer.auxiliary is None


def test_a_decoder_adds_the_losses_of_its_routers() -> None:
    config = TRAINED["routed-blocks"]
    mixer = replace(config.blocks[0].mixer, router_grad="distill", router_weight=0.25)
    config = replace(config, num_layers=2, blocks=(replace(config.blocks[0], mixer=mixer),))
    torch.manual_seed(0)
    model, tokens = config.build(), torch.randint(256, (2, 40))
    model(tokens, tokens)
    losses = [layer.mixer.auxiliary for layer in model.layers]
    torch.testing.assert_close(model.auxiliary_loss(), 0.25 * sum(losses))
    assert model.further_losses() == {"router": pytest.approx(float(sum(losses)) / 2)}
    model.auxiliary_loss().backward()
    gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert gradients and all("router" in name for name in gradients)


def test_states_of_routed_blocks() -> None:
    sizes = {"dim": 16, "num_heads": 4, "block_size": 4, "topk": 2}
    with pytest.raises(ValueError, match="a state needs query_block=1 or decode='full'"):
        RoutedBlockAttention(query_block=2, **sizes).new_state(1, 8)
    with pytest.raises(ValueError, match="decode must be 'routed' with router_grad='gate'"):
        RoutedBlockAttention(decode="full", **sizes)
    options = {"query_block": 2, "decode": "full", "router_grad": "none"}
    layer = RoutedBlockAttention(**options, **sizes).eval()
    x = torch.randn(1, 14, 16)
    with torch.no_grad():
        state = layer.new_state(1, 14)
        torch.testing.assert_close(layer(x[:, :11], state=state), layer(x[:, :11]))
        step = layer(x[:, 11:], state=state)
        everything = copy.deepcopy(layer)
        everything.config = replace(layer.config, topk=4)
        torch.testing.assert_close(step, everything(x)[:, 11:])


@pytest.mark.parametrize("grad", ["none", "gate"])
def test_without_keys(grad: str) -> None:
    q, none = normal(1, 4, 2, 8), normal(1, 0, 1, 8)
    routers = normal(1, 4, 1, 3), normal(1, 0, 1, 3)
    out = routed_block_attention(*(q, none, none, *routers), block_size=2, topk=2, router_grad=grad)
    assert torch.equal(out, torch.zeros_like(q))


def test_router_of_size_0() -> None:
    q, k, none = normal(1, 4, 2, 8), normal(1, 4, 1, 8), normal(1, 4, 1, 0)
    with pytest.raises(ValueError, match=r"^routed_block_attention: router_q must have Dr > 0"):
        routed_block_attention(q, k, k, none, none[:, :2], block_size=2, topk=2)
