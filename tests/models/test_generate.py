"""Sampling rules and generation on the KV cache."""

from dataclasses import replace

import pytest
import torch

from omniattn.models import PRESETS, Llama, generate, sample

LOGITS = torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0]])


def frequencies(**options: float) -> torch.Tensor:
    uniform = (torch.arange(4000) + 0.5) / 4000
    drawn = sample(LOGITS.expand(4000, -1), uniform, **options)
    return torch.bincount(drawn, minlength=5) / 4000


@pytest.fixture
def model() -> Llama:
    torch.manual_seed(0)
    return Llama(PRESETS["llama-test"])


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(97, (3, 5), generator=torch.Generator().manual_seed(1))


def test_sampling_inverts_the_distribution():
    torch.testing.assert_close(frequencies(), LOGITS[0].softmax(-1), rtol=0, atol=1e-3)
    torch.testing.assert_close(
        frequencies(temperature=0.5), (2 * LOGITS[0]).softmax(-1), rtol=0, atol=1e-3
    )
    # Index order: u = 0 gives the first token, u close to 1 the last.
    ends = sample(LOGITS.expand(2, -1), torch.tensor([0.0, 1 - 2.0**-24]))
    assert ends.tolist() == [0, 4]


def test_top_k_and_top_p_keep_the_smaller_index_of_equal_logits():
    assert sample(LOGITS, torch.tensor([0.99]), temperature=0).item() == 1
    assert frequencies(top_k=1).tolist() == [0, 1, 0, 0, 0]
    assert frequencies(top_k=2).nonzero().flatten().tolist() == [1, 3]
    assert frequencies(top_k=9).count_nonzero() == 5
    p = LOGITS[0].softmax(-1)
    assert frequencies(top_p=1e-6).nonzero().flatten().tolist() == [1]
    assert frequencies(top_p=float(p[1]) + 0.01).nonzero().flatten().tolist() == [1, 3]
    assert frequencies(top_p=float(2 * p[1]) + 0.01).nonzero().flatten().tolist() == [1, 2, 3]


def test_greedy_equals_argmax_of_the_full_forward(model, prompt):
    out = generate(model, prompt, 6)
    assert torch.equal(out[:, :5], prompt)
    for t in range(5, 11):
        assert torch.equal(out[:, t], model(out[:, :t])[:, -1].argmax(-1))
    assert model.training


def test_draws_depend_on_seed_step_and_row_only(model, prompt):
    options = {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
    out = generate(model, prompt, 6, seed=3, **options)
    assert torch.equal(out, generate(model, prompt, 6, seed=3, **options))
    assert torch.equal(out[:2], generate(model, prompt[:2], 6, seed=3, **options))
    assert not torch.equal(out, generate(model, prompt, 6, seed=4, **options))


def test_a_row_ends_with_eos(model, prompt):
    free = generate(model, prompt, 8)
    eos = int(free[0, 6])
    out = generate(model, prompt, 8, eos=eos)
    for row, free_row in zip(out[:, 5:], free[:, 5:], strict=True):
        hits = (free_row == eos).nonzero().flatten()
        end = int(hits[0]) + 1 if len(hits) else len(row)
        assert torch.equal(row[:end], free_row[:end])
        assert (row[end:] == eos).all()
    assert generate(model, prompt[:1], 8, eos=eos).shape == (1, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"seed": 2**70}, "seed must fit into 64 bits"),
        ({"eos": 5000}, "eos must be an int >= 0 and <= 96, got eos=5000"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, r"tokens=\(1, 0\)"),
        ({"tokens": torch.zeros(1, 2)}, "tokens must be integers"),
        ({"tokens": torch.tensor([[0, 97]])}, r"tokens must be in \[0, 97\), got .* 0 to 97"),
    ],
)
def test_names_the_wrong_value(model, prompt, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        generate(model, **{"tokens": prompt, "max_new_tokens": 2, **options})


def test_a_prompt_of_small_integers_gets_any_token(model, prompt):
    model = Llama(replace(PRESETS["llama-test"], vocab_size=1000))
    wanted = generate(model, prompt, 6)
    assert wanted.max() > 255 and torch.equal(generate(model, prompt.to(torch.uint8), 6), wanted)


def test_zero_new_tokens(model, prompt):
    assert torch.equal(generate(model, prompt, 0), prompt)


@torch.no_grad()
def test_a_failed_call_spoils_states_that_cannot_forget():
    model = PRESETS["mamba"].build()
    tokens, state = torch.randint(20, (1, 6)), model.new_state(1, 20)
    model(tokens, state=state)

    def fail(*_):
        raise KeyError

    hook = model.layers[-1].register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(tokens, state=state)
    hook.remove()
    with pytest.raises(ValueError, match=r"state\[0\] has read tokens of a call that failed"):
        model(tokens, state=state)


@torch.no_grad()
def test_states_and_tokens_of_a_decoder_are_checked():
    model = PRESETS["mamba"].build()
    tokens, one = torch.randint(20, (1, 6)), model.new_state(1, 20)[0]
    with pytest.raises(ValueError, match=r"an entry of its own .* state\[1\] is state\[0\]"):
        model(tokens, state=[one] * len(model.layers))
    with pytest.raises(ValueError, match=r"tokens must have shape \(B, T\)"):
        model(tokens[0])
