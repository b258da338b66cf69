"""python -m omniattn calc: tables, JSON, plots, and errors."""

import json
import re

import pytest

from omniattn.calculate.roofline import DEVICES
from omniattn.cli import main
from omniattn.models import PRESETS, save_model


def test_a_table_of_a_published_model(capsys):
    assert main(["calc", "llama-3-8b", "--context", "32768", "--dtype", "bf16"]) == 0
    text = capsys.readouterr().out
    for part in ("8,030,261,248 (8.03 G)", "4 GiB", "131,072 bytes", "32 x 128 MiB"):
        assert part in text


def test_models_side_by_side(capsys, tmp_path):
    path = tmp_path / "calc.png"
    command = ["calc", "--compare", "llama", "mixtral", "mamba", "bert", "vit", "t5"]
    assert main([*command, "--context", "128", "--plot", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 x 128 tokens, bfloat16"
    assert lines[1].split() == ["llama", "mixtral", "mamba", "bert", "vit", "t5"]
    rows = {line.split("  ")[0]: line for line in lines[2:]}
    assert rows["cache"].split().count("-") == 2  # bert and vit keep none
    assert "2 of 8 in 4 layers" in rows["experts"]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_length_of_the_source(capsys):
    assert main(["calc", "t5", "--context", "16", "--source", "48"]) == 0
    assert re.search(r"^source +48 tokens$", capsys.readouterr().out, re.MULTILINE)
    assert main(["calc", "llama", "--context", "16", "--source", "48"]) == 1
    assert "llama: report: source_tokens must be None" in capsys.readouterr().err


def test_json_with_ceilings_and_patterns(capsys):
    options = ["--peak", "1", "--bandwidth", "100", "--context", "64", "--patterns", "--json"]
    assert main(["calc", "llama-tiny", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    model = found["models"]["llama-tiny"]
    assert model["context"] == 64
    assert model["roofline"]["decode"]["ridge"] == 10.0
    assert model["step"]["uncached"] == model["flops"]["forward"]
    assert found["patterns"][0]["pairs"] == 64 * 65 // 2


def test_a_rank_of_a_mesh(capsys, tmp_path):
    sizes = ["--context", "8192", "--batch", "64", "--mesh", "fsdp=64,tp=8"]
    rates = ["--peak", "990", "--bandwidth", "3350", "--link", "50"]
    assert main(["calc", "llama-3-8b", *sizes, *rates]) == 0
    out = capsys.readouterr().out
    assert "rank of a mesh   1 of 512\n  parameters     15,691,840 (15.7 M)\n" in out
    assert "  sends, tp      14.22 GiB per step\n" in out and "  time, tp       305.351 ms\n" in out
    assert main(["calc", "llama-3-8b", *sizes[:-1], "tp=3"]) == 1
    assert (
        "must divide num_heads of Attention, got num_heads=32, ranks=3" in capsys.readouterr().err
    )
    path = tmp_path / "ranks.png"
    both = ["--compare", "llama-3-8b", "mamba-130m", "--plot", str(path), "--device", "h100"]
    assert main(["calc", *both, *sizes[:-1], "fsdp=8,cp=8"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"sends, cp  .*GiB per step  .*MiB per step", out) and "time, cp" in out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["calc", "llama-3-8b", *sizes, "--device", "h100", "--link", "50"]) == 0
    assert "  time, tp       305.351 ms\n" in capsys.readouterr().out  # --link is for all kinds
    for device in DEVICES:
        assert main(["calc", "llama", "--device", device]) == 0
    for mesh in ("dp", "dp=2,dp=2"):
        with pytest.raises(SystemExit):
            main(["calc", "llama-3-8b", "--mesh", mesh])
        assert f"must be as dp=8,tp=4, got {mesh!r}" in capsys.readouterr().err


def test_patterns_alone(capsys):
    assert main(["calc", "--patterns", "--context", "256"]) == 0
    assert "DetSA" in capsys.readouterr().out


@pytest.mark.parametrize("folder", [True, False])
def test_a_run_of_this_package(capsys, tmp_path, folder):
    model = PRESETS["llama-tiny"].build()
    path = tmp_path / "checkpoint.safetensors"
    save_model(model, path)
    assert main(["calc", str(tmp_path if folder else path), "--context", "32", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"].values()
    assert found["parameters"]["total"] == model.config.num_parameters


@pytest.mark.parametrize("folder", [True, False])
def test_a_config_of_transformers(capsys, tmp_path, folder):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaConfig(**sizes, intermediate_size=96, vocab_size=97).save_pretrained(tmp_path)
    path = tmp_path if folder else tmp_path / "config.json"
    assert main(["calc", str(path), "--context", "32", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"].values()
    assert model["architecture"] == "llama"
    assert model["parameters"]["total"] == 2 * 97 * 48 + 48 + 2 * (4 * 48**2 + 3 * 48 * 96 + 96)


def test_a_config_of_a_python_file(capsys, tmp_path):
    path = tmp_path / "own_sizes.py"
    path.write_text(
        "from omniattn.models import LlamaConfig\n"
        "from omniattn.training import TrainConfig\n"
        "SMALL = LlamaConfig(dim=48, num_layers=1, num_heads=2)\n"
        "RUN = TrainConfig(model=SMALL)\n"
    )
    assert main(["calc", f"{path}:SMALL", f"{path}:RUN", "--context", "16", "--json"]) == 0
    small, run = json.loads(capsys.readouterr().out)["models"].values()
    assert small == run
    assert small["cache"]["layers"] == [16 * 2 * 48 * 2]
    assert main(["calc", f"{path}:OTHER"]) == 1
    assert "has no OTHER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "needs a model, --compare or --patterns"),
        (["lama-3-8b"], r"got config='lama-3-8b'; did you mean 'llama-3-8b'\?"),
        (["llama", "--peak", "1"], "--peak and --bandwidth must be given together"),
        (["gpt2-small", "--context", "2000"], "at most 1024, .* got tokens=2000"),
    ],
)
def test_errors_name_what_is_wrong(capsys, arguments, text):
    assert main(["calc", *arguments]) == 1
    assert re.search(text, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "must be JSON"),
        ("{}", "must name its model_type"),
        ('{"model_type": "opt"}', "got model_type='opt'"),
        (
            '{"model_type": "owl"}',
            "model_type must be one that transformers knows, got model_type='owl'",
        ),
    ],
)
def test_bad_files(capsys, tmp_path, content, text):
    (tmp_path / "config.json").write_text(content)
    assert main(["calc", str(tmp_path)]) == 1
    assert re.search(text, capsys.readouterr().err)


@pytest.mark.parametrize("value", ["0", "inf", "many"])
def test_ceilings_are_numbers(capsys, value):
    with pytest.raises(SystemExit):
        main(["calc", "llama", "--peak", value])
    assert "--peak: must be" in capsys.readouterr().err
