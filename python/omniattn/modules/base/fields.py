"""Kinds of config fields: annotations that restrict the values of a type."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterable
from numbers import Integral
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin

from omniattn.checks.arguments import (
    BACKENDS,
    require_int,
    require_number,
    require_pair,
    shown,
)
from omniattn.functional.layers.norm import CASTINGS

_LARGEST = sys.float_info.max


class Kind(NamedTuple):
    """Set of valid values of a field.

    check: raises an error if `value` of field `name` in the config of `op` is invalid.
    of_numbers: True if valid values are numbers; `check` is then called with numbers only.
    """

    check: Callable[[str, str, Any], None]
    of_numbers: bool = True


def _size(op: str, name: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{op}: {name} must be an integer >= {least}, got {name}={shown(value)}")
    require_int(op, name, value)


def _require_finite(op: str, name: str, value: Any) -> None:
    if not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{op}: {name} must be finite, got {name}={value}")


def _signed_int(op: str, name: str, value: Any) -> None:
    if isinstance(value, Integral):
        require_int(op, name, value)


def _signed(op: str, name: str, value: Any) -> None:
    _signed_int(op, name, value)
    if not isinstance(value, Integral):
        _require_finite(op, name, value)


def check_number(op: str, name: str, value: Any) -> None:
    """Requires that a number without a kind is finite and at least 0."""
    if isinstance(value, Integral):
        require_int(op, name, value, 0)
    else:
        _require_finite(op, name, value)
        require_number(op, name, value, 0)


def _positive(op: str, name: str, value: Any) -> None:
    _require_finite(op, name, value)
    require_number(op, name, value, above=0)


def _probability(op: str, name: str, value: Any) -> None:
    if isinstance(value, Integral):
        check_number(op, name, value)
    _require_finite(op, name, value)
    require_number(op, name, value, 0, 1)


def _epsilon(op: str, name: str, value: Any) -> None:
    if isinstance(value, Integral):
        require_int(op, name, value, 0)
    elif not 0 <= value <= _LARGEST:
        raise ValueError(f"{op}: {name} must be finite and >= 0, got {name}={value}")


def _limit(op: str, name: str, value: Any) -> None:
    if not value >= 0:
        raise ValueError(f"{op}: {name} must be a number >= 0, got {name}={value}")


def _window(op: str, name: str, value: Any) -> None:
    require_pair(op, name, value, -1)


def _one_of(choices: Iterable[str | None]) -> Kind:
    def check(op: str, name: str, value: Any) -> None:
        if value not in choices:
            raise ValueError(f"{op}: {name} must be one of {choices}, got {name}={shown(value)}")

    return Kind(check, of_numbers=False)


# Numbers without a kind must be finite and at least 0.
#: Size, at least 1.
Size = Annotated[int, Kind(_size)]
#: Size of an optional part, at least 0.
SizeOrZero = Annotated[int, Kind(functools.partial(_size, least=0))]
#: Integer that may be negative.
SignedInt = Annotated[int, Kind(_signed_int)]
#: Number that may be negative.
Signed = Annotated[float, Kind(_signed)]
#: Number above 0.
Positive = Annotated[float, Kind(_positive)]
#: Number in [0, 1].
Probability = Annotated[float, Kind(_probability)]
#: Small number that prevents division by zero; at least 0.
Epsilon = Annotated[float, Kind(_epsilon)]
#: Number at least 0, infinite for no limit.
Limit = Annotated[float, Kind(_limit)]
#: Number of visible keys to the left and right of a query, -1 for all.
WindowSize = Annotated[tuple[int, int], Kind(_window, of_numbers=False)]
#: Rounding of a norm's intermediate results.
Casting = Annotated[str, _one_of(CASTINGS)]
#: Backend of all ops of a layer.
Backend = Annotated[str | None, _one_of(BACKENDS)]

_KINDS = {name: kind for name, kind in globals().items() if get_args(kind)}
_NAMES = re.compile(rf"(?:\w+\.)*\b({'|'.join(_KINDS)})\b(?!\.)")


class Fields:
    """Base class of configs whose fields may be annotated with the kinds of this module.

    The kinds are moved from the annotations to `_kinds`, so that signatures and errors show plain
    types: `int` for `Size`.
    """

    _kinds: ClassVar[MappingProxyType[str, Kind]] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        annotations, kinds = inspect.get_annotations(cls), dict[str, Kind]()
        for base in reversed(cls.__bases__):
            kinds |= getattr(base, "_kinds", {})
        for name, annotation in annotations.items():
            annotations[name], kind = _split(annotation)
            kinds.pop(name, None)
            if kind is not None:
                kinds[name] = kind
        cls.__annotations__ = annotations
        cls._kinds = MappingProxyType(kinds)


def _split(annotation: Any) -> tuple[Any, Kind | None]:
    """Returns the annotation with kinds replaced by their types, and its kind if it has one."""
    if isinstance(annotation, str):
        found = _NAMES.search(annotation)
        if found is None:
            return annotation, None
        kind_type, kind = get_args(_KINDS[found[1]])
        return annotation.replace(found[0], inspect.formatannotation(kind_type)), kind
    parts = get_args(annotation)
    if len(parts) == 2 and isinstance(parts[1], Kind):
        return parts
    split = [_split(part) for part in parts]
    kind = next((kind for _, kind in split if kind is not None), None)
    if kind is None:
        return annotation, None
    types = tuple(part for part, _ in split)
    origin: Any = get_origin(annotation)
    is_union = origin in (Union, UnionType)
    return (functools.reduce(operator.or_, types) if is_union else origin[types]), kind
