"""Unknown keywords of functions and classes are told the name that was meant, on every Python."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from types import FunctionType
from typing import Any

import torch

from omniattn.suggestions import did_you_mean

_UNEXPECTED = re.compile(r"\(\) got an unexpected keyword argument '(\w+)'$")


def explain_keywords(package: str, names: Iterable[str]) -> None:
    """Makes the functions and classes of a package suggest keywords where Python does not."""
    if sys.version_info >= (3, 13):  # whose own errors say "Did you mean 'x'?"
        return
    namespace = vars(sys.modules[package])
    for name in names:
        value = namespace[name]
        if isinstance(value, type):
            for cls in value.__mro__:
                if cls.__module__.startswith("omniattn."):
                    explain_init(cls)
        elif isinstance(value, FunctionType):
            explained = _explained(value)
            for module in (namespace, vars(sys.modules[value.__module__])):
                if module.get(name) is value:
                    module[name] = explained


def explain_init(cls: type) -> None:
    """Makes the constructor of a class do so, if it is a function of the class itself."""
    init = vars(cls).get("__init__")
    layer = hasattr(init, "fields_of")  # whose errors have suggestions
    if sys.version_info < (3, 13) and isinstance(init, FunctionType) and not layer:
        cls.__init__ = _explained(init)  # type: ignore[misc]


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "explains_keywords"):
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            found = _UNEXPECTED.search(str(error))
            if found is None or found[1] not in kwargs:
                raise
            hint = did_you_mean(found[1], inspect.signature(function).parameters)
            raise TypeError(f"{error}{hint}") from None

    # torch.compile counts how often it compiles a code object, which functions must not share.
    code = call.__code__  # type: ignore[attr-defined]
    call.__code__ = code.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    call.explains_keywords = True  # type: ignore[attr-defined]
    return call
