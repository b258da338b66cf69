"""The signatures of layers for type checkers: python/omniattn/modules/base/_signatures.pyi.

    python tools/signatures.py [--check]

A layer takes a Config or its fields (`config_or_fields`), which no decorator can say to type
checkers. This writes both forms of each layer from its Config, so that no field is written twice.
"""

from __future__ import annotations

import argparse
import collections.abc
import importlib
import inspect
import pkgutil
import subprocess
import sys
import types
import typing
from pathlib import Path

import omniattn.modules

PAGE = Path(__file__).parents[1] / "python" / "omniattn" / "modules" / "base" / "_signatures.pyi"
HEAD = '"""Written by tools/signatures.py: what the layers take, in both forms."""\n'


def shown(hint: object, modules: set[str]) -> str:
    """A type as source text; the modules that it needs are added to `modules`."""
    if hint is types.NoneType:
        return "None"
    if hint is Ellipsis:
        return "..."
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(shown(each, modules) for each in arguments)
    if origin is collections.abc.Callable:
        taken = [shown(each, modules) for each in arguments[0]]
        modules.add("collections.abc")
        return f"collections.abc.Callable[[{', '.join(taken)}], {shown(arguments[1], modules)}]"
    if origin is not None:
        inner = ", ".join(shown(each, modules) for each in arguments)
        return f"{shown(origin, modules)}[{inner}]"
    if not isinstance(hint, type):
        raise TypeError(f"signatures: a type must be a class or made of them, got {hint!r}")
    if hint.__module__ == "builtins":
        return hint.__name__
    modules.add(hint.__module__)
    return f"{hint.__module__}.{hint.__qualname__}"


def hints_of(function: typing.Any, names: dict[str, object]) -> dict[str, object]:
    """Types of the arguments of a function, of the fields of a Config or of what makes one."""
    target = function.__init__ if inspect.isclass(function) else function
    places = getattr(function, "__mro__", ())
    known = {
        k: v for each in reversed(places) for k, v in vars(sys.modules[each.__module__]).items()
    }
    return typing.get_type_hints(target, known | getattr(target, "__globals__", {}), names)


def forms(layer: type) -> typing.Iterator[tuple[list[inspect.Parameter], dict[str, object]]]:
    """The parameters of both forms after self, and their types."""
    init = vars(layer)["__init__"]
    names = {"Config": layer.Config}
    own = hints_of(init.__wrapped__, names)
    make = init.fields_of
    fields = hints_of(make, names)
    for function, hints in ((init.__wrapped__, own), (init, own | fields)):
        _, *parameters = inspect.signature(function).parameters.values()
        yield parameters, hints


def overload(
    name: str, parameters: list[inspect.Parameter], hints: dict[str, object], modules: set[str]
) -> str:
    parts, keywords = ["self: torch.nn.Module"], False
    for parameter in parameters:
        if parameter.kind == parameter.KEYWORD_ONLY and not keywords:
            parts.append("*")
            keywords = True
        default = "" if parameter.default is parameter.empty else " = ..."
        parts.append(f"{parameter.name}: {shown(hints[parameter.name], modules)}{default}")
    return f"@overload\ndef {name}({', '.join(parts)}) -> None: ...\n"


def layers() -> list[type]:
    """The classes of omniattn.modules that take either form."""
    found = set()
    for each in pkgutil.walk_packages(omniattn.modules.__path__, "omniattn.modules."):
        for value in vars(importlib.import_module(each.name)).values():
            if isinstance(value, type) and hasattr(vars(value).get("__init__"), "fields_of"):
                found.add(value)
    return sorted(found, key=lambda layer: layer.__name__)


def text() -> str:
    """The stub, formatted."""
    modules, body = {"torch"}, []
    for layer in layers():
        body += [overload(layer.__name__, *form, modules) for form in forms(layer)]
    lines = [HEAD, *(f"import {module}" for module in sorted(modules))]
    source = "\n".join([*lines, "from typing import overload\n", *body])
    for command in (["check", "--fix", "-q", "--select", "I"], ["format"]):
        ruff = ["ruff", *command, "--stdin-filename", str(PAGE), "-"]
        done = subprocess.run(ruff, input=source, capture_output=True, text=True, check=True)
        source = done.stdout
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if the stub is out of date")
    if not parser.parse_args().check:
        PAGE.write_text(text())
    elif PAGE.read_text() != text():
        sys.exit(f"{PAGE} is out of date: run python tools/signatures.py")


if __name__ == "__main__":
    main()
