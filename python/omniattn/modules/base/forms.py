"""Types of the two forms of a layer's constructor, derived from its `Config` for type checkers.

A layer takes a `Config`, or the config's fields as arguments (`config_or_fields`):

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(self, config: Config, *, device=None, dtype=None) -> None: ...

Type checkers treat `_Fields` as a dataclass of all arguments of the second form, and copy the
signatures of its constructor and of `ByConfig` to the overloads of `init`. At run time these
classes are unused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from typing_extensions import dataclass_transform

C = TypeVar("C")
P = ParamSpec("P")
Q = ParamSpec("Q")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Arguments:
    """Base class whose annotated fields are the arguments of a constructor."""


class OnDevice(Arguments):
    """Arguments of a layer with parameters besides its config fields."""

    device: torch.device | str | None = field(default=None, kw_only=True)
    dtype: torch.dtype | None = field(default=None, kw_only=True)


class ConfigAlone(Arguments, Generic[C]):
    """Arguments of a layer without tensors: its config."""

    config: C


class ByConfig(ConfigAlone[C], OnDevice):
    """Arguments of a layer with tensors: its config, device and dtype."""


class _Forms(Generic[P, Q]):
    @overload
    def init(self: Any, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def init(self: Any, *args: Q.args, **kwargs: Q.kwargs) -> None: ...
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Stands for an `__init__` with the signatures of both forms."""


def either(first: Callable[P, object], second: Callable[Q, object]) -> type[_Forms[P, Q]]:
    """Returns a class whose `init` is overloaded with the parameters of `first` and `second`."""
    return _Forms
