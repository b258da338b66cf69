"""Single files of packages that cannot be imported without a GPU, loaded by their paths.

A package is where Python finds it, or in the folder `site` of `OMNIATTN_PEERS`:
`pip install --no-deps --target FOLDER/site fla-core flash-linear-attention xlstm rwkv`.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import peers
import pytest


def folder(package: str) -> Path | None:
    """Returns a package's folder, without running its code."""
    found = importlib.util.find_spec(package)
    if found is not None and found.submodule_search_locations:
        return Path(found.submodule_search_locations[0])
    path = Path(peers.FOLDER or "missing", "site", package)
    return path if path.is_dir() else None


def require(package: str, *files: str) -> pytest.MarkDecorator:
    """Skips where the package, or one of its files, is absent."""
    root = folder(package)
    present = root is not None and all((root / file).is_file() for file in files)
    reason = f"{package} is neither installed nor in the folder site of OMNIATTN_PEERS"
    return pytest.mark.skipif(not present, reason=reason)


def load(package: str, file: str) -> ModuleType:
    """A file of a package as a module of its own; of an `__init__.py`, with its folder."""
    root = folder(package)
    assert root is not None
    path = root / file
    name = "_".join(("peer", package, *Path(file).with_suffix("").parts))
    inside = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=inside)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its relative imports look there
    spec.loader.exec_module(module)
    return module
