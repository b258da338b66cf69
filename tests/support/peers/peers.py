"""Runs test functions that other projects publish on our functions.

`OMNIATTN_PEERS` names a folder with checkouts of the projects, and `site`, a folder with packages
that their tests import. `OMNIATTN_PEERS_MOST` raises the number of cases that run of each test
function. Nothing of theirs is part of this repository.
"""

import collections
import contextlib
import importlib.abc
import importlib.machinery
import inspect
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.flop_counter  # looks for triton when it is loaded

from omniattn.compat._names import MODULES, library

FOLDER = os.environ.get("OMNIATTN_PEERS")
MOST = int(os.environ.get("OMNIATTN_PEERS_MOST", 0))
#: Names of triton with which files of kernels can be read for the definitions in them.
TRITON = {
    "jit": lambda function=None, **_: function or (lambda each: each),
    "autotune": lambda **_: lambda function: function,
    "heuristics": lambda _: lambda function: function,
    "Config": lambda *_, **__: None,
}


class Missing:
    """Stands for a name of a peer that we lack: a test that uses it is skipped, and the name listed
    at the end of the run."""

    def __init__(self, name: str, *_: object) -> None:
        self.__dict__["missing"] = name

    def _skip(self, *_: object, **__: object) -> Any:
        pytest.skip(f"{self.missing} has no counterpart")

    __call__ = __getitem__ = _skip

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.missing}.{name}")


class _Stub(ModuleType):
    """A module of a peer that has our functions under its names."""

    names: Mapping[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.names.get(name) or Missing(name)


def compat_names(module: str) -> Mapping[str, object]:
    """Returns what `omniattn.compat` has under the names of a library, those of `module` first."""
    package = module.partition(".")[0]
    if package not in MODULES:
        return {}
    ours, modules = importlib.import_module(MODULES[package]), library(package).modules
    first = [modules[module].there] if module in modules else []
    words = collections.ChainMap(*first, *(names.there for names in modules.values()))
    return {name: getattr(ours, word) for name, word in words.items()}


class Peer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A checkout whose tests import `packages`, in place of which they find `names`, then those of
    `omniattn.compat`. A name with a module is that of this module only.

    The modules in `real` come from the checkout, from the files named there. Texts in `replaced`
    are read as others, such as sizes that would take minutes on a CPU.
    """

    def __init__(
        self,
        folder: str,
        packages: tuple[str, ...],
        names: Mapping[str, object],
        real: Mapping[str, str],
        replaced: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.root = Path(FOLDER or "missing", folder)
        self.packages, self.names, self.real = packages, names, real
        self.replaced = {'"cuda"': '"cpu"', "'cuda'": "'cpu'", **replaced}
        self._loaded: dict[str, ModuleType] = {}

    @property
    def present(self) -> bool:
        return self.root.is_dir()

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.split(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Stub(spec.name)
        paths = ((path.rpartition("."), value) for path, value in self.names.items())
        own = {name: value for (place, _, name), value in paths if place == spec.name}
        triton = TRITON if spec.name == "triton" else {}
        module.names = collections.ChainMap(own, self.names, compat_names(spec.name), triton)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self.real:
            self._run(module, self.real[module.__name__])

    def _run(self, module: ModuleType, path: str) -> None:
        text = (self.root / path).read_text()
        for theirs, ours in self.replaced.items():
            text = text.replace(theirs, ours)
        module.__file__ = str(self.root / path)
        exec(compile(text, module.__file__, "exec"), vars(module))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Imports of the peer find this; what it reads of a GPU is that of a large one."""
        ours = {n: m for n, m in sys.modules.items() if n.split(".")[0] in self.packages}
        for name in ours:
            del sys.modules[name]
        sys.modules.update(self._loaded)
        sys.meta_path.insert(0, self)
        sys.path.insert(0, str(self.root.parent / "site"))
        properties = mock.Mock(total_memory=1 << 40, multi_processor_count=1, warp_size=32)
        deterministic = torch.are_deterministic_algorithms_enabled()
        try:
            with (
                mock.patch("torch.cuda.get_device_capability", lambda *_: (8, 0)),
                mock.patch("torch.cuda.get_device_properties", lambda *_: properties),
                mock.patch("torch.cpu.get_device_properties", lambda *_: properties, create=True),
                mock.patch("torch.cuda.synchronize", lambda *_: None),
                mock.patch("torch.cuda.current_device", lambda: 0),
                mock.patch.dict(vars(pytest.mark), flaky=lambda **_: lambda function: function),
            ):
                yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            sys.meta_path.remove(self)
            sys.path.remove(str(self.root.parent / "site"))
            for name in [n for n in sys.modules if n.split(".")[0] in self.packages]:
                self._loaded[name] = sys.modules.pop(name)
            sys.modules.update(ours)

    def load(self, path: str) -> ModuleType:
        module = ModuleType(Path(path).stem)
        with self.installed():
            self._run(module, path)
        return module

    def cases(
        self,
        path: str,
        most: int,
        fits: Callable[..., bool] = lambda **_: True,
        other: Mapping[str, str] = MappingProxyType({}),
    ) -> list:
        """Up to `most` (or MOST, if that is larger) cases of each test function of a file, a fixed
        random choice of those that `fits` (by their arguments) lets through.

        A case is expected to fail for the reason in `other` if a key there ends its id, or is in
        the id without the number."""
        if not self.present:
            return []
        module, found = self.load(path), []
        for name, function in vars(module).items():
            if not name.startswith("test") or not callable(function):
                continue
            able = [case for case in _expand(function) if fits(**case[0])]
            chosen = random.Random(name).sample(range(len(able)), min(max(most, MOST), len(able)))
            for i in sorted(chosen):
                arguments, marks = able[i]
                case = f"{module.__name__}-{name}-{i}"
                named = case.rpartition("-")[0]
                reasons = [r for key, r in other.items() if key in named or case.endswith(key)]
                known = [pytest.mark.xfail(reason=reason) for reason in reasons]
                found.append(pytest.param(function, arguments, marks=[*marks, *known], id=case))
        return found

    def run(self, function: Callable[..., None], arguments: dict[str, object]) -> None:
        torch.manual_seed(0)  # few of their tests have a seed
        with self.installed():
            try:
                function(**arguments)
            except NotImplementedError as error:  # the answer to what we lack, never wrong results
                pytest.skip(str(error))


def _expand(function: Callable) -> list[tuple[dict[str, object], tuple]]:
    """The arguments and the marks of each case of a test function that has no fixtures."""
    axes, marks = [], []
    for mark in getattr(function, "pytestmark", ()):
        if mark.name != "parametrize":
            marks += [mark] * (mark.name in ("skip", "skipif"))
            continue
        names = mark.args[0]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        axes.append([(names, *_values(value, len(names))) for value in mark.args[1]])
    found = []
    for choice in itertools.product(*axes):
        arguments = {
            n: v for names, values, _ in choice for n, v in zip(names, values, strict=True)
        }
        own = [m for *_, of in choice for m in of if m.name in ("skip", "skipif")]
        found.append((arguments, (*marks, *own)))
    parameters = inspect.signature(function).parameters.values()
    wanted = {p.name for p in parameters}
    least = {p.name for p in parameters if p.default is p.empty}
    return [each for each in found if least <= set(each[0]) <= wanted]


def _values(value: Any, count: int) -> tuple[tuple, tuple]:
    """The values of one entry of parametrize, and its marks."""
    marks = ()
    if hasattr(value, "marks"):
        value, marks = value.values, tuple(value.marks)
        return tuple(value), tuple(getattr(m, "mark", m) for m in marks)
    return (tuple(value) if count > 1 else (value,)), marks


def require(peer: Peer) -> pytest.MarkDecorator:
    """Skips where there is no checkout."""
    reason = f"OMNIATTN_PEERS names no folder with a checkout of {peer.root.name}"
    return pytest.mark.skipif(not peer.present, reason=reason)
