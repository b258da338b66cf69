"""Results of checks of options, kept by the values of these options."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])

#: Immutable classes. Tensors are missing because their values change, symbols of a graph because
#: comparing them would limit the graph.
_VALUES = frozenset((bool, int, float, str, type(None), torch.dtype))


def remembered(function: F) -> F:
    """Makes a function of options keep its results, which must be immutable, by value and class.

    A call with any other argument than numbers, strings, dtypes and None runs the function, and so
    does a call that raises. 0.0 and -0.0 are the same value.
    """
    kept = lru_cache(maxsize=1024, typed=True)(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        if is_compiling() or not _VALUES.issuperset(map(type, args)):
            return function(*args)
        return kept(*args)

    return cast(F, call)
