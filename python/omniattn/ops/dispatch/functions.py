"""The autograd functions of calls, and the derivatives that surround one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd.function import once_differentiable

from omniattn.ops.dispatch import pieces as by_pieces
from omniattn.ops.dispatch.compile import assume_constant_result
from omniattn.ops.dispatch.names import call_by_name
from omniattn.ops.dispatch.vmap import Layout, flatten, map_batch, unflatten

if TYPE_CHECKING:
    from omniattn.ops.dispatch.autograd import DifferentiableOp, Op

__all__ = [
    "Context",
    "EagerOp",
    "TransformedOp",
    "apply_eager",
    "derivative_in_graph",
    "derivative_levels",
    "inside_jvp",
    "needs_gradient",
    "one_by_one",
    "with_empty_lists",
]

Arguments = tuple[Any, ...]


def one_by_one(values: Sequence[Any], lists: int) -> tuple[list[Any], list[int]]:
    """Flattens the trailing lists of `values`; returns the flat values and the lists' lengths."""
    single = len(values) - lists
    rest = values[single:]
    return [*values[:single], *chain.from_iterable(rest)], [len(each) for each in rest]


class Context(NamedTuple):
    """Values that a compiled call has saved, named as in the contexts of autograd."""

    saved_tensors: Sequence[Tensor | None]
    kept: Sequence[Any]
    lengths: Sequence[int]


def with_empty_lists(found: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """Flattens the trailing lists of `found`; None stands for a list of None."""
    single = len(found) - len(lengths)
    lists = (each or [None] * n for each, n in zip(found[single:], lengths, strict=True))
    return [*found[:single], *chain.from_iterable(lists)]


class EagerOp(torch.autograd.Function):
    """Eager calls with gradients that are not compiled (csrc/calls).

    Tensors are passed one by one so that autograd sees them, and all arguments as one tuple, since
    each argument that autograd inspects costs 0.2 us.
    """

    @staticmethod
    def forward(ctx: Any, op: DifferentiableOp, args: Arguments, *tensors: Tensor | None) -> Any:
        output = op.raw(*args)
        op._remember(ctx, args, output)
        ctx.op = op
        return op._public(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op: DifferentiableOp = ctx.op
        return None, None, *op.flat_gradients(ctx, ctx.needs_input_grad[2:], grads)


# Function.apply without unwrapping dead functorch tensors, which took 1 us of a call.
apply_eager = super(torch.autograd.Function, EagerOp).apply


class TransformedOp(torch.autograd.Function):
    """Calls under torch.func transforms, with `levels` nested derivatives."""

    @staticmethod
    def forward(op: Op, layout: Layout, levels: int, *flat: Any) -> Any:
        return op.raw(*unflatten(layout, flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: Arguments, output: Any) -> None:
        op, layout, levels, *flat = inputs
        op._set_up(ctx, unflatten(layout, flat), output)
        ctx.op, ctx.layout, ctx.levels = op, layout, levels

    @staticmethod
    def vmap(info: Any, in_dims: Arguments, *inputs: Any) -> Any:
        """Implements vmap in Python; the dispatcher does not support batched optional lists."""
        op, layout, levels, *flat = inputs

        def call(*args: Any) -> Any:
            return TransformedOp.apply(op, layout, levels, *flatten(layout, args))

        args, dims = unflatten(layout, flat), unflatten(layout, in_dims[3:])
        places = [] if op.fold is None else op.fold.places(op.schema, args)
        return map_batch(op.name, call, places, info.batch_size, args, dims)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # torch.func always builds the backward's graph, but only a second level can use it.
        op: DifferentiableOp = ctx.op
        if op.refuse is not None:
            needs = unflatten(ctx.layout, ctx.needs_input_grad[3:])
            flags = zip(op.schema.arguments, needs, strict=True)
            call_by_name(op.refuse, {f"{name}_grad": need for name, need in flags})
        derive: Callable[..., Any] = _first_order_flat
        if not op.differentiable_backward:
            derive = _second_order_flat if ctx.levels > 1 else once_differentiable(derive)
        return (None, None, None, *derive(ctx, *grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        op: DifferentiableOp = ctx.op
        if op.pieces is None:  # ops with a formula do not get here; the others raise
            return op._call_formula(())
        tangents = op._inputs(unflatten(ctx.layout, tangents[3:]))
        flat, _ = one_by_one(tangents, len(op.tensor_lists))
        values = op.plan.read(ctx, (), ())
        args = op.plan.arguments(values)
        pieces = op._in_pieces(args)
        tensors, _ = one_by_one(op._inputs(args), len(op.tensor_lists))
        assert pieces is not None
        carried = by_pieces.carried_outputs(pieces, tensors)
        public = len(op.schema.outputs) - op.private_outputs
        further = op.results_for_kernels(pieces, values)
        found = by_pieces.jvp(pieces, tensors, carried, further, flat)[:public]
        return (*found, *(None,) * op.private_outputs)


def _first_order_flat(ctx: Any, *grads: Any) -> Any:
    return _flat(ctx, ctx.op._first_order, grads)


def _second_order_flat(ctx: Any, *grads: Any) -> Any:
    return _flat(ctx, ctx.op._second_order, grads)


def _flat(ctx: Any, derive: Callable[..., Any], grads: Sequence[Tensor | None]) -> Any:
    """Calls `derive` with ctx.needs_input_grad; returns gradients of all flat arguments."""
    op: DifferentiableOp = ctx.op
    needs = op._inputs(unflatten(ctx.layout, ctx.needs_input_grad[3:]))
    return tuple(flatten(ctx.layout, op._spread((*derive(ctx, needs, grads), None))))


def _transforms() -> list[Any]:
    return [level.key() for level in get_interpreter_stack() or ()]


def inside_jvp() -> bool:
    return TransformType.Jvp in _transforms()


@assume_constant_result
def derivative_in_graph() -> str:
    """The derivative of torch.func around a call that is being compiled; "" for none."""
    kinds = _transforms()
    return "jvp" if TransformType.Jvp in kinds else "grad" if TransformType.Grad in kinds else ""


def derivative_levels() -> int:
    kinds = _transforms()
    return kinds.count(TransformType.Grad) + kinds.count(TransformType.Jvp)


def needs_gradient(t: Any) -> bool:
    return isinstance(t, Tensor) and t.requires_grad
