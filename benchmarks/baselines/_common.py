"""Helpers that baselines of all families share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Function: TypeAlias = Callable[..., Any]


def compiled(function: Function) -> Function:
    """torch.compile of `function` at the first call; shapes are static, as in a training run."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compile_once(function)(*args, **kwargs)

    return call


@functools.cache
def compile_once(function: Function) -> Function:
    return torch.compile(function, fullgraph=True, dynamic=False)


def lacks(**options: Any) -> None:
    """Raises where an option is wanted that the baseline does not have."""
    for name, wanted in options.items():
        if isinstance(wanted, torch.Tensor) or wanted:
            raise NotImplementedError(f"torch has no {name}")
