"""Caches results of option checks by the values of the options."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])

#: Immutable classes of cached options. Tensors are excluded because their values change, symbols of
#: a graph because comparing them would add guards.
VALUES = frozenset((bool, int, float, str, type(None), torch.dtype))


def remembered(function: F) -> F:
    """Caches the results of a function, which must be immutable, by value and class of arguments.

    Calls with arguments other than numbers, strings, dtypes and None are not cached, nor are calls
    that raise. 0.0 and -0.0 are the same value.
    """

    @lru_cache(maxsize=1024, typed=True)
    def kept(*args: Any) -> Any:
        if not VALUES.issuperset(map(type, args)):
            raise TypeError  # nothing is kept; the key of a kept result has the classes, too
        return function(*args)

    @wraps(function)
    def call(*args: Any) -> Any:
        if not is_compiling():
            try:
                return kept(*args)
            except TypeError:
                pass
        return function(*args)

    return cast(F, call)
