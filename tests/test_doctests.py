"""The examples in the docstrings do what they say."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import omniattn

MODULES = [
    m.name
    for m in pkgutil.walk_packages(omniattn.__path__, "omniattn.")
    # native libraries can lie beside the Python files
    if not m.name.startswith("omniattn.lib") and not m.name.endswith(("__main__", "_kernels"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=options)
    assert result.failed == 0


def test_examples_of_the_readme():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", readme.partition("## Use")[2], re.DOTALL)
    functions, modules, *_ = examples
    names = {}
    exec(functions + modules, names)
    assert names["out"].shape == names["q"].shape
    assert names["q"].grad.shape == names["q"].shape
    assert names["y"].shape == names["h"].shape
