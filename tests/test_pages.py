"""The Python code of README.md and docs/*.md runs, block by block, in one namespace per page."""

import importlib
import os
import re
import shlex
from pathlib import Path

import byte_llama
import libraries
import pytest
import torch
from processes import main, run

from omniattn import cli

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch) -> None:
    """Runs a page where the files that it writes are of no harm."""
    monkeypatch.chdir(tmp_path)


def run_page(path, names=None):
    """Runs the blocks of a page, with `names` that it takes as given; returns all names."""
    text = (ROOT / path).read_text(encoding="utf-8")
    names = {"__name__": path} if names is None else names
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        above = "\n" * (text[: block.start()].count("\n") + 1)  # errors name the line of the page
        exec(compile(above + block[1], path, "exec"), names)
    return names


def distributed(rank, ranks, port):
    """docs/distributed.md as torchrun would start it."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= address | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    run_page("docs/distributed.md")


def test_distributed():
    """DDP, FSDP2 from meta and ExpertParallel give the gradients of one process."""
    run(__file__, "distributed", 2)


@pytest.mark.parametrize(
    "page",
    [
        *("caches", "calculators", "compare", "deploy", "export", "fast", "hybrids", "own_variant"),
        "state_space",
    ],
)
def test_pages_of_layers(page, one_thread):
    run_page(f"docs/{page}.md")


@pytest.mark.parametrize(
    "package",
    ["functional", "modules", "models", "training", "calculate", "compare", "hf", "distributed"],
)
def test_api_reference_lists_every_public_name(package):
    text = (ROOT / f"docs/api/{package}.rst").read_text(encoding="utf-8")
    public = importlib.import_module(f"omniattn.{package}").__all__
    listed = re.findall(r"^\.\. (?:auto\w+|data):: (\w+)$", text, re.MULTILINE)
    for modules in re.findall(r"^\.\. functions:: (.+)$", text, re.MULTILINE):
        for module in modules.split():  # docs/conf.py lists what is public of these
            names = importlib.import_module(f"omniattn.{package}.{module}").__all__
            listed += [name for name in names if name in public]
    assert sorted(listed) == sorted(public)


def test_hf(one_thread):
    names = run_page("docs/hf.md")
    assert names["model"].config._attn_implementation == "omniattn"
    assert names["swapped"]["linear"] == 8


def test_recipes(one_thread):
    pytest.importorskip("peft")
    run_page("docs/recipes.md")


def test_finetune():
    """LoRA and packing with TRL, on a patched model."""
    for package in ("datasets", "peft", "trl"):
        pytest.importorskip(package)
    names = {"__name__": "finetune", "small_model": byte_llama.small_model}
    trainer = run_page("docs/finetune.md", names)["trainer"]
    logged = trainer.state.log_history
    assert trainer.state.global_step == 2
    assert all(0 < entry["loss"] < 10 for entry in logged if "loss" in entry)


ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_migration(one_thread):
    """Asserts that both sides of every row of the tables give the same results."""
    names = run_page("docs/migration.md", {})
    rows = ROW.findall((ROOT / "docs/migration.md").read_text(encoding="utf-8"))
    assert len(rows) > 80
    for row in rows:
        there, here = (eval(side, {**libraries.NAMES, **names}) for side in row)
        torch.testing.assert_close(
            here, there, rtol=1e-4, atol=1e-5, msg=lambda text, row=row: f"{row}: {text}"
        )


def test_readme(one_thread):
    names = run_page("README.md")
    assert names["out"].shape == names["q"].shape == names["q"].grad.shape
    assert names["y"].shape == names["h"].shape
    assert names["model"].config._attn_implementation == "omniattn"
    assert list(names["trained"]) == ["llama", "gated-deltanet", "mamba2"]


#: Options after those of the README that make a command take a second.
SMALL_RUN = {
    "train": "--steps 2 --batch 2 --length 32 --compare 0",
    "compare": "--dim 16 --layers 1 --steps 2 --batch 2 --length 16 --decode-lengths 8",
    "generate": "--max-new-tokens 4",
}


def test_quick_start(one_thread, tmp_path, capsys):
    """The commands of the README train, compare and generate; each finds what the others wrote."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m omniattn (.+)$", text, re.MULTILINE)
    names = [command.split()[0] for command in commands]
    assert names == ["train", "train", "train", "compare", "generate"]
    data = ["--data", str(ROOT / "README.md")]
    for command, name in zip(commands, names, strict=True):
        more = [] if name == "generate" else data
        assert cli.main([*shlex.split(command), *SMALL_RUN[name].split(), *more]) == 0, command
    printed = capsys.readouterr().out
    assert printed.count("held-out loss") == 3 and "def " in printed
    assert (tmp_path / "runs/compare/compare.md").is_file()


if __name__ == "__main__":
    main({"distributed": distributed})
