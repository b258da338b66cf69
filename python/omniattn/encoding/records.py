"""Option records: keyword arguments shared by several functions, each list declared once.

A TypedDict has the options' names and types, which type checkers and editors read from
`**options: Unpack[names]`. A NamedTuple with the same fields has their defaults. A function packs a
call's options into this record, and `spelled_out` shows each option in help().
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from omniattn.suggestions import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

#: Function name -> parameter names, for functions decorated by `spelled_out`.
_PARAMETERS: dict[str, list[str]] = {}


def unexpected(
    op: str,
    options: Mapping[str, Any],
    fields: Collection[str],
    advice: Mapping[str, str] = MappingProxyType({}),
) -> TypeError:
    """Returns the error for a call of `op` with an option that is not in `fields`.

    If a parameter has a similar name, the error suggests it, followed by the `advice` for each word
    in the option's name.
    """
    unknown = next(name for name in options if name not in fields)
    hint = did_you_mean(unknown, _PARAMETERS[op])
    if hint:
        hint += "".join(text for word, text in advice.items() if word in unknown)
    return TypeError(f"{op}() got an unexpected keyword argument {unknown!r}{hint}")


def packed(op: str, record: type[R], options: Mapping[str, Any]) -> R:
    """Packs the options of a call of `op`, which takes all fields of the record."""
    make: Any = record
    try:
        found: R = make(**options)
    except TypeError:
        raise unexpected(op, options, make._fields) from None
    return found


def spelled_out(names: type, record: Any, *, last: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Makes help() show each of a function's `**options: Unpack[names]`, with its default.

    They follow the function's own parameters, except for those named in `last`.
    """

    def show(function: F) -> F:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=record._field_defaults[name],
                annotation=hint.__forward_arg__,
            )
            for name, hint in names.__annotations__.items()
        ]
        shown = [p for p in own if p.name not in last]
        shown += options + [p for p in own if p.name in last]
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        function.explains_keywords = True  # type: ignore[attr-defined]
        _PARAMETERS[function.__name__] = [p.name for p in shown]
        return function

    return show
