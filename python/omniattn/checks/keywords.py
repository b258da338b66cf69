"""Wrappers of functions, and suggestions for unknown keywords."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from omniattn.suggestions import did_you_mean

_UNEXPECTED = re.compile(r"\(\) got an unexpected keyword argument '(\w+)'$")


def suggest_keyword(
    error: TypeError, function: Callable[..., Any], keywords: Mapping[str, Any]
) -> None:
    """Adds the most similar parameter to the error of a call with an unknown keyword.

    Python does so itself from 3.13 on.
    """
    found = _UNEXPECTED.search(str(error))
    if found is not None and found[1] in keywords:
        hint = did_you_mean(found[1], inspect.signature(function).parameters)
        error.args = (f"{error}{hint}",)


def in_place_of(function: Callable[..., Any], wrapper: Any) -> Any:
    """Returns `wrapper` with `suggest_keyword`, under the name of the wrapped function.

    It gets a code object of its own, since torch.compile limits the compilations of each.
    """
    wrapper = wraps(function)(wrapper)
    wrapper.__code__ = wrapper.__code__.replace(co_name=function.__name__)
    wrapper.explains_keywords = True
    return wrapper
