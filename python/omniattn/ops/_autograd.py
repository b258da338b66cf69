"""From one forward and one backward op to a differentiable function.

A call takes one of four paths, so that each costs no more than it must and all are right:

=====================  ====================================================================
compiling, exporting   the registered op: one node in the graph, with fake and autograd formula
functorch transforms   an `autograd.Function` with `setup_context` and a vmap rule
gradients needed       an `autograd.Function` whose forward receives ctx: the cheaper form
nothing of these       the raw op, or the one without private outputs
=====================  ====================================================================

Second derivatives and forward-mode derivatives go through `formula`, the op in plain torch,
recomputed from the saved inputs. An op without one raises: it never returns zeros.

vmap over any of the tensors calls the op once per element and stacks the results. Where only
tensors that have a batch dimension are mapped over, and nothing else depends on the place in the
batch, the elements become one batch and one call (`Fold`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves, tree_map

from omniattn.ops._library import register_fake

__all__ = ["DifferentiableOp", "Fold", "Op", "private_op", "register_vmap"]

Arguments = tuple[Any, ...]
Saved = tuple[Tensor | None, ...]
#: Per argument the length of a list of tensors, or None; None where an op takes no lists.
Layout = tuple[int | None, ...] | None
#: From the arguments of an op to the places of those whose first dimension is a batch of problems
#: that this call solves one by one, with the batch dimension of all outputs first; or to none.
Fold = Callable[..., Sequence[int]]

_implementations = torch.library.Library("omniattn", "IMPL")


@cache
def private_op(name: str) -> Callable[..., Any]:
    """An op without autograd formula that only this package calls, as the cheapest callable.

    It goes to the dispatcher without what an OpOverload does in Python and about
    `__torch_function__` (1.7 of 4.5 us for small norms), and there past the autograd key, whose
    fallback looks at every argument (0.2 us).
    """
    _implementations.impl(name, torch.library.fallthrough_kernel, "Autograd")
    handle = torch._C._dispatch_find_schema_or_throw(f"omniattn::{name}", "")
    return partial(torch._C._dispatch_call_boxed, handle)


class Op:
    """A public op without gradients, callable with the positional arguments of its schema.

    Args:
        name: name in the `omniattn` namespace.
        fake: shapes and dtypes of the outputs, from the arguments.
        fold: how vmap may run it in one call; None where it never does.
    """

    differentiable_backward = False

    def __init__(self, name: str, *, fake: Callable[..., Any], fold: Fold | None = None) -> None:
        self.name = name
        self.registered = getattr(torch.ops.omniattn, name).default
        self.raw: Callable[..., Any] = self.registered
        self.fold = fold
        kinds = [str(argument.type) for argument in self.registered._schema.arguments]
        self.tensors = [i for i, k in enumerate(kinds) if k in ("Tensor", "Optional[Tensor]")]
        self.tensor_lists = [i for i, k in enumerate(kinds) if "List[Ten" in k]
        register_fake(name)(fake)

    def __call__(self, *args: Any) -> Any:
        if is_compiling() or peek_interpreter_stack() is None:
            return self.registered(*args)
        return self._transformed(args)

    def _transformed(self, args: Arguments) -> Any:
        layout, levels = self._layout(args), _grad_levels()
        return _TransformedOp.apply(self, layout, levels, *_flatten(layout, args))

    def _layout(self, args: Arguments) -> Layout:
        """Lengths of the arguments that are lists of tensors, None for the others."""
        if not self.tensor_lists:
            return None
        return tuple(len(a) if i in self.tensor_lists else None for i, a in enumerate(args))

    def _set_up(self, ctx: Any, inputs: Arguments, output: Any) -> None:
        """What autograd is told of a call; the names are those that torch.library calls it by."""
        ctx.mark_non_differentiable(*tree_leaves(output))


class DifferentiableOp(Op):
    """A public op with gradients, callable with the positional arguments of its schema.

    Args:
        name: name in the `omniattn` namespace; `<name>_raw` must exist too (csrc/ops/registry.h).
        fake: shapes and dtypes of the outputs, from the arguments.
        save: (arguments, outputs) -> (tensors to save, anything else to keep).
        backward: (saved tensors, kept, needs, gradients of the outputs) -> one gradient per
            argument, None where there is none. `needs[i]` tells whether argument i needs one (a
            list for a list). Gradients of unused outputs come as None.
        private_outputs: how many outputs, at the end, are there for `save` only (statistics): calls
            do not return them.
        inference: name of an op without the private outputs, for calls without gradients.
        formula: the op in plain torch, from the arguments to its differentiable outputs.
        restore: (saved tensors, kept) -> the arguments, for `formula`.
        differentiable_backward: `backward` calls differentiable functions only, so that second
            derivatives need no formula.
        refuse: called with `needs` where a gradient passes through vmap: functions, which refuse
            tensors that need a gradient and get none, cannot see that there.
        fold: see Op.
    """

    def __init__(
        self,
        name: str,
        *,
        fake: Callable[..., Any],
        save: Callable[[Arguments, Any], tuple[Saved, Any]],
        backward: Callable[[Saved, Any, Sequence[Any], Sequence[Tensor | None]], Arguments],
        private_outputs: int = 0,
        inference: str | None = None,
        formula: Callable[..., Any] | None = None,
        restore: Callable[[Saved, Any], Arguments] | None = None,
        differentiable_backward: bool = False,
        refuse: Callable[[Sequence[Any]], None] | None = None,
        fold: Fold | None = None,
    ) -> None:
        super().__init__(name, fake=fake, fold=fold)
        self.refuse = refuse
        self.raw = private_op(name + "_raw")
        self.inference = None if inference is None else private_op(inference)
        self.save = save
        self.backward = backward
        self.private_outputs = private_outputs
        count = len(self.registered._schema.returns) - private_outputs
        #: Subscript of the outputs that calls return, None for all.
        self.public: Any = None if not private_outputs else 0 if count == 1 else slice(count)
        self.formula = formula
        self.restore = restore
        self.differentiable_backward = differentiable_backward
        #: The tensors among the arguments (an op has at least two); and the inverse, from values of
        #: the tensors and one for all others to one per argument.
        self._single_tensors = itemgetter(*self.tensors)
        places = {argument: place for place, argument in enumerate(self.tensors)}
        arguments = self.registered._schema.arguments
        self._spread = itemgetter(*(places.get(i, -1) for i in range(len(arguments))))
        register_fake(f"{name}_raw")(fake)
        if inference is not None:
            register_fake(inference)(lambda *args: self._public(fake(*args)))

        def registered_backward(ctx: Any, *grads: Tensor | None) -> Any:
            needs = ctx.needs_input_grad
            found = self._gradients(ctx, needs, grads)
            # torch.library wants lists where the arguments are lists, the empty ones too.
            return tuple(
                [None] * len(n) if g is None and isinstance(n, list) else g
                for n, g in zip(needs, found, strict=True)
            )

        torch.library.register_autograd(
            f"omniattn::{name}", registered_backward, setup_context=self._set_up
        )

    def __call__(self, *args: Any) -> Any:
        if is_compiling():
            return self._public(self.registered(*args))
        if has_torch_function(args):
            return handle_torch_function(self, args, *args)
        for i in self.tensor_lists:
            if has_torch_function(args[i]):
                return handle_torch_function(self, args[i], *args)
        if peek_interpreter_stack() is not None:
            if self.formula is not None and _inside_jvp():
                return self._call_formula(args)
            return self._public(self._transformed(args))
        if forward_ad._current_level >= 0 and _any_dual(args):
            return self._call_formula(args)
        if is_grad_enabled():
            tensors = self._single_tensors(args)
            for i in self.tensor_lists:
                tensors += tuple(args[i])
            for t in tensors:
                if t is not None and t.requires_grad:
                    return _apply_eager(self, args, *tensors)
        if self.inference is not None:
            return self.inference(*args)
        return self._public(self.raw(*args))

    def _public(self, output: Any) -> Any:
        return output if self.public is None else output[self.public]

    def _set_up(self, ctx: Any, inputs: Arguments, output: Any) -> None:
        self._remember(ctx, inputs, output)
        if self.private_outputs:
            ctx.mark_non_differentiable(*output[-self.private_outputs :])

    def _call_formula(self, args: Arguments) -> Any:
        if self.formula is None:
            raise NotImplementedError(
                f"omniattn::{self.name} has no forward-mode derivative; "
                'use backend="reference" for functions that need one'
            )
        return self.formula(*args)

    def _remember(self, ctx: Any, args: Arguments, output: Any) -> None:
        saved, ctx.kept = self.save(args, output)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)

    def _gradients(self, ctx: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]) -> Any:
        """The gradients; differentiable where grad mode asks for it (create_graph=True)."""
        if is_grad_enabled() and not self.differentiable_backward:
            return self._second_order(ctx, needs, grads)
        return self.backward(ctx.saved_tensors, ctx.kept, needs, grads)

    def _second_order(self, ctx: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]) -> Any:
        if self.formula is None or self.restore is None:
            raise NotImplementedError(
                f"omniattn::{self.name} has no second derivative; "
                'use backend="reference" for functions that need one'
            )
        with torch.enable_grad():
            # Views cut the inputs off each other: k computed from q must not add to the gradient of
            # q.
            args = _map_tensors(lambda t: t.view_as(t), self.restore(ctx.saved_tensors, ctx.kept))
            outputs = self.formula(*args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = [
                (o, g)
                for o, g in zip(outputs, grads, strict=False)
                if g is not None and o.requires_grad
            ]
            layout = self._layout(args)
            flat = _flatten(layout, args)
            wanted = [i for i, need in enumerate(_flatten(layout, needs)) if need]
            if not pairs or not wanted:
                return _unflatten(layout, [None] * len(flat))
            found = torch.autograd.grad(
                [o for o, _ in pairs],
                [flat[i] for i in wanted],
                [g for _, g in pairs],
                create_graph=True,
                allow_unused=True,
            )
        result: list[Tensor | None] = [None] * len(flat)
        for i, grad in zip(wanted, found, strict=True):
            result[i] = grad
        return _unflatten(layout, result)


class _EagerOp(torch.autograd.Function):
    """Eager calls with gradients. Tensors are passed one by one for autograd to see them, and all
    arguments as one tuple: what autograd looks at costs 0.2 us each."""

    @staticmethod
    def forward(ctx: Any, op: DifferentiableOp, args: Arguments, *tensors: Tensor | None) -> Any:
        output = op.raw(*args)
        op._remember(ctx, args, output)
        ctx.op = op
        if op.tensor_lists:
            ctx.lengths = [len(args[i]) for i in op.tensor_lists]
        return op._public(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op: DifferentiableOp = ctx.op
        flags = ctx.needs_input_grad[2:]
        needs = op._spread((*flags, False))
        if not op.tensor_lists:
            found = op._gradients(ctx, needs, grads)
            return None, None, *op._single_tensors(found)
        needs, listed = list(needs), iter(flags[len(op.tensors) :])
        for i, length in zip(op.tensor_lists, ctx.lengths, strict=True):
            needs[i] = [next(listed) for _ in range(length)]
        found = op._gradients(ctx, needs, grads)
        lists = (found[i] or [None] * len(needs[i]) for i in op.tensor_lists)
        return None, None, *op._single_tensors(found), *chain.from_iterable(lists)


# What Function.apply does but for unwrapping dead functorch tensors, which took 1 us of a call.
_apply_eager = super(torch.autograd.Function, _EagerOp).apply


class _TransformedOp(torch.autograd.Function):
    """Calls under torch.func transforms, inside `levels` of `torch.func.grad` and its kind."""

    @staticmethod
    def forward(op: Op, layout: Layout, levels: int, *flat: Any) -> Any:
        return op.raw(*_unflatten(layout, flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: Arguments, output: Any) -> None:
        op, layout, levels, *flat = inputs
        op._set_up(ctx, _unflatten(layout, flat), output)
        ctx.op, ctx.layout, ctx.levels = op, layout, levels

    @staticmethod
    def vmap(info: Any, in_dims: Arguments, *inputs: Any) -> Any:
        """In Python: the dispatcher does not look for a batch in lists that may be None."""
        op, layout, levels, *flat = inputs

        def call(*args: Any) -> Any:
            return _TransformedOp.apply(op, layout, levels, *_flatten(layout, args))

        args, dims = _unflatten(layout, flat), _unflatten(layout, in_dims[3:])
        return _map_batch(op.name, call, op.fold, info.batch_size, args, dims)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # torch.func always builds the graph of the backward; only a second level can ask for it.
        derive: Callable[..., Any] = _backward_flat
        if ctx.op.refuse is not None:
            ctx.op.refuse(_unflatten(ctx.layout, ctx.needs_input_grad[3:]))
        if not ctx.op.differentiable_backward:
            derive = _second_order_flat if ctx.levels > 1 else once_differentiable(_backward_flat)
        return (None, None, None, *derive(ctx, *grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        # Ops with a formula went there; this one has none, and says so.
        return ctx.op._call_formula(())


def _backward_flat(ctx: Any, *grads: Any) -> Any:
    needs = _unflatten(ctx.layout, ctx.needs_input_grad[3:])
    found = ctx.op.backward(ctx.saved_tensors, ctx.kept, needs, grads)
    return tuple(_flatten(ctx.layout, found))


def _second_order_flat(ctx: Any, *grads: Any) -> Any:
    needs = _unflatten(ctx.layout, ctx.needs_input_grad[3:])
    return tuple(_flatten(ctx.layout, ctx.op._second_order(ctx, needs, grads)))


def register_vmap(name: str, fold: Fold | None = None) -> None:
    """Gives an op that only this package calls a vmap rule; `fold` as for Op."""
    op = getattr(torch.ops.omniattn, name).default

    def rule(info: Any, in_dims: Arguments, *args: Any) -> Any:
        return _map_batch(name, op, fold, info.batch_size, args, in_dims)

    torch.library.register_vmap(f"omniattn::{name}", rule)


def _map_batch(
    name: str,
    call: Callable[..., Any],
    fold: Fold | None,
    size: int,
    args: Arguments,
    dims: Arguments,
) -> tuple[Any, int]:
    """The results of `call` on a batch of arguments, and their batch dimension.

    `dims` tells for each tensor of `args` which dimension is the batch, None where all share it.
    """
    if size == 0:
        raise ValueError(f"{name}: vmap must be over at least one element, got a batch size of 0")

    def batch(t: Tensor, dim: int | None) -> Tensor:
        return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)

    def select(value: Any, dim: Any, i: int) -> Any:
        if isinstance(value, (list, tuple)):
            return [select(v, d, i) for v, d in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, i)

    places = () if fold is None else fold(*args)
    batches = {i: batch(args[i], dims[i]) for i in places if args[i] is not None}
    mapped = {i for i, dim in enumerate(dims) if any(d is not None for d in tree_leaves(dim))}
    if mapped <= batches.keys() and all(t.dim() > 2 for t in batches.values()):
        folded = (batches[i].flatten(0, 1) if i in batches else a for i, a in enumerate(args))
        return tree_map(lambda t: t.unflatten(0, (size, len(t) // size)), call(*folded)), 0
    calls = [
        call(*(select(a, dim, i) for a, dim in zip(args, dims, strict=True))) for i in range(size)
    ]
    return tree_map(lambda *results: torch.stack(results), *calls), 0


def _flatten(layout: Layout, args: Sequence[Any]) -> Sequence[Any]:
    if layout is None:
        return args
    flat: list[Any] = []
    for a, length in zip(args, layout, strict=True):
        if length is None:
            flat.append(a)
        else:
            flat.extend([None] * length if a is None else a)
    return flat


def _unflatten(layout: Layout, flat: Sequence[Any]) -> Arguments:
    if layout is None:
        return tuple(flat)
    values = iter(flat)
    return tuple(next(values) if n is None else [next(values) for _ in range(n)] for n in layout)


def _map_tensors(f: Callable[[Tensor], Tensor], args: Arguments) -> Arguments:
    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return f(value)
        return [convert(v) for v in value] if isinstance(value, (list, tuple)) else value

    return tuple(convert(a) for a in args)


def _any_dual(args: Arguments) -> bool:
    unpack = forward_ad.unpack_dual
    flat = (t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)))
    return any(isinstance(t, Tensor) and unpack(t).tangent is not None for t in flat)


def is_transformed(*args: Any) -> bool:
    """Whether a call is compiled, under a functorch transform or carries tangents."""
    return (
        is_compiling()
        or peek_interpreter_stack() is not None
        or (forward_ad._current_level >= 0 and _any_dual(args))
    )


def may_need_gradient(t: Tensor) -> bool:
    """Whether a gradient of `t` may be asked for; a batch of vmap does not tell."""
    return t.requires_grad or peek_interpreter_stack() is not None


def _transforms() -> list[Any]:
    return [level.key() for level in get_interpreter_stack() or ()]


def _inside_jvp() -> bool:
    return TransformType.Jvp in _transforms()


def _grad_levels() -> int:
    return _transforms().count(TransformType.Grad)
