"""Decoders whose layers change scores by a function of positions."""

from dataclasses import replace

import pytest
import torch

from omniattn.models import PRESETS, LlamaConfig

SMALL = LlamaConfig(vocab_size=61, dim=24, num_layers=2, num_heads=2, hidden_dim=32)


def slope(score, b, h, q, k):
    return score - 0.3 * (h + 1) * (q - k)


def near(b, h, q, k):
    return q - k < 3


def only_near(score, b, h, q, k):
    return torch.where(near(b, h, q, k), score, -torch.inf)


def model_and_tokens(name):
    torch.manual_seed(0)
    config = PRESETS[name]
    return config.build(dtype=torch.float64).eval(), torch.randint(config.vocab_size, (2, 9))


@pytest.mark.parametrize("name", ["llama-tiny", "mla", "differential", "jamba"])
@torch.no_grad()
def test_steps_are_those_of_the_whole(name):
    model, tokens = model_and_tokens(name)
    whole = model(tokens, score_mod=slope)
    assert not torch.allclose(whole, model(tokens))
    state = model.new_state(2, 9)
    steps = [model(part, score_mod=slope, state=state) for part in tokens.split([5, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_scores_of_minus_infinity_are_a_mask():
    model, tokens = model_and_tokens("llama-tiny")
    rows = torch.arange(9)
    whole = model(tokens, mask=near(0, 0, rows[:, None], rows))
    torch.testing.assert_close(model(tokens, mask=near), whole)
    torch.testing.assert_close(model(tokens, score_mod=only_near), whole)


def test_gradients_with_recomputed_layers():
    model = SMALL.build(dtype=torch.float64)
    again = replace(SMALL, gradient_checkpointing=True).build(dtype=torch.float64)
    again.load_state_dict(model.state_dict())
    tokens = torch.randint(61, (2, 9))
    losses = [m(tokens, tokens, score_mod=slope) for m in (model, again)]
    assert losses[0] == losses[1] != model(tokens, tokens)
    pairs = zip(losses, (model, again), strict=True)
    torch.testing.assert_close(*(torch.autograd.grad(loss, m.parameters()) for loss, m in pairs))


def test_further_tokens_are_predicted_with_it():
    model, tokens = model_and_tokens("deepseek-moe-mtp")
    model.train()
    found = []
    for options in ({}, {"score_mod": only_near}, {"mask": near}):
        model(tokens, tokens, **options)
        found.append(model.further_losses()["mtp"])
    assert found[1] == pytest.approx(found[2], rel=1e-12) != pytest.approx(found[0], rel=1e-6)


def test_a_model_without_scores_refuses_it():
    model, tokens = model_and_tokens("mamba2")
    with pytest.raises(ValueError, match="Decoder: score_mod needs a layer with scores"):
        model(tokens, score_mod=slope)
