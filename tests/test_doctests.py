"""The examples in the docstrings do what they say."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import omniattn

MODULES = [
    m.name
    for m in pkgutil.walk_packages(omniattn.__path__, "omniattn.")
    # native libraries can be in the folders of Python files
    if not m.name.startswith("omniattn.lib") and not m.name.endswith(("__main__", "_kernels"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=options)
    assert result.failed == 0
