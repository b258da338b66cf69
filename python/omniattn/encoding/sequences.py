"""Options shared by all recurrences: boundaries of sequences and initial states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar

from torch import Tensor

from omniattn.encoding import records

F = TypeVar("F", bound=Callable[..., Any])


class StateOptions(TypedDict, total=False):
    """Options of definitions, documented in `gated_linear_attention`."""

    initial_state: Tensor | None
    cu_seqlens: Tensor | None


class SequenceOptions(StateOptions, total=False):
    """Options of public functions."""

    backend: str | None


class Sequences(NamedTuple):
    """Options of a call."""

    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    backend: str | None = None


_DEFAULTS = Sequences()


def sequences_of(op: str, options: StateOptions, names: type = SequenceOptions) -> Sequences:
    """Packs the options of a call of `op`, which accepts the options that `names` annotates."""
    if not options:
        return _DEFAULTS
    if names is SequenceOptions:
        return records.packed(op, Sequences, options)
    if not options.keys() <= names.__annotations__.keys():
        raise records.unexpected(op, options, names.__annotations__)
    return Sequences(**options)


def spelled_out(names: type, last: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Makes help() show the options of a function, with their defaults."""
    return records.spelled_out(names, Sequences, last=last)
