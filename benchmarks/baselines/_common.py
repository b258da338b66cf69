"""Helpers shared by the baselines of all families."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Function: TypeAlias = Callable[..., Any]


def compiled(function: Function) -> Function:
    """Compiles `function` at its first call; shapes are static, as in training."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compile_once(function)(*args, **kwargs)

    return call


@functools.cache
def compile_once(function: Function) -> Function:
    return torch.compile(function, fullgraph=True, dynamic=False)


def lacks(**options: Any) -> None:
    """Raises NotImplementedError if an unsupported option is given."""
    for name, wanted in options.items():
        if isinstance(wanted, torch.Tensor) or wanted:
            raise NotImplementedError(f"torch has no {name}")
