"""Copies transformers' functions with replaced globals."""

from __future__ import annotations

from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

from omniattn.hf.common.probe import Forward

__all__ = ["rescoped"]


def rescoped(function: Any, ours: Mapping[str, Forward]) -> FunctionType:
    """Returns a copy of `function` and its decorators that sees `ours` among its globals."""
    inner = getattr(function, "__wrapped__", None)
    scope, cells = function.__globals__, function.__closure__
    if inner is None:
        # Without __name__: torch.compile would use it to look globals up in the module.
        scope = {name: value for name, value in scope.items() if name != "__name__"} | dict(ours)
    else:
        new = rescoped(inner, ours)
        cells = tuple(CellType(new) if cell.cell_contents is inner else cell for cell in cells)
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__ = function.__module__
    if inner is not None:
        copy.__wrapped__ = new  # type: ignore[attr-defined]
    return copy
