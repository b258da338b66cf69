"""Names of an op's arguments, outputs and gradients, used by declarations.

For an argument `x` and an output `y`, `grad_y` is the incoming gradient of y, `x_grad` is True if
the gradient of x is needed, and `dx` is that gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from omniattn.reference.precision import compute_dtype

__all__ = [
    "Rules",
    "Schema",
    "call_by_name",
    "gradients_like",
    "like",
    "like_or_wide",
    "outputs_like",
    "picker",
    "state_slots",
]

#: Functions by name; each is called with the values named by its parameters.
Rules = Mapping[str, Callable[..., Any]]


class Schema:
    """Names in the schema of an op; a single unnamed output is `y`."""

    def __init__(self, name: str) -> None:
        self.name = name
        schema = getattr(torch.ops.omniattn, name).default._schema
        kinds = {a.name: str(a.type) for a in schema.arguments}
        self.arguments = tuple(kinds)
        self.required = tuple(a.name for a in schema.arguments if not a.has_default_value())
        self.tensors = tuple(n for n, k in kinds.items() if k in ("Tensor", "Optional[Tensor]"))
        self.tensor_lists = tuple(n for n, k in kinds.items() if "List[Ten" in k)
        self.outputs = tuple(r.name or "y" for r in schema.returns)

    def by_name(self, args: Sequence[Any], others: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call by name, None for omitted ones with a default."""
        given = zip(self.arguments, args, strict=False)
        return {**dict.fromkeys(self.arguments), **dict(given), **others}


def call_by_name(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    return function(*(values[name] for name in inspect.signature(function).parameters))


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function that selects the values at `places` of a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda values: ()
    (place,) = places
    return lambda values: (values[place],)


def like(t: Tensor) -> Tensor:
    return t.new_empty(t.shape)


def like_or_wide(t: Tensor | None, first: Tensor) -> Tensor:
    """Returns a tensor like t; if t is None, an empty one of the compute dtype of `first`."""
    return first.new_empty(0, dtype=compute_dtype(first)) if t is None else like(t)


def state_slots(x: Tensor, cu_seqlens: Tensor | None, chunk: int) -> int:
    """Number of states at the starts of chunks of x (B, T, ...).

    Sequence n of a packed batch begins at slot cu_seqlens[n] // chunk + n.
    """
    batch, steps = x.shape[:2]
    if cu_seqlens is None:
        return batch * ((steps + chunk - 1) // chunk)
    return steps // chunk + cu_seqlens.shape[0] - 1


def outputs_like(schema: Schema, rules: Rules) -> Callable[..., Any]:
    """Returns the fake of an op, whose outputs without a rule are like the first argument."""

    def fake(*args: Any, **others: Any) -> Any:
        values = schema.by_name(args, others)
        found = tuple(
            call_by_name(rules[name], values) if name in rules else like(args[0])
            for name in schema.outputs
        )
        return found if len(found) > 1 else found[0]

    return fake


def gradients_like(schema: Schema, rules: Rules) -> Callable[..., Any]:
    """Returns the fake of a backward op, whose gradients without a rule are like their arguments.

    A gradient is empty if the argument is None or `<argument>_grad` is False.
    """
    stems = [name.removeprefix("d") for name in schema.outputs]
    for name, stem in zip(schema.outputs, stems, strict=True):
        if name not in rules and stem not in schema.arguments:
            raise TypeError(
                f"{schema.name}: {name} needs a rule, since no argument is named {stem}"
            )

    def gradient(name: str, stem: str, values: Mapping[str, Any]) -> Any:
        model = values.get(stem)
        if name in rules:
            found = call_by_name(rules[name], values)
        else:
            found = None if model is None else like(model)
        if found is None:
            return values[stems[0]].new_empty(0)
        return found if values.get(f"{stem}_grad", True) else found.new_empty(0)

    def fake(*args: Any, **others: Any) -> Any:
        values = schema.by_name(args, others)
        pairs = zip(schema.outputs, stems, strict=True)
        found = tuple(gradient(name, stem, values) for name, stem in pairs)
        return found if len(found) > 1 else found[0]

    return fake
