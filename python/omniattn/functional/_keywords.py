"""Suggests the intended name for unknown keywords of functions and classes, on every Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch

from omniattn.checks.keywords import in_place_of, suggest_keyword


def explain_keywords(package: str, names: Iterable[str]) -> None:
    """Makes the functions and classes of a package suggest keywords, if Python does not."""
    if sys.version_info >= (3, 13):  # its own errors say "Did you mean 'x'?"
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
    """Makes a class's constructor suggest keywords, if the class defines it itself."""
    init = vars(cls).get("__init__")
    layer = hasattr(init, "fields_of")  # errors of layers already have suggestions
    if sys.version_info < (3, 13) and isinstance(init, FunctionType) and not layer:
        cls.__init__ = _explained(init)  # type: ignore[misc]


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "explains_keywords"):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            suggest_keyword(error, function, kwargs)
            raise

    explained: Callable[..., Any] = in_place_of(function, call)
    return explained
