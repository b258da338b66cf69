"""The decay rule of docs/adding.md, added as the page says, has the properties of an op."""

import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch

from omniattn import functional, reference, testing
from omniattn.testing.properties import PROPERTIES

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
PAGE = (Path(__file__).parents[2] / "docs/adding.md").read_text()
NAME = "floored_linear_attention"


def examples():
    section = re.search(r"^## A decay rule\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)[1]
    return [textwrap.dedent(e) for e in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]


def run_in(module, text, mode="exec"):
    """Returns NAME as `text` defines it in the module, or the value of `text`."""
    names = dict(vars(importlib.import_module(f"omniattn.{module}")))
    found = eval(compile(text, "docs/adding.md", mode), names)
    return names[NAME] if mode == "exec" else found


@pytest.fixture
def spec(monkeypatch):
    function, definition, spec = examples()
    public = run_in("functional.recurrences.linear_attention", function)
    monkeypatch.setattr(functional, NAME, public, raising=False)
    monkeypatch.setattr(
        reference, NAME, run_in("reference.recurrences.recurrence", definition), raising=False
    )
    return run_in("testing.specs.recurrences.recurrence", spec, "eval")


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_decay_rule_is_right(spec, name, dtype):
    with testing.threads(1):
        for case in spec.cases:
            PROPERTIES[name](spec, case, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gradcheck", F64), ("every_isa", F32), ("compiled", F32), ("exported", F32), ("mapped", F64)],
)
def test_decay_rule_has_the_properties_of_an_op(spec, name, dtype):
    with testing.threads(1):
        PROPERTIES[name](spec, spec.case("tiny"), dtype)
