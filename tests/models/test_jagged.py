"""Decoders on sequences without padding, and with scores changed by functions of positions."""

from dataclasses import replace

import pytest
import torch

from omniattn.models import PRESETS, LlamaConfig, MixtralConfig

#: A model of each kind of layer.
MODELS = (
    *("llama-tiny", "gpt2", "mla", "mixtral", "longformer", "nsa"),
    *("gated-deltanet", "rwkv7", "xlstm", "s4d", "mamba2", "jamba", "zamba2"),
)
SMALL = LlamaConfig(vocab_size=61, dim=24, num_layers=2, num_heads=2, hidden_dim=32)


def sequences(vocabulary, lengths=(5, 1, 9)):
    torch.manual_seed(0)
    tokens = [torch.randint(vocabulary, (n,)) for n in lengths]
    return torch.nested.nested_tensor(tokens, layout=torch.jagged)


def boundaries_of(tokens, values):
    return torch.nested.nested_tensor_from_jagged(values, tokens.offsets())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_loss_are_those_of_each_sequence(name):
    config = PRESETS[name]
    tokens = sequences(config.vocab_size)
    model = config.build(dtype=torch.float64).eval()
    targets = boundaries_of(tokens, tokens.values().roll(1))
    with torch.no_grad():
        logits, loss = model(tokens), model(tokens, targets)
        expected = [model(sequence[None])[0] for sequence in tokens.unbind()]
    for got, want in zip(logits.unbind(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    want = torch.nn.functional.cross_entropy(torch.cat(expected), targets.values())
    torch.testing.assert_close(loss, want)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_each_sequence(checkpointing):
    config = replace(SMALL, gradient_checkpointing=checkpointing)
    model = config.build(dtype=torch.float64)
    tokens = sequences(config.vocab_size)
    weights = list(model.parameters())
    got = torch.autograd.grad(model(tokens, sequences(config.vocab_size)), weights)
    losses = [model(part[None], part[None]) * len(part) for part in tokens.unbind()]
    want = torch.autograd.grad(sum(losses) / len(tokens.values()), weights)
    torch.testing.assert_close(got, want)


def test_positions_may_be_given():
    model = SMALL.build(dtype=torch.float64)
    tokens = sequences(61, (4, 3))
    shifted = model(tokens, positions=torch.tensor([0, 1, 2, 3, 7, 8, 9]))
    torch.testing.assert_close(shifted.values(), model(tokens).values())  # rotary: differences


def test_experts_count_the_tokens_of_sequences_alone():
    model = MixtralConfig(
        vocab_size=61, dim=24, num_layers=1, num_heads=2, hidden_dim=16, experts=4
    ).build()
    tokens = sequences(61)
    model(tokens, tokens)
    (state,) = [m.state for m in model.modules() if hasattr(m, "gate") and hasattr(m, "state")]
    assert state.counts.sum() == 2 * len(tokens.values())


def test_errors():
    model = SMALL.build()
    tokens = sequences(61)
    with pytest.raises(ValueError, match=r"^Llama: state must be None where tokens is nested"):
        model(tokens, state=model.new_state(3, 10))
    with pytest.raises(ValueError, match=r"target must be jagged with the boundaries of x"):
        model(tokens, tokens.values())
    with pytest.raises(ValueError, match=r"^Llama: positions must have .*=\(3,\), T=15"):
        model(tokens, positions=torch.arange(3))
    with pytest.raises(ValueError, match=r"^Llama: tokens must be a jagged nested tensor \(B, j\)"):
        model(
            torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
        )
    predicting = PRESETS["deepseek-moe-mtp"].build()
    with pytest.raises(NotImplementedError, match=r"where further tokens are predicted"):
        predicting(tokens, tokens)
    layer = next(m for m in predicting.modules() if type(m).__name__ == "MoE")
    x = boundaries_of(tokens, torch.zeros(15, layer.config.gate.dim))
    with pytest.raises(ValueError, match=r"^MoE: token_mask must be None where x is nested"):
        layer(x, torch.ones(3, 9, dtype=torch.bool))


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
