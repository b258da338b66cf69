"""Multi-token prediction: the paper's indices, causality, loss, bad input."""

import dataclasses

import pytest
import torch
from torch import nn

from omniattn.modules import MultiTokenPredictor as MTP

CONFIG = MTP.Config(8, depths=2)


def setup(config=CONFIG):
    torch.manual_seed(0)
    embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    predictor = MTP(config, lambda: nn.Linear(8, 8))
    return predictor, embedding, head, torch.randint(11, (2, 7)), torch.randn(2, 7, 8)


@pytest.mark.parametrize("concat", ["hidden_first", "embedding_first"])
@pytest.mark.parametrize("post_norm", [False, True])
def test_depths_chain_as_in_the_paper(concat, post_norm):
    config = dataclasses.replace(CONFIG, concat=concat, post_norm=post_norm)
    predictor, embedding, head, tokens, trunk = setup(config)
    logits = predictor(trunk, tokens, embedding, head)
    for i in range(5):
        h = trunk[:, i]
        for d, depth in enumerate(predictor.depths, 1):
            pair = [depth["hidden_norm"](h), depth["embedding_norm"](embedding(tokens[:, i + d]))]
            if concat == "embedding_first":
                pair.reverse()
            h = depth["block"](depth["proj"](torch.cat(pair, -1)))
            normed = depth["norm"](h)
            torch.testing.assert_close(logits[d - 1][:, i], head(normed))
            h = normed if post_norm else h


def test_parallel_depths_see_the_trunk_alone():
    predictor, embedding, head, tokens, trunk = setup(dataclasses.replace(CONFIG, parallel=True))
    logits = predictor(trunk, tokens, embedding, head)
    for d, (depth, found) in enumerate(zip(predictor.depths, logits, strict=True), 1):
        expected = head(depth["norm"](depth["block"](trunk)))
        torch.testing.assert_close(found, expected[:, : 7 - d])
    grads = torch.autograd.grad(MTP.loss(logits, tokens), list(predictor.parameters()))
    assert all(g.abs().sum() > 0 for g in grads)


def test_loss_is_the_mean_over_kept_targets():
    predictor, embedding, head, tokens, trunk = setup()
    logits = predictor(trunk, tokens, embedding, head)
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    expected = [
        nn.functional.cross_entropy(x.flatten(0, 1), labels[:, d:].flatten())
        for d, x in enumerate(logits, 1)
    ]
    loss = MTP.loss(logits, labels, weight=0.1)
    torch.testing.assert_close(loss, 0.1 * sum(expected) / 2)
    grads = torch.autograd.grad(loss, [*predictor.parameters(), embedding.weight])
    assert all(g.abs().sum() > 0 for g in grads)


def results_in(dtype, backend=None):
    """Logits and gradients of the same bf16 numbers."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(97, 64), nn.Linear(64, 97, bias=False)
    nn.init.normal_(head.weight)
    predictor = MTP(MTP.Config(64, depths=2, backend=backend), lambda: nn.Linear(64, 64))
    for module in (embedding, head, predictor):
        module.bfloat16().to(dtype)
    tokens, trunk = torch.randint(97, (2, 65)), torch.randn(2, 65, 64).bfloat16().to(dtype)
    logits = predictor(trunk.requires_grad_(), tokens, embedding, head)
    weights = [torch.randn(x.shape).bfloat16().double() for x in logits]
    total = sum((x.double() * w).sum() for x, w in zip(logits, weights, strict=True))
    parameters = [*embedding.parameters(), *head.parameters(), *predictor.parameters()]
    return [*logits, *torch.autograd.grad(total, [trunk, *parameters])]


def test_bf16_is_as_exact_as_eager():
    """Gradients are in the thousands here, where neighbors in bf16 are 8 and 16 apart: sums in
    another order than torch's may round to another one, at no greater distance from fp64."""
    exact = results_in(torch.float64, "reference")
    ours, eager = results_in(torch.bfloat16), results_in(torch.bfloat16, "reference")
    assert max(x.abs().max() for x in exact) > 1024
    for e, x, r in zip(exact, ours, eager, strict=True):
        spacing = torch.exp2(torch.floor(torch.log2(e.abs().max())) - 7)
        assert (x - e).abs().max() <= 2 * (r - e).abs().max() + spacing / 2


def test_bad_input():
    with pytest.raises(ValueError, match="depths must be an integer >= 1"):
        MTP.Config(8, depths=0)
    with pytest.raises(ValueError, match="concat must be"):
        MTP.Config(8, concat="both")
    predictor, embedding, head, tokens, trunk = setup()
    with pytest.raises(ValueError, match="tokens must have shape"):
        predictor(trunk, tokens[:, 1:], embedding, head)
    with pytest.raises(ValueError, match="tokens must be longer"):
        predictor(trunk[:, :2], tokens[:, :2], embedding, head)
