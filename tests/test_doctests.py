"""The examples in the docstrings do what they say."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import omniattn

# The Python files only: the package's path may also name folders of native libraries.
SOURCES = [str(Path(omniattn.__file__).parent)]
MODULES = [
    m.name for m in pkgutil.walk_packages(SOURCES, "omniattn.") if not m.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=options)
    assert result.failed == 0
