"""Widths of models under one budget."""

import pytest
from average_mixer import Average

from omniattn import calculate
from omniattn.cli.arguments import COMPARED, PARTS, TASKS
from omniattn.compare import KINDS, BudgetError, Settings, comparison, settings
from omniattn.compare.budget import solve, target
from omniattn.compare.candidates import candidate, candidates, hybrid
from omniattn.compare.mixers import Frame
from omniattn.compare.recall import TASKS as KNOWN_TASKS
from omniattn.models import BertConfig, LlamaConfig
from omniattn.modules import Attention, Mamba

SMALL = Settings(dim=32, layers=2)
FRAME = Frame(dim=32, layers=2)
LENGTH = 16


def solved(model, given=SMALL, frame=FRAME):
    return solve(candidate(model), given, frame, LENGTH)


#: Mixers whose layers differ in kind: their sizes are solved in every run of the tests.
USUAL = ("llama", "mla", "nsa", "gated-deltanet", "rwkv7", "mlstm", "mamba2", "lstm")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in USUAL else pytest.mark.slow) for n in KINDS]
)
def test_parameters_are_equal(name):
    """Counted from the parameters of the model itself."""
    model = solved(name)
    wanted = target(SMALL, FRAME, LENGTH)
    assert model.parameters == sum(p.numel() for p in model.config.build().parameters())
    assert abs(model.parameters / wanted - 1) <= 0.02
    assert model.config.dim <= 32 and model.config.num_layers == 2


@pytest.mark.parametrize("name", ["llama", "gated-deltanet", "rwkv7", "gru"])
def test_operations_are_equal(name):
    given = Settings(dim=32, layers=2, budget="flops")
    model = solved(name, given)
    wanted = target(given, FRAME, LENGTH)
    assert abs(model.flops / wanted - 1) <= 0.02
    assert model.flops == calculate.flops(model.config, LENGTH).training / LENGTH


def test_a_size_of_the_users_choice():
    for size in (30_000, 90_000):
        model = solved("mamba2", Settings(dim=32, layers=2, size=size))
        assert abs(model.parameters / size - 1) <= 0.02
    with pytest.raises(BudgetError, match=r"mamba2 cannot have 1,000 parameters within 2%.*smalle"):
        solved("mamba2", Settings(dim=32, layers=2, size=1000))


def test_channel_mixers_are_at_least_as_wide_as_the_model_where_possible():
    wide = solved("nsa", frame=Frame(dim=64), given=Settings())
    assert wide.config.dim < 64
    assert wide.config.block(0).mlp.hidden_dim >= wide.config.dim
    assert solved("llama").config.dim == 32


def test_hybrids_repeat_their_layers():
    blocks = candidate("gated-deltanet@3:1").config(Frame(), 64).blocks
    kinds = [type(block.mixer).__qualname__ for block in blocks]
    assert kinds == ["GatedDeltaNet.Config"] * 3 + ["Attention.Config"]
    assert candidate("mamba@1:1").config(Frame(), 64).rope is not None
    assert candidate("mamba").config(Frame(), 64).rope is None
    for wrong in ("3", "0:1", "3:1:1", ""):
        with pytest.raises(ValueError, match="a ratio must be n:m"):
            hybrid(candidate("mamba"), wrong)


def test_models_of_users():
    own = solved(Average)
    assert own.name == "Average" and isinstance(own.config.block(0).mixer, Average.Config)
    assert own.version  # its file
    config = solved(Average.Config(8, decay=0.5))
    assert config.config.block(1).mixer.decay == 0.5 and config.config.block(1).mixer.dim == 32
    whole = solved(LlamaConfig(dim=32, num_layers=2, num_heads=2, num_kv_heads=1))
    assert whole.name == "Llama" and whole.config.num_kv_heads == 1
    assert [each.name for each in candidates({"a": Mamba, "b": Attention})] == ["a", "b"]


@pytest.mark.parametrize(
    ("models", "error", "text"),
    [
        ("llama", TypeError, "models must be a list or a dict"),
        ([], ValueError, "models must not be empty"),
        (["lama"], ValueError, "got 'lama'; did you mean 'llama'"),
        (["llama", "llama"], ValueError, "different names, got 'llama' twice"),
        ([3], TypeError, "a model must be a name, a Mixer"),
        ([lambda: None], TypeError, "a model must be a name, a Mixer"),
        ([BertConfig()], TypeError, "must be decoders, got the config BertConfig"),
    ],
)
def test_errors_of_models(models, error, text):
    with pytest.raises(error, match=text):
        candidates(models)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": "flop"}, "budget must be one of .*params.*flops"),
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"dim": 20, "heads": 2}, "dim a multiple of 4 heads, got dim=20, heads=2"),
        ({"test_lengths": (2,)}, "must have 1, the trained length"),
        ({"seed": -1}, "seed must be >= 0"),
    ],
)
def test_errors_of_settings(options, text):
    with pytest.raises(ValueError, match=text):
        Settings(**options)


def test_the_command_knows_the_names_without_torch():
    assert [name for family in COMPARED.values() for name in family] == [*KINDS]
    assert (*KNOWN_TASKS,) == TASKS and settings.PARTS == PARTS
    assert set(comparison.DEFAULT_MODELS) < set(KINDS)
