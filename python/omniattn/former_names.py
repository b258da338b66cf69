"""Former names of keywords, still accepted in calls and saved configs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

#: Former name of a keyword -> present name.
FORMER = {"gate_normaliser": "gate_normalizer", "normaliser": "normalizer"}


def present_names(op: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of a call of `op` with their present names."""
    for former, present in FORMER.items():
        if former in given and present in given:
            raise TypeError(f"{op}() got both {present!r} and {former!r}, its former name")
    return {FORMER.get(name, name): value for name, value in given.items()}


def accept_former_names(config: Any) -> None:
    """Makes a dataclass's constructor accept the former names of its fields."""
    init = vars(config).get("__init__")
    if init is None or not set(FORMER.values()) & config.__dataclass_fields__.keys():
        return

    @functools.wraps(init)
    def init_by_either_name(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.keys() & FORMER.keys():
            kwargs = present_names(config.__qualname__, kwargs)
        init(self, *args, **kwargs)

    config.__init__ = init_by_either_name
