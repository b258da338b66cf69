"""Models of a recurrence that is defined in the tests and of attention."""

import copy
import json
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from average_mixer import Average
from torch import nn

from omniattn.models import (
    T5,
    BlocksConfig,
    Decoder,
    MistralConfig,
    T5Config,
    generate,
    layer_schedule,
    load_model,
    save_model,
)
from omniattn.modules import (
    Attention,
    DecoderBlock,
    GatedMLP,
    Mixer,
    RMSNorm,
    RollingCache,
    RotaryEmbedding,
)
from omniattn.modules.base.layer import Layer, LayerConfig
from omniattn.modules.base.state import StatePair
from omniattn.reference import LinearScaling

MLP, NORM = GatedMLP.Config(24, 32, init_std=0.5), RMSNorm.Config(24)


#: Attention in every other layer.
HYBRID = BlocksConfig(
    vocab_size=61,
    dim=24,
    num_layers=3,
    init_std=0.5,
    blocks=(
        DecoderBlock.Config(Average.Config(24), MLP, NORM),
        DecoderBlock.Config(Attention.Config(24, 4, 2, init_std=0.5), MLP, NORM),
    ),
    rope=RotaryEmbedding.Config(6, scaling=LinearScaling(2.0)),
)


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return HYBRID.build(dtype=torch.float64)


def test_a_mixer_of_any_width_needs_no_dim():
    class Scaled(Mixer):
        @dataclass(frozen=True)
        class Config(LayerConfig):
            factor: float = 2.0

        def __init__(self, config, *, device=None, dtype=None):
            super().__init__()
            self.config = config

        def forward(self, x, *, state=None, rope=None, mask=None):
            return x * self.config.factor

    try:
        block = DecoderBlock.Config(Scaled.Config(), MLP, NORM)
        small = BlocksConfig(vocab_size=5, dim=24, num_layers=1, blocks=(block,)).build()
        assert small(torch.tensor([[1, 2]])).shape == (1, 2, 5)
    finally:
        Layer.layers.pop("Scaled")


def test_a_layer_joins_by_being_defined():
    assert Layer.layers["Average"] is Average
    assert isinstance(Average.Config(8).build(), Average)
    with pytest.raises(TypeError, match=r"mixer must be .*, Average, .*got .*RMSNorm"):
        DecoderBlock.Config(RMSNorm.Config(8), GatedMLP.Config(8, 8), RMSNorm.Config(8))
    with pytest.raises(
        TypeError, match=r"norm must be the Config of DynamicTanh, LayerNorm, RMSNorm, got "
    ):
        DecoderBlock.Config(Average.Config(8), GatedMLP.Config(8, 8), Average.Config(8))
    with pytest.raises(ValueError, match="names must be unique, got name='Attention' of omniattn"):

        class Second(Mixer, name="Attention"):
            Config = type("Config", (LayerConfig,), {})

    assert Layer.layers["Attention"] is Attention


def test_a_hybrid_trains(model):
    tokens = torch.randint(61, (2, 12))
    loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.05).step()
    assert model(tokens, tokens.roll(-1, 1)) < loss
    assert model.layers[0].mixer.proj.weight.grad.abs().max() > 0


@torch.no_grad()
def test_a_hybrid_decodes_step_by_step_what_it_computes_at_once(model):
    tokens = torch.randint(61, (2, 12))
    state = model.new_state(2, 12)
    parts = [model(tokens[:, a:b], state=state) for a, b in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))
    assert [each.length for each in state] == [12] * 3

    out = generate(model, tokens, 8)
    assert torch.equal(out[:, 12:], model.eval()(out[:, :-1]).argmax(-1)[:, 11:])


@torch.no_grad()
def test_beams_and_copies_of_a_hybrid(model):
    tokens = torch.randint(61, (2, 12))
    full = model(tokens)
    state = model.new_state(2, 12)
    model(tokens[:, :5], state=state)

    before = copy.deepcopy(state)  # a guess that is taken back
    model(tokens[:, :3], state=state)
    with pytest.raises(ValueError, match=r"deepcopy made before them; .* 8, got length=5"):
        state[0].crop(5)
    state[1].crop(5)
    assert (state[1].length, before[1].length) == (5, 5)

    other = model.new_state(2, 12)
    for each, saved in zip(other, before, strict=True):
        each.load_state_dict(saved.state_dict())
    for each in before:
        each.reorder(torch.tensor([1, 1, 0]))
    torch.testing.assert_close(model(tokens[[1, 1, 0], 5:], state=before), full[[1, 1, 0], 5:])
    torch.testing.assert_close(model(tokens[:, 5:], state=other), full[:, 5:])


@torch.no_grad()
def test_states_are_checked_before_one_changes(model):
    """A call that fails in a later layer must not leave the states of earlier ones ahead."""
    tokens, state, more = torch.randint(61, (2, 9)), model.new_state(2, 5), model.new_state(2, 9)
    model(tokens[:, :1], state=more)
    pair = StatePair(state[0], more[0])
    for wrong, error, message in (
        (state, ValueError, r"new tokens, got state\[1\].max_length=5, state\[1\].length=0, T=9"),
        ([more[0], *state[1:]], ValueError, r"state\[0\].length=1, state\[1\].length=0"),
        ([pair, *state[1:]], ValueError, r"state\[0\].length=0, state\[0\].length=1"),
        ([*state, state[0]], ValueError, r"each of 3 layers, got len\(state\)=4"),
        (state[:2], ValueError, r"each of 3 layers, got len\(state\)=2"),
        (state[1], TypeError, r"the list of .*, got type\(state\)=KVCache"),
        ([None, *state[1:]], TypeError, r"got type\(state\[0\]\)=NoneType"),
    ):
        with pytest.raises(error, match=f"^Decoder: state must .*{message}$"):
            model(tokens, state=wrong)
    assert [each.length for each in state] == [0] * 3
    torch.testing.assert_close(model(tokens[:, :5], state=state), model(tokens)[:, :5])

    t5 = T5(T5Config(dim=8, num_layers=2, num_heads=2, head_dim=4, hidden_dim=8))
    memory, state = t5.encode(tokens), t5.new_state(2, 5)
    with pytest.raises(ValueError, match=r"^T5: state must .* got state\[0\].max_length=5"):
        t5.hidden(tokens, memory, state=state)
    assert not state[0][1].filled


@torch.no_grad()
def test_a_call_that_fails_takes_its_tokens_back(model):
    """A recurrence cannot, and says so in the next call."""
    tokens = torch.arange(6)[None]
    for decoder in (replace(HYBRID, blocks=HYBRID.blocks[1:]).build(dtype=torch.float64), model):
        state = decoder.new_state(1, 8)
        decoder(tokens[:, :3], state=state)
        failing = decoder.layers[2].mixer
        failure = mock.patch.object(failing, "forward", side_effect=MemoryError)
        with failure, pytest.raises(MemoryError):
            decoder(tokens[:, 3:], state=state)
        assert [part.length for part in state[1:]] == [3, 3]
        if decoder is model:
            with pytest.raises(ValueError, match=r"state\[0\] has read tokens of a call"):
                decoder(tokens[:, 3:], state=state)
        else:
            last = decoder(tokens[:, 3:], state=state)
            torch.testing.assert_close(last, decoder(tokens)[:, 3:])


@torch.no_grad()
def test_a_rolling_cache_that_cannot_take_tokens_back_says_so():
    """All layers have read the tokens when the head fails, so that their lengths agree."""
    torch.manual_seed(0)
    sizes = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "hidden_dim": 16}
    decoder = MistralConfig(vocab_size=10, window=4, **sizes).build(dtype=torch.float64)
    tokens = torch.arange(9)[None]
    state, before = ([RollingCache(1, 4, 1, 8, dtype=torch.float64)] for _ in range(2))
    for each in (state, before):
        decoder(tokens[:, :3], state=each)
    failure = mock.patch.object(decoder.norm, "forward", side_effect=MemoryError)
    with failure, pytest.raises(MemoryError):
        decoder(tokens[:, 3:6], state=state)
    with pytest.raises(ValueError, match=r"state\[0\] has read tokens of a call"):
        decoder(tokens[:, 3:6], state=state)
    for each, saved in zip(state, before, strict=True):
        each.load_state_dict(saved.state_dict())
    torch.testing.assert_close(decoder(tokens[:, 3:], state=state), decoder(tokens)[:, 3:])


def test_checkpointing_does_not_leave_out_a_state(model):
    model.config = replace(HYBRID, gradient_checkpointing=True)
    tokens, state = torch.randint(61, (1, 3)), model.new_state(1, 3)
    with pytest.raises(RuntimeError, match=r"wrap the call in torch\.no_grad"):
        model(tokens, state=state)
    model(tokens, tokens).backward()


def test_generate_takes_any_model_with_the_methods(model):
    with pytest.raises(ValueError, match="source must be None, since Decoder has no encoder"):
        generate(model, torch.zeros(1, 1, dtype=torch.long), 1, source=torch.zeros(1, 1).long())
    assert model.training

    class Counter(nn.Module):
        """Model whose state counts how often each token was read; the rarest token comes next."""

        config = replace(HYBRID, vocab_size=4)

        def new_state(self, batch, max_length):
            return torch.zeros(batch, 4)

        def hidden(self, tokens, *, state):
            state += nn.functional.one_hot(tokens, 4).sum(1)
            return state[:, None].clone()

        def head(self, x):
            return -x

    out = generate(Counter(), torch.tensor([[0, 0, 1, 3]]), 4)
    assert out[0, 4:].tolist() == [2, 1, 2, 3]


@torch.no_grad()
@pytest.mark.parametrize("axes", [{"sections": (1, 2, 1)}, {"num_axes": 2}])
def test_positions_of_several_coordinates(axes):
    """Time, height and width of M-RoPE, rows and columns of 2-D RoPE: only differences count."""
    torch.manual_seed(0)
    block = DecoderBlock.Config(Attention.Config(24, 3, init_std=0.5), MLP, NORM)
    rope = RotaryEmbedding.Config(8, **axes)
    model = BlocksConfig(61, 24, 2, blocks=(block,), rope=rope, init_std=0.5).build()
    tokens, count = torch.randint(61, (2, 6)), len(axes.get("sections", (1, 1)))
    positions = torch.randint(9, (count, 2, 6))
    full = model(tokens, positions=positions)
    moved = positions + torch.arange(3, 3 + count)[:, None, None]
    torch.testing.assert_close(model(tokens, positions=moved), full, rtol=1e-4, atol=1e-4)
    assert (model(tokens, positions=positions.flip(0)) - full).abs().max() > 0.1
    state = model.new_state(2, 6)
    steps = [
        model(tokens[:, a:b], positions=positions[..., a:b], state=state)
        for a, b in ((0, 3), (3, 4), (4, 6))
    ]
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-4, atol=1e-4)


def test_a_hybrid_goes_into_files(model, tmp_path):
    assert BlocksConfig.from_dict(json.loads(json.dumps(HYBRID.to_dict()))) == HYBRID
    with pytest.raises(ValueError, match="class is defined, got type='Median'"):
        BlocksConfig.from_dict({"blocks": [{"type": "Median"}]})
    save_model(model, tmp_path / "hybrid")
    again, tokens = load_model(tmp_path / "hybrid", backend="reference"), torch.arange(5)[None]
    assert again.layers[1].mixer.config.backend == again.norm.config.backend == "reference"
    torch.testing.assert_close(again(tokens), model(tokens))


def test_blocks_must_fit():
    with pytest.raises(ValueError, match=r"mixer\.dim=24, dim=16"):
        replace(HYBRID, dim=16)
    with pytest.raises(ValueError, match="blocks must not be empty"):
        BlocksConfig()


def test_schedules_of_two_kinds_of_layers():
    near, far = HYBRID.blocks
    for schedule, full in (
        ("gpt3", [0, 2, 4]),
        ("gemma2", [1, 3, 5]),
        ("gemma3", [5]),
        ("1:1", [1, 3, 5]),
        ("2:1", [2, 5]),
        (("swa", "full_attention", "full"), [1, 2, 4, 5]),
    ):
        config = replace(HYBRID, num_layers=6, schedule=schedule)
        config = BlocksConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert [n for n in range(6) if config.block(n) == far] == full
        assert [n for n in range(6) if config.block(n) == near] == sorted({*range(6)} - {*full})
        assert [n for n, kind in enumerate(layer_schedule(schedule, 6)) if kind == "full"] == full
    for wrong in ("gemma", "0:0", "1:", (), ("near",), 3, (1, 0)):
        with pytest.raises(ValueError, match="schedule must be one of gpt3, gemma2, gemma3, 'n:m'"):
            replace(HYBRID, schedule=wrong)
    with pytest.raises(ValueError, match="schedule needs two blocks, for 'swa' and for 'full'"):
        replace(HYBRID, blocks=HYBRID.blocks[:1], schedule="1:1")


def test_replaced_configs_keep_their_layer():
    assert replace(Average.Config(8), decay=0.5).layer is Average
