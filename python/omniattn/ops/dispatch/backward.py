"""Declares the backward of an op by names: saved values, arguments and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cache, partial
from inspect import Parameter, signature
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from omniattn.ops.dispatch.calls import compiled_call
from omniattn.ops.dispatch.library import register_fake
from omniattn.ops.dispatch.names import Rules, Schema, call_by_name, gradients_like, picker
from omniattn.ops.dispatch.vmap import Fold, register_vmap

__all__ = ["Backward", "BackwardOp", "Plan", "private_op"]

#: Maps named values to gradients by the names of their arguments.
Backward = Callable[..., Mapping[str, Any]]

_implementations = torch.library.Library("omniattn", "IMPL")


@cache
def private_op(name: str) -> Callable[..., Any]:
    """Returns the cheapest callable of an internal op without autograd formula.

    It skips the Python and `__torch_function__` overhead of an OpOverload (1.7 of 4.5 us for small
    norms), and the dispatcher's autograd key, whose fallback inspects every argument (0.2 us).
    """
    _implementations.impl(name, torch.library.fallthrough_kernel, "Autograd")
    handle = torch._C._dispatch_find_schema_or_throw(f"omniattn::{name}", "")
    return compiled_call(name, partial(torch._C._dispatch_call_boxed, handle))


class BackwardOp:
    """A private op that computes gradients, `d<argument>` for each differentiable argument.

    Args:
        name: name in the `omniattn` namespace.
        fakes: rules for gradients that differ from the argument of their name.
        fold: how vmap can run the op in one call; None if it cannot.
    """

    def __init__(self, name: str, *, fakes: Rules | None = None, fold: Fold | None = None) -> None:
        schema = Schema(name)
        self.name = name
        self.call = private_op(name)
        #: Names of the arguments and outputs, as in the forward op.
        self.takes, self.gives = schema.required, schema.outputs
        register_fake(name)(gradients_like(schema, fakes or {}))
        register_vmap(name, fold)

    def of(self, **names: str) -> BackwardOp:
        """Returns a copy as the backward of an op with other names.

        An argument whose name becomes "" gets None: the op has no such value.
        """
        other = copy(self)
        other.takes = tuple(names.get(n, n) for n in self.takes)
        other.gives = tuple(names.get(n, n) for n in self.gives)
        return other


class Plan:
    """Values that a call saves, and the indices by which its backward reads them.

    A backward reads from one tuple: None, the tuple of needs_input_grad of `inputs` (`wanted`), the
    saved tensors, the lists of tensors, the other arguments, needs_input_grad one by one, and the
    gradients of the outputs.

    Args:
        schema: schema of the op.
        backward, op: see `DifferentiableOp`; one of the two is given.
        restored: argument -> function of named values that recomputes it.
        formula: True if all other arguments must be saved for the formula.
        direct: see `DifferentiableOp`.
    """

    def __init__(
        self,
        schema: Schema,
        backward: Backward | None,
        op: BackwardOp | None,
        restored: Rules,
        formula: bool,
        direct: BackwardOp | None = None,
    ) -> None:
        self.schema, self.restored = schema, restored
        #: Arguments that may have a gradient; lists of tensors come last.
        self.inputs = (*schema.tensors, *schema.tensor_lists)
        takes = _names_taken(backward, op)
        needed = {*takes, *chain.from_iterable(signature(f).parameters for f in restored.values())}
        if formula:
            needed |= {n for n in schema.arguments if n not in restored}
        self.saved = [n for n in (*schema.tensors, *schema.outputs) if n in needed]
        kept = [n for n in schema.arguments if n not in self.inputs]
        #: Names of the values that a backward can read; a flag hides an argument of the same name.
        self.readable = [
            *("", "wanted", *self.saved, *schema.tensor_lists, *kept),
            *(f"{n}_grad" for n in self.inputs),
            *(f"grad_{n}" for n in schema.outputs),
        ]
        self.places = {name: place for place, name in enumerate(self.readable)}
        values = (*schema.arguments, *schema.outputs)
        #: Places of the saved tensors and of the other saved values in (*arguments, *outputs).
        self.saved_places = tuple(values.index(n) for n in self.saved)
        self.kept_places = tuple(values.index(n) for n in kept)
        #: Name of the op that computes first derivatives without Python (csrc/calls), or None;
        #: places of its arguments in `readable`; for each input the output that is its gradient.
        self.native: tuple[str | None, tuple[int, ...], tuple[int, ...]] = (None, (), ())
        if direct := direct or (op if backward is None else None):
            places = tuple(self._place(n) for n in direct.takes)
            self.native = (direct.name, places, _gives(self.inputs, direct))
        self._pick_saved = picker(self.saved_places)
        self._pick_kept = picker(self.kept_places)
        self._pick_lists = picker([values.index(n) for n in schema.tensor_lists])
        self._take = picker([self._place(n) for n in takes])
        self._find = self._by_inputs(backward, op)

    def _place(self, name: str) -> int:
        if name not in self.places:
            known = ", ".join(filter(None, self.readable))
            raise TypeError(
                f"{self.schema.name}: its backward takes {name}, which is none of {known}"
            )
        return self.places[name]

    def remember(self, ctx: Any, args: Sequence[Any], output: Any, unsaved: Iterable[str]) -> None:
        values = (*args, *output) if isinstance(output, tuple) else (*args, output)
        saved = self._pick_saved(values)
        for name in unsaved:
            place = self.saved.index(name)
            saved = (*saved[:place], None, *saved[place + 1 :])
        if self.schema.tensor_lists:
            lists = self._pick_lists(values)
            ctx.lengths = [len(each) for each in lists]
            saved += tuple(chain.from_iterable(lists))
        ctx.save_for_backward(*saved)
        ctx.kept = self._pick_kept(values)
        ctx.set_materialize_grads(False)

    def read(self, ctx: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]) -> Sequence[Any]:
        saved = ctx.saved_tensors
        if self.schema.tensor_lists:
            saved = self.group(saved, ctx.lengths)
        return (None, needs, *saved, *ctx.kept, *needs, *grads)

    def group(self, flat: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
        """Rebuilds the lists of tensors from a flat sequence that ends with their elements."""
        count = len(flat) - sum(lengths)
        rest = iter(flat[count:])
        return [*flat[:count], *(list(islice(rest, n)) for n in lengths)]

    def find(self, read: Sequence[Any], needs: Sequence[Any]) -> list[Any]:
        """Computes the gradients of `inputs`."""
        found = self._find(*self._take(read))
        return [grad if need else None for grad, need in zip(found, needs, strict=True)]

    def _by_inputs(
        self, backward: Backward | None, op: BackwardOp | None
    ) -> Callable[..., Iterable[Any]]:
        """Returns a function that computes the gradients of `inputs`, None if missing."""
        if backward is not None:
            return lambda *values: map(backward(*values).get, self.inputs)
        assert op is not None
        call, pick = op.call, picker(_gives(self.inputs, op))
        if len(op.gives) == 1:
            return lambda *values: pick((call(*values), None))
        return lambda *values: pick((*call(*values), None))

    def arguments(self, read: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the arguments of the op, for its formula."""
        values = dict(zip(self.readable, read, strict=False))  # calls lack private gradients
        return tuple(
            call_by_name(self.restored[n], values) if n in self.restored else values[n]
            for n in self.schema.arguments
        )


def _names_taken(backward: Backward | None, op: BackwardOp | None) -> list[str]:
    """Returns the names of a backward's arguments; `*arguments` stands for all of its op's."""
    if backward is None:
        assert op is not None
        return list(op.takes)
    names: list[str] = []
    for parameter in signature(backward).parameters.values():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            assert op is not None
            names += op.takes
        else:
            names.append(parameter.name)
    return names


def _gives(inputs: Sequence[str], op: BackwardOp) -> tuple[int, ...]:
    """Returns for each input the output of `op` that is its gradient, -1 if there is none."""
    gives = [name.removeprefix("grad_" if name.startswith("grad_") else "d") for name in op.gives]
    return tuple(gives.index(n) if n in gives else -1 for n in inputs)
