"""python -m omniattn info: what it says of this machine, and what to do where CUDA is not used."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import omniattn
from omniattn.cli import info, main
from omniattn.config import CPU_ISAS
from omniattn.ops.dispatch import library as _library
from omniattn.testing import isa, isas


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """On one line, however it is wrapped."""
    assert main(["info"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_names_versions_kernels_threads_and_libraries(capsys):
    text = printed(capsys)
    for word in (omniattn.__version__, torch.__version__, str(_library.loaded["cpu"])):
        assert word in text
    assert re.search(rf"kernels {isas()[-1]} \(the best this CPU supports.* not its name\)", text)
    assert re.search(rf"threads {torch.get_num_threads()}\b", text)
    assert re.search(r"\d\d native ops", text)
    for op, names in _library.paths("cpu").items():
        assert f"{op}: {', '.join(names)}" in text


def leaves(value: Any) -> Iterator[str]:
    """The words of the text and the numbers of JSON values."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
    elif not isinstance(value, bool):
        yield from str(value).split()


def test_json_has_the_facts_of_the_table(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = printed(capsys)
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    for library in facts["libraries"].values():
        assert f"{len(library.pop('ops'))} native ops" in text
    missing = [leaf for leaf in leaves(facts) if leaf not in text]
    assert not missing
    names = {"omniattn", "torch", "cpu", "kernels", "linear", "levels", "threads", "cuda"}
    assert facts.keys() == names | {"calls", "libraries"}


def test_every_instruction_set_is_explained():
    assert tuple(info._MEANING) == CPU_ISAS


def test_a_lowered_instruction_set_is_named(capsys):
    if len(isas()) == 1:
        pytest.skip("this CPU or build has one only")
    with isa(isas()[0]):
        assert f"kernels {isas()[0]} (although this CPU has {isas()[-1]}" in printed(capsys)


def test_the_built_levels_are_named(capsys):
    built = _library.built_isas()
    assert f"; built for {', '.join(built)}; float64 runs on {built[0]} " in printed(capsys) + " "


@pytest.mark.parametrize(
    ("cuda", "available", "library", "advice"),
    [
        (None, False, False, "install a torch with CUDA"),
        ("13.0", False, True, "see if nvidia-smi lists a GPU"),
        ("13.0", True, False, "install omniattn again, with nvcc 12"),
        ("13.0", True, True, "to build it with the torch that is here now"),
    ],
)
def test_says_what_to_do_for_cuda(capsys, monkeypatch, cuda, available, library, advice):
    monkeypatch.setattr(_library, "cuda_unavailable", "some reason")
    monkeypatch.setattr(_library, "loaded", {"cpu": _library.loaded["cpu"]})
    monkeypatch.setattr(_library, "find", lambda name: name if library else None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert re.search(rf"not used: some reason; .*{advice}", printed(capsys))
