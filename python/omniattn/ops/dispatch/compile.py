"""Annotations for torch.compile that do not import it, which would take seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["assume_constant_result"]

F = TypeVar("F", bound=Callable[..., Any])


def assume_constant_result(function: F) -> F:
    """Does what torch.compiler.assume_constant_result does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
