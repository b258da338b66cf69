"""Annotations of functions for torch.compile that avoid importing it, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["assume_constant_result"]

F = TypeVar("F", bound=Callable[..., Any])


def assume_constant_result(function: F) -> F:
    """torch.compiler.assume_constant_result, whose one line this is."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
