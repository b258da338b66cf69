"""python -m omniattn train as a user meets it: results, interruption, every kind of bad input."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
import torch

from omniattn.cli import main
from omniattn.models import load_model
from omniattn.models.checkpoint import read_checkpoint, write_checkpoint
from omniattn.training import TrainConfig, learning_rate, saved_config

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["--model", "llama-tiny", "--batch", "2", "--length", "32"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"".join(b"%d squared is %d\n" % (a, a * a) for a in range(2000)))
    return path


def train(out: Path, *options: object) -> int:
    return main(["train", *SMALL, "--out", str(out), *map(str, options)])


def start(
    out: Path,
    *options: object,
    limits: dict[int, int] | None = None,
    stdout: int | IO[str] = subprocess.PIPE,
    **env: str,
) -> subprocess.Popen[str]:
    """The command in a process of its own, within limits on its resources."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for kind, value in (limits or {}).items():
            resource.setrlimit(kind, (value, value))

    return subprocess.Popen(
        [sys.executable, "-m", "omniattn", "train", *SMALL, "--out", out, *map(str, options)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | env,
    )


def test_writes_checkpoint_plot_and_sample(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert train(out, "--data", text, "--steps", 12, "--compare", 3) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"held-out loss \d\.\d+ nats per byte after 12 steps, [\d,]+ tokens/s", printed
    )
    difference = re.search(
        r"largest difference in loss (\S+) over 3 steps, (\S+) in the first", printed
    )
    assert difference is not None
    assert float(difference[2]) <= float(difference[1]) < 1e-4
    assert (
        "speed-up not measured: that needs 10 steps and 2 s on both sides, but training" in printed
    )
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    assert load_model(out / "checkpoint.safetensors").config.dim == 64
    assert {f.name for f in out.iterdir()} == {"checkpoint.safetensors", "loss.png", "sample.txt"}


def test_a_model_with_experts_shows_its_load_and_losses(tmp_path, text, capsys):
    out = tmp_path / "run"
    options = ("--model", "deepseek-moe-mtp", "--data", text, "--steps", 2, "--compare", 0)
    assert train(out, *options) == 0
    assert re.search(
        r"step 2/2: .*, mtp \d\.\d{3}, busiest expert \d\.\d\dx, dropped \d+\.\d%, aux 0\.\d+, "
        r"[\d,]+ tokens/s",
        capsys.readouterr().out,
    )
    assert (out / "load.png").read_bytes().startswith(b"\x89PNG")


def test_a_vision_model_shows_its_accuracy(tmp_path, text, capsys):
    pytest.importorskip("sklearn")
    out = tmp_path / "run"
    vit = ["train", "--model", "vit", "--batch", "2", "--out", str(out)]
    assert main([*vit, "--steps", "2", "--compare", "1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"nats per image after 2 steps, accuracy \d+\.\d%, [\d,]+ images/s", printed)
    assert {f.name for f in out.iterdir()} == {"checkpoint.safetensors", "loss.png"}
    assert main([*vit, "--resume", "--data", str(text)]) == 1
    assert "digits" in capsys.readouterr().err
    message = fails(capsys, tmp_path / "o", "--model", "vit")
    assert "vit trains on images, which have no --length" in message


def test_a_self_supervised_model_shows_its_probe(tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--batch", "2", "--steps", "2", "--compare", "1", "--out", str(out)]
    assert main(["train", "--model", "mae", *options]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"squared error per pixel after 2 steps, linear probe \d+\.\d%, ", printed)
    assert {f.name for f in out.iterdir()} == {"checkpoint.safetensors", "loss.png"}


def test_instructions_train_from_a_file(tmp_path, capsys):
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    options = ["--task", "instructions", "--steps", 2, "--compare", 0]
    assert train(out, *options, "--data", data) == 0
    assert "nats per byte of an answer" in capsys.readouterr().out
    assert (out / "sample.txt").read_text().startswith("1+1=[")
    assert train(out, "--resume", "--steps", 3, "--compare", 0) == 0
    assert saved_config(out / "checkpoint.safetensors").task == "instructions"
    assert train(tmp_path / "no", *options) == 1
    assert "instructions need a file with a JSON object in each line" in capsys.readouterr().err


def test_augmentations_without_torchvision_are_named(tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    given = ("--model", "vit", "--batch", 2, "--augment", "mixup")
    out = tmp_path / "run"
    assert main(["train", *map(str, given), "--out", str(out)]) == 1
    assert "Augment: mixup needs torchvision; install with:" in capsys.readouterr().err
    assert main(["train", *map(str, given[:-1]), "mixdown", "--out", str(out)]) == 1
    assert "got names='mixdown'" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("model", ["t5", "bert", "electra"])
def test_a_model_that_restores_text_shows_it_in_brackets(tmp_path, text, model):
    out = tmp_path / "run"
    assert train(out, "--model", model, "--data", text, "--steps", 2, "--compare", 0) == 0
    shown = (out / "sample.txt").read_text(encoding="utf-8")
    assert "[" in shown or model == "electra"  # which may find nothing after two steps


def test_more_tokens_than_positions(tmp_path, text, capsys):
    message = fails(capsys, tmp_path / "o", "--data", text, "--model", "bert", "--length", 513)
    assert "bert has positions for 512 tokens, got --length 513" in message


def test_interrupted_and_resumed_equals_straight(tmp_path, text):
    options = ("--data", text, "--steps", 30, "--compare", 0)
    assert train(tmp_path / "straight", *options) == 0

    process = start(tmp_path / "broken", *options)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("step "):
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    step = re.search(r"interrupted at step (\d+) of 30; .* --resume --out \S+broken\n", rest)
    assert step is not None, rest
    assert 0 < int(step[1]) < 30

    assert train(tmp_path / "broken", "--resume", "--compare", 0) == 0
    a, b = (
        read_checkpoint(tmp_path / run / "checkpoint.safetensors")[0]
        for run in ("straight", "broken")
    )
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_finished_run_goes_on_at_its_final_learning_rate(tmp_path, text, capsys):
    options = ("--data", text, "--compare", 0)
    assert train(tmp_path / "o", *options, "--steps", 25) == 0
    assert train(tmp_path / "o", *options, "--steps", 27, "--resume") == 0
    path = tmp_path / "o" / "checkpoint.safetensors"
    config = saved_config(path)
    assert learning_rate(24, config) == learning_rate(24, TrainConfig(steps=25)) > config.min_lr
    assert learning_rate(25, config) == learning_rate(26, config) == config.min_lr
    assert len(json.loads(read_checkpoint(path)[1]["run"])["losses"]) == 27
    message = fails(capsys, tmp_path / "o", *options, "--steps", 26, "--resume")
    assert "--steps must be at least that of the run to resume, got 26, the run has 27" in message


def test_killed_and_resumed_equals_straight(tmp_path, text):
    options = ("--data", text, "--steps", 40, "--compare", 0)
    assert train(tmp_path / "straight", *options) == 0
    process = start(tmp_path / "broken", *options)
    checkpoint = tmp_path / "broken" / "checkpoint.safetensors"
    while not checkpoint.exists():
        assert process.poll() is None
    process.kill()
    process.communicate()
    assert train(tmp_path / "broken", *options, "--resume") == 0
    a, b = (
        read_checkpoint(tmp_path / run / "checkpoint.safetensors")[0]
        for run in ("straight", "broken")
    )
    assert all(torch.equal(a[name], b[name]) for name in a)


def fails(capsys: pytest.CaptureFixture[str], out: Path, *options: object) -> str:
    assert train(out, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("train: ")
    assert error.count("\n") == 1
    return error


def test_missing_empty_and_tiny_text(tmp_path, capsys):
    assert "No such file" in fails(capsys, tmp_path / "o", "--data", tmp_path / "none")
    (tmp_path / "empty").touch()
    assert "got 0 bytes" in fails(capsys, tmp_path / "o", "--data", tmp_path / "empty")
    (tmp_path / "tiny").write_bytes(b"x" * 131)
    message = fails(capsys, tmp_path / "o", "--data", tmp_path / "tiny")
    assert "at least 132 bytes" in message
    assert "got 131 bytes" in message
    (tmp_path / "folder").mkdir()
    assert "got 0 bytes" in fails(capsys, tmp_path / "o", "--data", tmp_path / "folder")
    assert not (tmp_path / "o").exists()


def test_the_smallest_text_trains(tmp_path):
    (tmp_path / "text").write_bytes(b"ab" * 66)
    assert train(tmp_path / "o", "--data", tmp_path / "text", "--steps", 2, "--compare", 0) == 0


def test_output_folder_that_cannot_be_written(tmp_path, text, capsys):
    (tmp_path / "file").touch()
    message = fails(capsys, tmp_path / "file" / "out", "--data", text)
    assert "cannot write to" in message
    assert "cannot write to" in fails(capsys, tmp_path / ("o" * 300), "--data", text)


def test_existing_run_is_not_overwritten(tmp_path, text, capsys):
    assert train(tmp_path / "o", "--data", text, "--steps", 2, "--compare", 0) == 0
    assert "--resume" in fails(capsys, tmp_path / "o", "--data", text)


def test_resume_checks_run_options_and_text(tmp_path, text, capsys):
    assert "No such file" in fails(capsys, tmp_path / "none", "--data", text, "--resume")
    options = ("--data", text, "--steps", 2, "--compare", 0)
    assert train(tmp_path / "o", *options) == 0
    assert "--seed must be that of the run" in fails(
        capsys, tmp_path / "o", *options, "--resume", "--seed", 3
    )
    text.write_bytes(text.read_bytes() + b"more")
    assert "other data" in fails(capsys, tmp_path / "o", *options, "--resume")


def test_a_run_remembers_its_data(tmp_path, text, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path / "o", "--data", "text", "--steps", 2, "--compare", 0) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume = ("--resume", "--compare", 0)
    assert train(tmp_path / "o", *resume, "--steps", 3) == 0

    moved = text.rename(tmp_path / "moved")
    message = fails(capsys, tmp_path / "o", *resume)
    assert f"cannot read {text}: No such file" in message
    assert "give the new path of the run's data with --data" in message
    assert train(tmp_path / "o", *resume, "--data", moved) == 0
    assert train(tmp_path / "o", *resume, "--data", moved, "--steps", 4) == 0
    assert train(tmp_path / "o", *resume, "--steps", 5) == 0  # the new place is remembered
    (tmp_path / "other").write_bytes(moved.read_bytes()[::-1])
    message = fails(capsys, tmp_path / "o", *resume, "--data", tmp_path / "other")
    assert f"was trained on other data than {tmp_path / 'other'} has now" in message


@pytest.mark.parametrize("damage", ["cut", "flipped", "step", "name", "other"])
def test_damaged_checkpoint_is_named_and_kept(tmp_path, text, capsys, damage):
    assert train(tmp_path / "o", "--data", text, "--steps", 2, "--compare", 0) == 0
    path = tmp_path / "o" / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[-9] ^= 4
    elif damage == "step":  # 2 to 3
        key = rb'"step\": '
        content[content.index(key) + len(key)] ^= 1
    elif damage == "name":
        content[content.index(b"optimizer/step") + len("optimizer/ste")] ^= 1
    else:
        content[:] = b"not a checkpoint"
    path.write_bytes(content)
    assert "damaged" in fails(capsys, tmp_path / "o", "--data", text, "--resume")
    assert path.read_bytes() == content


def test_checkpoint_of_another_version_is_named(tmp_path, text, capsys):
    assert train(tmp_path / "o", "--data", text, "--steps", 1, "--compare", 0) == 0
    path = tmp_path / "o" / "checkpoint.safetensors"
    tensors, metadata = read_checkpoint(path)
    run = json.loads(metadata["run"])
    run["config"]["new_option"] = 1
    write_checkpoint(path, tensors, metadata | {"run": json.dumps(run)})
    assert "is of another version" in fails(capsys, tmp_path / "o", "--data", text, "--resume")


def test_full_disk_keeps_the_last_checkpoint(tmp_path, text):
    assert train(tmp_path / "o", "--data", text, "--steps", 20, "--compare", 0) == 0
    limits = {resource.RLIMIT_FSIZE: 100_000}
    process = start(tmp_path / "full", "--data", text, "--steps", 20, limits=limits)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 1, out
    assert re.search(r"train: cannot write .* at step 2: .* \(checkpoint: none yet\)", errors)
    assert list((tmp_path / "full").iterdir()) == []


def test_more_than_fits_into_memory(tmp_path, text):
    options = ("--data", text, "--batch", 2 * 10**9)
    process = start(tmp_path / "o", *options, limits={resource.RLIMIT_AS: 8 * 2**30})
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors == (
        "train: not enough memory for --batch 2000000000 and --length 32; take smaller ones\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_standard_output_that_cannot_be_written(tmp_path, text):
    with open("/dev/full", "w") as full:
        process = start(tmp_path / "o", "--data", text, stdout=full, PYTHONUNBUFFERED="")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors == "train: cannot write to standard output: No space left on device\n"


def test_standard_output_that_lacks_characters(tmp_path, text):
    options = ("--data", text, "--steps", 1, "--compare", 0)
    process = start(tmp_path / "o", *options, PYTHONIOENCODING="ascii")
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "?" in printed.partition("sample:")[2]


def test_a_speed_up_of_what_was_timed_for_long_enough(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setattr("omniattn.cli.train._TIMED_SECONDS", 1e-3)
    options = ("--data", text, "--steps", 12, "--compare", 10)
    assert train(tmp_path / "o", *options) == 0
    assert re.search(r"[\d,]+ tokens/s, speed-up \d+\.\dx", capsys.readouterr().out)
    assert train(tmp_path / "o", *options, "--resume") == 0  # trains no more
    assert "training ran 0 steps" in capsys.readouterr().out


def test_a_device_that_is_not_there(tmp_path, text, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    message = fails(capsys, tmp_path / "o", "--data", text, "--device", "cuda")
    assert "--device cuda" in message


def test_a_device_without_memory(tmp_path, text, capsys):
    message = fails(capsys, tmp_path / "o", "--data", text, "--device", "meta")
    assert "--device meta: it must be cpu or cuda" in message
    assert not (tmp_path / "o").exists()  # which --resume would take for the last run


def test_a_backend_of_another_device(tmp_path, text, capsys):
    message = fails(capsys, tmp_path / "o", "--data", text, "--backend", "cuda")
    assert "--backend cuda with --device cpu" in message
    assert not (tmp_path / "o").exists()


def test_missing_extra_is_named(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setattr("omniattn.cli.errors.importlib.util.find_spec", lambda name: None)
    message = fails(capsys, tmp_path / "o", "--data", text)
    assert "pip install 'omniattn[train]'" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "must be from 1 to"),
        (["--steps", "x"], "--steps: must be an integer, got 'x'"),
        (["--compare", "1.5"], "--compare: must be an integer, got '1.5'"),
        (["--batch", str(2**31)], "must be from 1 to"),
        (["--model", "gpt"], "--model: must be one of llama, llama-tiny, "),
        (["--config", "run.py"], "--config: must be a Python file and a name in it"),
        (["--config", "run.py:a-b"], "--config: must be a Python file and a name in it"),
        (["--seed", "a"], "--seed: must be an integer, got 'a'"),
        (["--seed", str(2**63)], "must fit into 64 bits"),
        (["--data", ""], "must not be empty"),
    ],
)
def test_wrong_options_are_a_usage_error(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as caught:
        train(tmp_path / "o", *options)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("omniattn train: ") and message in line


def test_an_interrupt_during_imports_leaves_no_traceback(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("omniattn.load", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "info: interrupted\n"


CONFIG_FILE = """
from dataclasses import dataclass, replace
import torch
from omniattn.models import PRESETS, BlocksConfig
from omniattn.modules import DecoderBlock, GatedMLP, RMSNorm
from omniattn.training import TrainConfig
from neighbor import Average

MODEL = BlocksConfig(
    dim=32,
    num_layers=1,
    blocks=(DecoderBlock.Config(Average.Config(32), GatedMLP.Config(32, 48), RMSNorm.Config(32)),),
)
RUN = TrainConfig(MODEL, steps=3, batch=2, length=17, lr=1e-2)
TINY = PRESETS["llama-tiny"]
NUMBER = 1
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Configs with a mixer that a file of the same folder defines."""
    support = Path(__file__).parents[1] / "support" / "small"
    (tmp_path / "neighbor.py").write_text((support / "average_mixer.py").read_text())
    path = tmp_path / "own_configs.py"
    path.write_text(CONFIG_FILE)
    return path


#: Runs one command after another in a process and prints their exit codes.
COMMANDS = """
import json, sys
from omniattn.cli import main
print("exits", [main(arguments) for arguments in json.loads(sys.argv[1])])
"""


def test_a_run_of_a_config_in_a_file(tmp_path, text, config_file):
    """Options are on top of it, and other processes resume it with the file, not without."""
    out = tmp_path / "run"

    def started(*commands):
        train = ["train", "--out", str(out), "--compare", "0"]
        given = json.dumps([[*train, *options] for options in commands])
        command = [sys.executable, "-c", COMMANDS, given]
        return subprocess.run(command, capture_output=True, text=True)

    given = ("--config", f"{config_file}:RUN")
    first = started([*given, "--data", str(text), "--batch", "3"])
    assert "exits [0]" in first.stdout, first.stderr
    assert first.stdout.startswith("BlocksConfig: ")
    run = json.loads(read_checkpoint(out / "checkpoint.safetensors")[1]["run"])
    assert (run["step"], run["config"]["batch"], run["config"]["lr"]) == (3, 3, 1e-2)

    resume = ("--resume", "--steps", "4")
    later = started(resume, [*resume, *given], ["--resume", "--config", f"{config_file}:TINY"])
    assert "exits [1, 0, 1]" in later.stdout, later.stderr
    assert "after 4 steps" in later.stdout
    without, other = later.stderr.splitlines()
    assert "type='Average'" in without
    assert "--config must have the model of the run to resume" in other


def test_a_config_of_a_model_takes_the_recipe_of_its_kind(tmp_path, text, capsys):
    path = tmp_path / "plain_config.py"
    path.write_text("from omniattn.models import PRESETS\nTINY = PRESETS['llama-tiny']\nN = 1\n")
    options = ["--data", str(text), "--steps", "1", "--length", "16", "--compare", "0"]

    def tried(reference, *more):
        return main(["train", "--config", reference, "--out", str(tmp_path / "o"), *options, *more])

    assert tried(f"{path}:TINY") == 0
    assert saved_config(tmp_path / "o/checkpoint.safetensors").model_name == "LlamaConfig"
    capsys.readouterr()
    for reference, message in (
        (f"{path}:N", "N must be a TrainConfig or the config of a model, got int"),
        (f"{path}:TINI", "has no TINI; did you mean 'TINY'?"),
        (f"{tmp_path}/none.py:M", "cannot read"),
        (f"{tmp_path}/none.txt:M", "must name a file *.py"),
        (f"{tmp_path}/torch.py:M", "must not have the name of a module that is in use"),
    ):
        assert tried(reference, "--out", str(tmp_path / "p")) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert tried(f"{path}:TINY", "--model", "llama", "--out", str(tmp_path / "p")) == 1
    assert "--config and --model" in capsys.readouterr().err
