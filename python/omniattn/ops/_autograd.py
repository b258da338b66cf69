"""From one forward and one backward op to a differentiable function.

A call takes one of four paths, so that each costs no more than it must and all are right:

=====================  ====================================================================
compiling, exporting   the registered op: one node in the graph, with fake and autograd formula
functorch transforms   an `autograd.Function` with `setup_context` and a generated vmap rule
gradients needed       an `autograd.Function` whose forward receives ctx: the cheaper form
nothing of these       the raw op, or the one without private outputs
=====================  ====================================================================

Second derivatives and forward-mode derivatives go through `formula`, the op in plain torch,
recomputed from the saved inputs. An op without one raises: it never returns zeros.
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

from omniattn.ops._library import register_fake

__all__ = ["DifferentiableOp", "loop_over_vmap", "private_op"]

Arguments = tuple[Any, ...]
Saved = tuple[Tensor | None, ...]
#: Per argument the length of a list of tensors, or None; None where an op takes no lists.
Layout = tuple[int | None, ...] | None

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


class DifferentiableOp:
    """A public op with gradients, callable with the positional arguments of its schema.

    Args:
        name: name in the `omniattn` namespace; `<name>_raw` must exist too (csrc/ops/schema.cpp).
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
    ) -> None:
        self.name = name
        self.registered = getattr(torch.ops.omniattn, name).default
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
        kinds = [str(argument.type) for argument in self.registered._schema.arguments]
        self.tensors = [i for i, k in enumerate(kinds) if k in ("Tensor", "Optional[Tensor]")]
        self.tensor_lists = [i for i, k in enumerate(kinds) if "List[Ten" in k]
        #: The tensors among the arguments (an op has at least two); and the inverse, from values of
        #: the tensors and one for all others to one per argument.
        self._single_tensors = itemgetter(*self.tensors)
        places = {argument: place for place, argument in enumerate(self.tensors)}
        self._spread = itemgetter(*(places.get(i, -1) for i in range(len(kinds))))
        register_fake(name)(fake)
        register_fake(f"{name}_raw")(fake)
        loop_over_vmap(f"{name}_raw")
        if inference is not None:
            register_fake(inference)(lambda *args: self._public(fake(*args)))

        def setup_context(ctx: Any, inputs: Arguments, output: Any) -> None:
            self._remember(ctx, inputs, output)
            self._mark_private(ctx, output)

        def registered_backward(ctx: Any, *grads: Tensor | None) -> Any:
            needs = ctx.needs_input_grad
            found = self._gradients(ctx, needs, grads)
            # torch.library wants lists where the arguments are lists, the empty ones too.
            return tuple(
                [None] * len(n) if g is None and isinstance(n, list) else g
                for n, g in zip(needs, found, strict=True)
            )

        torch.library.register_autograd(
            f"omniattn::{name}", registered_backward, setup_context=setup_context
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
            layout, levels = self._layout(args), _grad_levels()
            return self._public(_TransformedOp.apply(self, layout, levels, *_flatten(layout, args)))
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

    def _layout(self, args: Arguments) -> Layout:
        """Lengths of the arguments that are lists of tensors, None for the others."""
        if not self.tensor_lists:
            return None
        return tuple(len(a) if i in self.tensor_lists else None for i, a in enumerate(args))

    def _public(self, output: Any) -> Any:
        return output if self.public is None else output[self.public]

    def _mark_private(self, ctx: Any, output: Any) -> None:
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

    generate_vmap_rule = True

    @staticmethod
    def forward(op: DifferentiableOp, layout: Layout, levels: int, *flat: Any) -> Any:
        return op.raw(*_unflatten(layout, flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: Arguments, output: Any) -> None:
        op, layout, levels, *flat = inputs
        op._remember(ctx, _unflatten(layout, flat), output)
        op._mark_private(ctx, output)
        ctx.op, ctx.layout, ctx.levels = op, layout, levels

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # torch.func always builds the graph of the backward; only a second level can ask for it.
        derive: Callable[..., Any] = _backward_flat
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


def loop_over_vmap(name: str) -> None:
    """Gives an op a vmap rule: one call per element. torch's own fallback cannot batch lists."""
    op = getattr(torch.ops.omniattn, name).default

    def select(value: Any, dim: Any, i: int) -> Any:
        if isinstance(value, (list, tuple)) and isinstance(dim, (list, tuple)):
            return [select(v, d, i) for v, d in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, i)

    def stack(results: Sequence[Any]) -> tuple[Any, Any]:
        """One output, or a tuple or list of outputs, of all calls; and its batch dimensions."""
        if isinstance(results[0], Tensor):
            return torch.stack(tuple(results)), 0
        pairs = [stack(each) for each in zip(*results, strict=True)]
        kind = type(results[0])
        return kind(output for output, _ in pairs), kind(dim for _, dim in pairs)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        calls = [
            op(*(select(a, d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return stack(calls)

    torch.library.register_vmap(f"omniattn::{name}", rule)


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
