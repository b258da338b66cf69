"""Types of both forms of a layer's constructor, derived from its `Config` for type checkers.

A layer takes a value of its `Config`, or the fields of it as arguments (`config_or_fields`):

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(self, config: Config, *, device=None, dtype=None) -> None: ...

Type checkers see `_Fields` as a dataclass of all arguments of the second form, and copy the
signatures of its constructor and of `ByConfig` to the overloads of `init`. Nothing here runs.
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
    """A class whose annotated fields are the arguments of a constructor."""


class OnDevice(Arguments):
    """The arguments that a layer with parameters has besides its fields."""

    device: torch.device | str | None = field(default=None, kw_only=True)
    dtype: torch.dtype | None = field(default=None, kw_only=True)


class ConfigAlone(Arguments, Generic[C]):
    """The config of a layer without tensors."""

    config: C


class ByConfig(ConfigAlone[C], OnDevice):
    """The config of a layer and where its tensors are."""


class _Forms(Generic[P, Q]):
    @overload
    def init(self: Any, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def init(self: Any, *args: Q.args, **kwargs: Q.kwargs) -> None: ...
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Has the signatures of both forms, as an `__init__`."""


def either(first: Callable[P, object], second: Callable[Q, object]) -> type[_Forms[P, Q]]:
    """Class whose `init` has the parameters of `first` or, as an overload, of `second`."""
    return _Forms
