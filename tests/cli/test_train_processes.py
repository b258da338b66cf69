"""python -m omniattn train on several processes, as torchrun starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omniattn.cli import main
from omniattn.models import load_model
from omniattn.models.checkpoint import read_checkpoint

SMALL = ["--model", "llama-tiny", "--batch", "2", "--length", "32", "--compare", "2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"".join(b"%d squared is %d\n" % (a, a * a) for a in range(2000)))
    return path


@pytest.mark.parametrize("model", ["llama-tiny", "mixtral"])
def test_two_processes_train_as_one(tmp_path, text, model):
    """One of them prints, the losses are the reference's, and one process reads the checkpoint."""
    out = tmp_path / "out"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [
        "--nproc-per-node",
        "2",
        "-m",
        "omniattn",
        "train",
        *SMALL,
        "--model",
        model,
        "--tp",
        "2",
    ]
    done = subprocess.run(
        [*torchrun, *command, "--steps", "3", "--data", text, "--out", out],
        capture_output=True,
        text=True,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out loss") == 1 and ", cpu, tp 2, " in done.stdout
    difference = re.search(r"largest difference in loss (\S+) over 2 steps", done.stdout)
    assert float(difference[1]) < 1e-5
    written = {"checkpoint.safetensors", "loss.png", "sample.txt"}
    written |= {"load.png"} if model == "mixtral" else set()
    assert {f.name for f in out.iterdir()} == written
    tensors, _ = read_checkpoint(out / "checkpoint.safetensors")
    weights = load_model(out / "checkpoint.safetensors").state_dict()
    assert all(tensors[name].shape == t.shape for name, t in weights.items())


def test_a_mesh_of_another_number_of_processes_is_refused(tmp_path, text, capsys, monkeypatch):
    options = ["train", *SMALL, "--data", str(text), "--out", str(tmp_path / "out")]
    assert main([*options, "--dp", "2", "--tp", "2"]) == 1
    assert capsys.readouterr().err == (
        "train: --dp 2 --tp 2: the number of processes must be 4 (torchrun --nproc-per-node 4 -m "
        "omniattn train ...), got 1\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main([*options, "--cp", "2"]) == 1
    assert "--cp 2: the number of processes must be 2 (" in capsys.readouterr().err
    assert main(options) == 1
    assert (
        "no --pp, --dp, --fsdp, --cp, --ep, --tp: the number of processes must be 1 (python "
        in (capsys.readouterr().err)
    )
