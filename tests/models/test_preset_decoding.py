"""Presets generate what transformers and their own full forward do."""

import math
from dataclasses import replace

import pytest
import torch
from small_presets import _SIZES, SMALL

from omniattn.models import (
    T5Config,
    generate,
)
from omniattn.models.presets import TRAINED
from omniattn.modules import RecurrentState


@torch.no_grad()
def test_t5_generates_with_caches_what_the_full_forward_prefers():
    torch.manual_seed(0)
    model = T5Config(**_SIZES, hidden_dim=40, head_dim=12).build().eval()
    source = torch.randint(97, (3, 20))
    out = generate(model, torch.zeros(3, 1, dtype=torch.long), 8, source=source)
    full = model(source, out[:, :-1]).argmax(-1)
    assert torch.equal(out[:, 1:], full)


@pytest.mark.parametrize("name", ["mamba", "falcon-mamba", "mamba2", "jamba-dense"])
@torch.no_grad()
def test_transformers_generates_the_same(name):
    torch.manual_seed(0)
    config = SMALL[name]
    if name == "mamba2":  # theirs limits no step of a single token
        config = replace(config, dt_limit=(0.0, math.inf))
    ours = config.build().eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs, tokens = ours.to_hf(), torch.randint(97, (2, 7))
    options = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 9}
    expected = theirs.generate(tokens, do_sample=False, **options)
    assert torch.equal(generate(ours, tokens, 9), expected)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba", "zamba2"])
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(name):
    torch.manual_seed(0)
    model = (SMALL.get(name) or TRAINED[name]).build(dtype=torch.float64).eval()
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    tokens = torch.randint(97, (2, 15))
    real = torch.ones(2, 1, 1, 15, dtype=torch.bool)
    real[0, ..., :4] = False
    positions = (torch.arange(15) - 4 * (~real[:, 0, 0, :1]).long()).clamp(min=0)
    wanted = model(tokens[:1, 4:])[0]
    out = model(tokens, mask=real, positions=positions)
    torch.testing.assert_close(out[0, 4:], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d", "jamba"])
@torch.no_grad()
def test_recurrent_states_have_one_size_for_any_length(name):
    model = (SMALL.get(name) or TRAINED[name]).build()
    short, long = (
        [s for s in model.new_state(2, length) if isinstance(s, RecurrentState)]
        for length in (1, 1 << 20)
    )
    before = [state.nbytes for state in short]
    assert len(before) > 0 and before == [state.nbytes for state in long]
    state = model.new_state(2, 70)
    for count in (33, 1, 1):
        model(torch.randint(97, (2, count)), state=state)
    after = [s.nbytes for s in state if isinstance(s, RecurrentState)]
    assert after == before and {s.length for s in state} == {35}


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "deepseek-moe",
        "gpt2",
        "mla",
        "mlra",
        "differential",
        "selective",
        "forgetting",
        "path",
        "wall",
        "stick-breaking",
        "softpick",
        "mamba",
        "mamba2",
        "jamba",
        "samba",
        "zamba2",
        "s4d",
        "nsa",
        "moba",
        "local-strided",
        "routed-blocks",
        "dsa",
        "csa",
        "hca",
        "mta",
        "parallax",
    ],
)
@torch.no_grad()
def test_prefill_and_steps_equal_the_full_forward(name):
    torch.manual_seed(0)
    model = TRAINED[name].build().eval()
    tokens = torch.randint(256, (2, 20))
    cache = model.new_state(2, 20)
    parts = [model(tokens[:, a:b], state=cache) for a, b in ((0, 13), (13, 14), (14, 20))]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "falcon-mamba", "jamba", "zamba2"])
def test_recurrences_generate_what_transformers_generates(name):
    torch.manual_seed(0)
    model = SMALL[name].build().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs, tokens = model.to_hf().eval(), torch.randint(1, 97, (2, 7))
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(tokens, max_new_tokens=12, do_sample=False)
    assert torch.equal(generate(model, tokens, 12), expected)
