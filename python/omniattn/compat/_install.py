"""Imports of other libraries that find the functions of this package."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from omniattn.compat._names import MODULES, Names, library
from omniattn.suggestions import did_you_mean


class _Module(ModuleType):
    """Module of another library, whose names are looked up in this package."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__
        package = path.partition(".")[0]
        modules = library(package).modules
        names = modules.get(path)
        if names is not None and name in names.there:
            ours = importlib.import_module(MODULES[package])
            value = getattr(ours, names.there[name])
            setattr(self, name, value)
            return value
        if _has_module(f"{path}.{name}"):
            return importlib.import_module(f"{path}.{name}")
        raise AttributeError(f"module {path!r} of omniattn.compat has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        names = library(self.__name__.partition(".")[0]).modules.get(self.__name__)
        if isinstance(value, _Module) and names is not None and name in names.there:
            return  # importing a module does not hide the function of its name
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        modules = library(self.__name__.partition(".")[0]).modules
        names = modules.get(self.__name__)
        return sorted({*super().__dir__(), *(names.there if names else ())})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of the modules of libraries that are not installed.

    It is the last one that Python asks, so that it never hides a library.
    """

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        if not _has_module(name):
            _refuse(name)
            return None
        # Python asks for a module in place of a name that a package lacks, so that all modules are
        # packages: then the error of `from fla.ops import parallel_nsa` has the reason.
        return ModuleSpec(name, self, origin="omniattn.compat", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Module(spec.name, f"Names of {spec.name} in omniattn.compat.")
        found = library(spec.name.partition(".")[0])
        if "." not in spec.name:
            module.__dict__["__version__"] = f"{found.version}+omniattn"
        if spec.name in found.modules:
            module.__dict__["__all__"] = sorted(found.modules[spec.name].there)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: names are looked up when they are read."""


_FINDER = _Finder()


def install(*packages: str) -> dict[str, bool]:
    """Lets imports of libraries that are not installed find the functions of this package.

    After the call, ``from fla.ops.gla import chunk_gla`` imports `omniattn.compat.fla.chunk_gla`,
    and so do the other modules and names that the page `docs/compat.md` lists. Names that this
    package refuses or lacks raise an ImportError with the reason. Installed libraries are never
    replaced. The modules have a ``__version__`` such as ``0.5.2+omniattn``. There is no
    distribution of that name, so `importlib.metadata.version` still raises
    PackageNotFoundError.

    Args:
        packages: import names, such as "fla" and "flash_attn"; all if there are none.

    Returns:
        For each package True if this package provides it, False if it is installed.

    Raises:
        ValueError: a package is unknown.

    Note:
        Call it before other imports: transformers 5, for example, imports functions of fla and
        mamba-ssm when it loads the code of a model, and remembers whether it found them.
    """
    for package in packages:
        if package not in MODULES:
            raise ValueError(
                f"install: packages must be some of {', '.join(MODULES)}, got {package!r}"
                f"{did_you_mean(package, MODULES) if isinstance(package, str) else ''}"
            )
    found = {}
    for package in packages or tuple(MODULES):
        if package not in _FINDER.packages and not _is_installed(package):
            _FINDER.packages.add(package)
        found[package] = package in _FINDER.packages
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    return found


def uninstall() -> None:
    """Undoes :func:`install`: removes its modules from `sys.modules`.

    Names that were imported before keep their values.
    """
    _FINDER.packages.clear()
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name, module in list(sys.modules.items()):
        if isinstance(module, _Module):
            del sys.modules[name]


def _is_installed(package: str) -> bool:
    """Returns True if another finder knows the package, or something else imported it."""
    if package in sys.modules:
        return True
    spec = importlib.util.find_spec(package)
    # A folder of that name without code is a namespace package.
    return spec is not None and spec.origin is not None


def _refuse(name: str) -> None:
    """Raises an ImportError for a name that the list of a library has as refused or absent."""
    path, _, short = name.rpartition(".")
    names = _modules(name).get(path)
    if names is not None and short in names.refused:
        raise ImportError(f"{name} is not in omniattn.compat: {names.refused[short]}", name=name)
    if names is not None and short in names.absent:
        raise ImportError(f"{name} has no counterpart in omniattn.compat yet", name=name)


def _modules(name: str) -> dict[str, Names]:
    return library(name.partition(".")[0]).modules


def _has_module(name: str) -> bool:
    """Returns True for a listed module or a package of one."""
    return any(m == name or m.startswith(f"{name}.") for m in _modules(name))
