"""Checks that a model's layer states fit the model."""

from __future__ import annotations

from typing import Any

from omniattn.modules.base.state import parts_of


def require_states(op: str, state: Any, layers: int, steps: int) -> int:
    """Returns the number of past tokens; checks that all states have room for `steps` new ones.

    Each layer updates its own state, so a call that fails in a later layer would leave the states
    of earlier layers ahead, and the next call would silently be wrong.
    """
    if not isinstance(state, (list, tuple)):
        raise TypeError(
            f"{op}: state must be the list of the states of all layers, as new_state gives it, "
            f"got type(state)={type(state).__name__}"
        )
    if len(state) != layers:
        raise ValueError(
            f"{op}: state must have one entry for each of {layers} layers, "
            f"got len(state)={len(state)}"
        )
    past: int | None = None
    owner: dict[int, int] = {}
    for layer, entry in enumerate(state):
        for part in parts_of(entry):
            if owner.setdefault(id(part), layer) != layer:
                raise ValueError(
                    f"{op}: state must have an entry of its own for each layer, "
                    f"got state[{layer}] is state[{owner[id(part)]}]"
                )
            if getattr(part, "is_ahead", False):
                raise ValueError(
                    f"{op}: state[{layer}] has read tokens of a call that failed and cannot forget "
                    "them; continue from a copy.deepcopy made before that call"
                )
            length = getattr(part, "length", None)
            if length is None:
                raise TypeError(
                    f"{op}: state must hold what new_state gives for each layer, "
                    f"got type(state[{layer}])={type(entry).__name__}"
                )
            past = length if past is None else past
            if length != past:
                raise ValueError(
                    f"{op}: state must be of the same tokens in all layers, "
                    f"got state[0].length={past}, state[{layer}].length={length}"
                )
            limit = getattr(part, "limit", None)
            if limit is not None and length + steps > limit:
                raise ValueError(
                    f"{op}: state must have room for the new tokens, "
                    f"got state[{layer}].max_length={limit}, "
                    f"state[{layer}].length={length}, T={steps}"
                )
    return 0 if past is None else past
