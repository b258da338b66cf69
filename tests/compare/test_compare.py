"""A small comparison from end to end: its report, resuming, users' mixers, and errors."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from average_mixer import Average
from torch import nn

from omniattn import compare
from omniattn.cli import main
from omniattn.compare import answers, comparison, decoding, norms, positions
from omniattn.compare.baselines import ModuleMixer, TorchRecurrence
from omniattn.compare.cells import described
from omniattn.compare.mixers import Frame
from omniattn.models import LlamaConfig
from omniattn.modules import Attention, LearnedPositional, SinusoidalPositional

TINY = {
    "dim": 16,
    "layers": 2,
    "steps": 2,
    "batch": 2,
    "length": 16,
    "recall_steps": 2,
    "norm_steps": 2,
    "norm_layers": 2,
    "decode_lengths": (4, 8),
    "test_lengths": (1, 2),
    "ratios": ("1:1",),
}


@pytest.fixture(autouse=True)
def _quick(one_thread, monkeypatch):
    """Fewer examples of tests and timed tokens, which no test looks at."""
    for module, name, value in (
        (answers, "_TESTED", 16),
        (answers, "_PER_DISTANCE", 4),
        (decoding, "_TIMED", 2),
        (decoding, "_UNTIMED", 1),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def no_picture(monkeypatch):
    """Draws nothing, because two seconds of CPU are the larger part of a tiny comparison."""
    monkeypatch.setattr(comparison, "draw", lambda *_: None)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(400)))
    return path


def run(models, out, text, **options):
    return compare.run(models, out=out, data=text, progress=False, **TINY | options)


class Smoothed(nn.Module):
    """A user's module: the mean of the tokens so far."""

    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.proj(x.cumsum(1) / count)


def test_all_parts(tmp_path, text, request):
    models = ["llama", "gated-deltanet", Average, Smoothed]
    options = {"repeats": 2, "tasks": ["needle", "multi-hop"], "norm_layers": 1}
    report = run(models, tmp_path, text, **options)
    names = ["llama", "gated-deltanet", "Average", "Smoothed"]
    columns = {name: [row[0] for row in table.rows] for name, table in report.tables.items()}
    assert columns["models"] == columns["loss"] == columns["decode"] == names
    assert columns["recall"] == [*names, "gated-deltanet@1:1", "chance"]
    assert columns["positions"][-2:] == ["ALiBi", "T5"] and len(columns["positions"]) == 12
    assert columns["norms"] == [p for p in norms.PLACEMENTS for _ in range(2)]
    assert set(report.tables["decode"].rows[-1][1:]) == {"-"}  # it has no state
    assert " ± " in report.tables["loss"].rows[0][1] and "± their standard" in report.markdown
    assert (tmp_path / "compare.md").read_text(encoding="utf-8") == report.markdown
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "cells").iterdir()}
    assert len(before) == len(report.results)
    request.getfixturevalue("no_picture")
    again = run(models, tmp_path, text, **options)
    assert again.markdown == report.markdown
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "cells").iterdir()} == before


def test_an_interrupted_comparison_continues(tmp_path, text, monkeypatch, no_picture):
    options = {"parts": ["loss", "norms"]}
    whole = run(["llama"], tmp_path / "whole", text, **options)
    step, calls = norms.gradient_norms, []

    def interrupted(trainer):
        calls.append(trainer)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(trainer)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(norms, "gradient_norms", interrupted)
        run(["llama"], tmp_path / "part", text, **options)
    assert len(list((tmp_path / "part/cells").iterdir())) == 2
    rest = run(["llama"], tmp_path / "part", text, **options)
    assert rest.tables["norms"] == whole.tables["norms"]
    for column in (0, 1, 4):  # without measured speeds
        assert rest.tables["loss"].rows[0][column] == whole.tables["loss"].rows[0][column]


def test_more_models_parts_and_seeds_join(tmp_path, text, no_picture):
    run(["llama"], tmp_path, text, parts=["loss"])
    (first,) = (tmp_path / "cells").iterdir()
    stored = first.read_text()
    report = run(["llama", "gru"], tmp_path, text, parts=["loss", "decode"], repeats=2)
    assert first.read_text() == stored and len(report.results) == 2 * 2 + 2 * 2 * 2
    with pytest.raises(compare.FolderError, match=r"holds results of loss, llama, seed 0 with"):
        run(["llama"], tmp_path, text, parts=["loss"], steps=3)
    first.write_text("{")
    with pytest.raises(compare.FolderError, match=r"is damaged; delete it"):
        run(["llama"], tmp_path, text, parts=["loss"])


def test_former_code_of_a_users_mixer_is_noticed(tmp_path, text, monkeypatch, no_picture):
    path = tmp_path / "my_mixer.py"
    path.write_text("from torch.nn import Linear\ndef mine(dim):\n    return Linear(dim, dim)\n")
    command = ["compare", "--models", f"{path}:mine", "--parts", "loss", "--dim", "16"]
    command += ["--layers", "1", "--steps", "2", "--batch", "2", "--length", "16"]
    command += ["--data", str(text), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert main(command) == 0
    path.write_text(path.read_text().replace("dim, dim", "dim, dim, bias=False"))
    monkeypatch.delitem(sys.modules, "my_mixer")
    assert main(command) == 1


class Backwards(nn.Module):
    """Mixes each token with the mean of all tokens."""

    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        return self.proj(x + x.mean(1, keepdim=True))


def test_modules_that_see_later_tokens_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"Backwards must be causal, but token 15 changes .* 0"):
        run(["llama", Backwards], tmp_path / "out", text, parts=["loss"])
    assert not (tmp_path / "out").exists()


def test_stored_results_outlive_new_fields_of_configs():
    """Fields that differ from their defaults identify a model, and functions their names."""
    attention = Attention.Config(8, 2, window_size=(3, 0))
    assert described(attention) == "Attention.Config(dim=8, num_heads=2, window_size=(3, 0))"
    assert described(replace(attention, window_size=(-1, -1))) == (
        "Attention.Config(dim=8, num_heads=2)"
    )
    nested = described((LlamaConfig(dim=32), attention))
    assert nested == f"(LlamaConfig(dim=32), {described(attention)})"
    assert described(ModuleMixer.Config(8, Smoothed)).endswith(f"make={__name__}.Smoothed)")
    assert described(Frame()) == "Frame()" and described(Frame(dim=16)) == "Frame(dim=16)"


def test_results_are_plain(tmp_path, text):
    report = run(["rnn"], tmp_path, text, parts=["loss"])
    (cell, result), path = report.results[0], tmp_path / "cells/loss_rnn_0.json"
    assert cell.model == "rnn" and len(result["losses"]) == 2
    assert json.loads(path.read_text())["result"] == result
    tokens = TINY["batch"] * TINY["length"]
    operations = result["flops_per_step"] / tokens / 1e6
    assert report.tables["models"].rows[0][2] == f"{operations:.3f}"


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_baselines_decode_token_by_token(cell):
    layer, x = TorchRecurrence(TorchRecurrence.Config(8, cell)), torch.randn(2, 5, 8)
    with torch.no_grad():
        state = layer.new_state(2, 5)
        parts = [layer(part, state=state) for part in x.split([2, 1, 2], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x))
        torch.testing.assert_close(layer(x), layer.o_proj(layer.cell(x)[0]))
    assert state.length == 5
    with pytest.raises(ValueError, match="mask must be None"):
        layer(x, mask=torch.ones(2, 1, 1, 5, dtype=torch.bool))


@pytest.mark.parametrize("encoding", positions.ENCODINGS, ids=lambda e: e.name)
def test_positions_are_causal_and_reach_further(encoding):
    """Later tokens change no earlier logits; a trained model runs on longer texts."""
    model = encoding.config(Frame(dim=16, layers=2), 8).build().eval()
    if encoding.longer is not None:
        encoding.longer(model, 8, 12)
    tokens = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :9], model(changed)[:, :9])
        swapped = model(tokens.flip(1))[:, -1]
    seen = torch.allclose(
        swapped,
        model(torch.cat([tokens.flip(1)[:, 1:2], tokens.flip(1)[:, :1], tokens.flip(1)[:, 2:]], 1))[
            :, -1
        ],
        atol=1e-6,
    )
    assert not seen or encoding.name == "none"


def test_kinds_of_positions():
    frame = Frame(dim=16, layers=2)
    built = {e.name: e.config(frame, 8).build() for e in positions.ENCODINGS}
    assert isinstance(built["sinusoidal"].embed_positions, SinusoidalPositional)
    assert isinstance(built["learned, stretched"].embed_positions, LearnedPositional)
    assert built["RoPE"].rotary is not None and built["none"].rotary is None
    tables = [layer.mixer.bias for layer in built["T5"].layers]
    assert tables[0] is not None and tables[1] is None
    assert built["ALiBi"].layers[0].mixer.config.alibi == 8.0
    for name in positions.SCALINGS:
        assert positions.scaling(name, 2.0, 8, 4).factor == 2.0


@pytest.mark.parametrize("placement", norms.PLACEMENTS.values())
def test_placement_of_norms(placement):
    """Against the formulas of the placements, for one layer."""
    model = norms.placed_config(Frame(dim=16, layers=1), placement).build()
    tokens = torch.randint(256, (1, 6), generator=torch.Generator().manual_seed(0))
    rope = model.rotary(torch.arange(6))
    x = model.embed_tokens(tokens)
    block = model.layers[0]
    for part, more in ((block.mixer, {"rope": rope}), (block.mlp, {})):
        f = lambda y, part=part, more=more: part.layer(y, **more)  # noqa: E731
        if placement == "pre":
            x = x + f(part.norm(x))
        elif placement == "post":
            x = part.norm(x + f(x))
        elif placement == "sandwich":
            x = x + part.post_norm(f(part.norm(x)))
        else:
            x = x + part.norm(f(x))
    x = x if placement == "post" else model.norm(x)
    torch.testing.assert_close(model(tokens), model.lm_head(x))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"parts": ["los"]}, ValueError, "got 'los'; did you mean 'loss'"),
        ({"parts": []}, ValueError, "parts must not be empty"),
        ({"parts": "loss"}, TypeError, "parts must be a list"),
        ({"tasks": ["needles"]}, ValueError, "got 'needles'; did you mean 'needle'"),
        ({"step": 3}, TypeError, "unknown option 'step'; did you mean 'steps'"),
        ({"data": "/no/such/file"}, OSError, "no/such/file"),
        (
            {"models": ["rnn@2:1"], "layers": 4},
            ValueError,
            "layers must be a multiple of 3 for rnn@2:1, got layers=4",
        ),
        ({"recall_length": 8}, ValueError, "MultiHop: length must be >= 28"),
        ({"length": 10**8, "data": __file__}, ValueError, "compare: the text must have at least"),
        (
            {"size": 10, "dim": 8, "data": __file__},
            compare.BudgetError,
            "llama cannot have 10 parameters",
        ),
    ],
)
def test_errors_come_before_any_work(tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        compare.run(**({"models": ["llama"], "out": tmp_path / "out"} | options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--models", "lama"], "did you mean 'llama'?"),
        (["--parts", "los"], "did you mean 'loss'?"),
        (["--repeats", "0"], "must be from 1"),
    ],
)
def test_usage_errors(arguments, text, capsys):
    with pytest.raises(SystemExit):
        main(["compare", *arguments])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--size", "10", "--dim", "8"], "compare: llama cannot have 10 parameters within 2%"),
        (["--models", "llama@1"], "compare: a ratio must be n:m"),
        (["--models", "none.py:Mine"], "compare: cannot read none.py"),
        (["--data", "none.txt"], "compare: cannot use none.txt: No such file"),
        (["--dim", "20"], "dim a multiple of 4 heads"),
        (["--recall-length", "9"], "recall_length is invalid: MultiHop: length must be >= 28"),
    ],
)
def test_errors_of_the_command(arguments, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--models", "llama", *arguments]) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
