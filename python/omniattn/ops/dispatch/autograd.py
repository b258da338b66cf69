"""Combines a forward op and a backward op into a differentiable function.

A call takes the cheapest correct path of four:

=====================  ====================================================================
compiling, exporting   the registered op: one node in the graph, with fake and autograd formula
functorch transforms   an `autograd.Function` with `setup_context` and a vmap rule
gradients needed       a compiled node (csrc/calls), or an `autograd.Function` with ctx
none of these       the raw op, or the one without private outputs
=====================  ====================================================================

Second derivatives and forward-mode derivatives differentiate `formula`, the op in plain torch,
recomputed from the saved inputs: piece by piece where it has `pieces`, so that they take little
memory. An op without them raises an error; it never returns zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_tracing as is_tracing
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from omniattn.ops.dispatch import pieces as by_pieces
from omniattn.ops.dispatch.backward import Backward, BackwardOp, Plan, private_op
from omniattn.ops.dispatch.calls import compiled_attempt, compiled_record
from omniattn.ops.dispatch.functions import (
    Context,
    TransformedOp,
    apply_eager,
    derivative_in_graph,
    derivative_levels,
    inside_jvp,
    needs_gradient,
    one_by_one,
    with_empty_lists,
)
from omniattn.ops.dispatch.library import register_fake
from omniattn.ops.dispatch.names import Rules, Schema, call_by_name, outputs_like, picker
from omniattn.ops.dispatch.pieces import Pieces
from omniattn.ops.dispatch.plain import any_dual
from omniattn.ops.dispatch.ranks import ACTIVE
from omniattn.ops.dispatch.vmap import Fold, Layout, any_batched, flatten, over_batched

__all__ = ["DifferentiableOp", "Op"]

Arguments = tuple[Any, ...]


class Op:
    """A public op without gradients, called with the positional arguments of its schema.

    Args:
        name: name in the `omniattn` namespace.
        fakes: rules for outputs that differ from the first argument in shape or dtype.
        formula: the op in plain torch, a function of its arguments; `backend="reference"` runs it.
        fold: how vmap can run the op in one call; None if it cannot.
    """

    def __init__(
        self,
        name: str,
        *,
        fakes: Rules | None = None,
        formula: Callable[..., Any] | None = None,
        fold: Fold | None = None,
    ) -> None:
        self.name = name
        self.formula = formula
        self.schema = Schema(name)
        self.registered = getattr(torch.ops.omniattn, name).default
        self.raw: Callable[..., Any] = self.registered
        self.fold = fold
        #: Indices of the arguments that are lists of tensors.
        self.tensor_lists = [self.schema.arguments.index(n) for n in self.schema.tensor_lists]
        self.fake = outputs_like(self.schema, fakes or {})
        register_fake(name)(self.fake)

    def __call__(self, *args: Any) -> Any:
        if is_compiling():
            return self.registered(*args)
        if peek_interpreter_stack() is not None:
            return self._transformed(args)
        return self._traced(args) if is_tracing() else self.registered(*args)

    def _traced(self, args: Arguments) -> Any:
        """The registered op, which torch.jit.trace records, and with it its gradients.

        The numbers in lists become constants, since sizes of tensors are tensors under the tracer,
        and it takes lists of plain numbers only.
        """
        return self.registered(
            *(
                [n.item() if isinstance(n, Tensor) else n for n in a]
                if isinstance(a, (list, tuple)) and i not in self.tensor_lists
                else a
                for i, a in enumerate(args)
            )
        )

    def _transformed(self, args: Arguments) -> Any:
        layout, levels = self._layout(args), derivative_levels()
        return TransformedOp.apply(self, layout, levels, *flatten(layout, args))

    def _layout(self, args: Arguments) -> Layout:
        """Returns the lengths of arguments that are lists of tensors, None for the others."""
        if not self.tensor_lists:
            return None
        return tuple(len(a) if i in self.tensor_lists else None for i, a in enumerate(args))

    def _set_up(self, ctx: Any, inputs: Arguments, output: Any) -> None:
        """Marks all outputs as non-differentiable; torch.library passes the arguments by name."""
        ctx.mark_non_differentiable(*tree_leaves(output))


class DifferentiableOp(Op):
    """A public op with gradients, called with the positional arguments of its schema.

    Declarations use the names in the schema (_names.py), converted to indices on construction.
    `<name>_raw` must exist, too (csrc/ops/registry.h). `<name>_only`, if it exists, has no private
    outputs and is called if no gradient is needed. Autograd casts gradients to the dtypes of their
    arguments.

    Args:
        name: name in the `omniattn` namespace.
        fakes: rules for outputs that differ from the first argument, and the rules of
            `backward_op` if none is given.
        private: trailing outputs that calls do not return: statistics for the backward.
        backward: function from the values named by its parameters to gradients by argument name;
            `*arguments` are all arguments of `backward_op`. The gradient of an unused output is
            None; gradients that are not needed may be omitted. None to use the gradients of
            `backward_op`.
        backward_op: default `<name>_backward` if `backward` is not given either.
        direct: op that is all of `backward` if the lists of tensors are empty and the gradients
            that it requires are given; compiled calls then stay out of Python.
        unsaved: function of named arguments that returns the names of values which the backward of
            this call does not need.
        formula: see Op; returns the same outputs as a call.
        pieces: function of the same arguments that returns the formula in pieces, functions of the
            op's tensors in the order of `Plan.inputs`; None for calls that need no pieces.
        higher_derivatives: True if second and forward-mode derivatives use the formula.
        restored: rules that recompute arguments of `formula` which are not saved.
        differentiable_backward: True if `backward` calls only differentiable functions, so that
            second derivatives need no formula.
        refuse: function called with `<argument>_grad` if a gradient passes through vmap. It raises
            for arguments without a gradient; functions cannot detect that case inside vmap.
        fold: see Op.
    """

    formula: Callable[..., Any]
    #: Calls the op with tensors for which `is_plain` holds, before any other check. Returns None if
    #: the op refuses an argument: the caller's checks then name it.
    attempt: Callable[..., Any]
    #: Calls the op with tensors of which one needs its gradient.
    record: Callable[..., Any]

    def __init__(
        self,
        name: str,
        *,
        fakes: Rules | None = None,
        private: tuple[str, ...] = (),
        backward: Backward | None = None,
        backward_op: BackwardOp | None = None,
        direct: BackwardOp | None = None,
        unsaved: Callable[..., Sequence[str]] | None = None,
        formula: Callable[..., Any],
        pieces: Callable[..., Pieces | None] | None = None,
        higher_derivatives: bool = True,
        restored: Rules | None = None,
        differentiable_backward: bool = False,
        refuse: Callable[..., None] | None = None,
        fold: Fold | None = None,
    ) -> None:
        super().__init__(name, fakes=fakes, formula=formula, fold=fold)
        self.raw = private_op(f"{name}_raw")
        self.record = self._record
        self.inference: Callable[..., Any] | None = None
        self.unsaved = unsaved
        self.pieces = pieces
        self.higher_derivatives = higher_derivatives
        self.differentiable_backward = differentiable_backward
        self.refuse = refuse
        self.private_outputs = len(private)
        count = len(self.schema.outputs) - len(private)
        assert self.schema.outputs[count:] == private
        #: Subscript of the outputs that calls return, None for all.
        self.public: Any = None if not private else 0 if count == 1 else slice(count)
        if backward is None and backward_op is None:
            own = None if fold is None else Fold((*fold.names, *self.schema.outputs), fold.when)
            backward_op = BackwardOp(f"{name}_backward", fakes=fakes, fold=own)
        through_formula = higher_derivatives and not differentiable_backward
        self.plan = Plan(
            self.schema, backward, backward_op, restored or {}, through_formula, direct
        )
        #: Selects the tensors among the arguments, lists of tensors last; and the inverse, which
        #: maps a value per tensor and one for all other arguments to a value per argument.
        arguments, inputs = self.schema.arguments, self.plan.inputs
        self._tensors = picker([arguments.index(n) for n in self.schema.tensors])
        self._inputs = picker([arguments.index(n) for n in inputs])
        self._spread = picker([inputs.index(n) if n in inputs else -1 for n in arguments])
        self._register(name)

    def _register(self, name: str) -> None:
        register_fake(f"{name}_raw")(self.fake)
        if hasattr(torch.ops.omniattn, f"{name}_only"):
            self.inference = private_op(f"{name}_only")
            register_fake(f"{name}_only")(lambda *args: self._public(self.fake(*args)))
        direct = f"{name}_raw" if self.inference is None else f"{name}_only"
        outputs = len(self.schema.outputs) - self.private_outputs
        if self.unsaved is None:
            plan = self.plan
            self.record = compiled_record(
                *(f"{name}_raw", outputs, self._record, self),
                *(plan.saved_places, plan.kept_places, plan.native),
            )
        self.attempt = compiled_attempt(
            direct, 0 if self.inference else outputs, self._attempt, self.record
        )

        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            # torch.library requires lists for list arguments, even empty ones.
            needs = ctx.needs_input_grad
            found = self._spread((*self._gradients(ctx, self._inputs(needs), grads), None))
            return tuple(
                [None] * len(n) if g is None and isinstance(n, list) else g
                for n, g in zip(needs, found, strict=True)
            )

        torch.library.register_autograd(f"omniattn::{name}", backward, setup_context=self._set_up)

    def __call__(self, *args: Any) -> Any:
        if is_compiling():
            if peek_interpreter_stack() is not None and (asked := derivative_in_graph()):
                return self._derived_in_graph(asked, args)
            return self._public(self.registered(*args))
        if ACTIVE.region is not None:
            return ACTIVE.region.run(self, args)
        return self.alone(*args)

    def alone(self, *args: Any) -> Any:
        """An eager call without regard to tokens on other ranks."""
        if has_torch_function(args):
            return handle_torch_function(self, args, *args)
        for i in self.tensor_lists:
            if has_torch_function(args[i]):
                return handle_torch_function(self, args[i], *args)
        if peek_interpreter_stack() is not None:
            if self.higher_derivatives and inside_jvp() and self._in_pieces(args) is None:
                return self._call_formula(args)
            return self._public(self._transformed(args))
        if forward_ad._current_level >= 0 and any_dual(args):
            return self._call_dual(args)
        return self._call_plain(args)

    def _attempt(self, *args: Any) -> Any:
        try:
            return self._call_plain(args)
        except (RuntimeError, TypeError):
            return None

    def _call_plain(self, args: Arguments) -> Any:
        if is_tracing():
            return self._public(self._traced(args))
        if is_grad_enabled():
            for t in self._flat_tensors(args):
                if t is not None and t.requires_grad:
                    return self.record(*args)
        if self.inference is not None:
            return self.inference(*args)
        output = self.raw(*args)
        return output if self.public is None else output[self.public]

    def _flat_tensors(self, args: Arguments) -> Arguments:
        tensors = self._tensors(args)
        for i in self.tensor_lists:
            tensors += tuple(args[i])
        return tensors

    def _record(self, *args: Any) -> Any:
        return apply_eager(self, args, *self._flat_tensors(args))

    def _in_pieces(self, args: Arguments) -> Pieces | None:
        return None if self.pieces is None else self.pieces(*args)

    def _call_dual(self, args: Arguments) -> Any:
        """A call with tangents of torch.autograd.forward_ad, which has one level: a graph of them
        is that of the formula."""
        pieces = self._in_pieces(args)
        tensors, _ = one_by_one(self._inputs(args), len(self.tensor_lists))
        if pieces is None or (is_grad_enabled() and any(needs_gradient(t) for t in tensors)):
            return self._call_formula(args)
        pairs = [(t, None) if t is None else forward_ad.unpack_dual(t) for t in tensors]
        given = [i for i, (_, tangent) in enumerate(pairs) if tangent is not None]
        kernel = pieces.kernel_of_jvp(given)
        if kernel is None:
            return self._public(pieces.run(tensors))
        primal = tree_map_only(Tensor, lambda t: forward_ad.unpack_dual(t).primal, args)
        outputs = self.raw(*primal)
        further = outputs if pieces.kept else ()
        moved = kernel(*(t for t, _ in pairs), *(pairs[i][1] for i in given), *further)
        duals = zip(outputs, moved, strict=False)  # private outputs have no tangents
        return self._public(tuple(forward_ad.make_dual(y, t) for y, t in duals))

    def _derived_in_graph(self, asked: str, args: Arguments) -> Any:
        """A call inside a derivative of torch.func inside a graph, where a registered op has no
        gradients, and tangents of 0."""
        if asked == "jvp":
            return self._call_formula(args)
        raise NotImplementedError(
            f"omniattn::{self.name} has no gradient in a graph with torch.func.grad or vjp; "
            "compile the function alone and call torch.autograd.grad, or compile without "
            "fullgraph=True"
        )

    def _public(self, output: Any) -> Any:
        return output if self.public is None else output[self.public]

    def _set_up(self, ctx: Any, inputs: Arguments, output: Any) -> None:
        self._remember(ctx, inputs, output)
        if self.pieces is not None:
            ctx.save_for_forward(*ctx.to_save)
        if self.private_outputs:
            ctx.mark_non_differentiable(*output[-self.private_outputs :])

    def _call_formula(self, args: Arguments) -> Any:
        if not self.higher_derivatives:
            raise NotImplementedError(
                f"omniattn::{self.name} has no forward-mode derivative; "
                'use backend="reference" for functions that need one'
            )
        return self.formula(*args)

    def _remember(self, ctx: Any, args: Arguments, output: Any) -> None:
        unsaved: Sequence[str] = ()
        if self.unsaved is not None:
            unsaved = call_by_name(self.unsaved, self.schema.by_name(args, {}))
        self.plan.remember(ctx, args, output, unsaved)

    def gradients_of_call(
        self,
        saved: Sequence[Tensor | None],
        kept: Sequence[Any],
        lengths: Sequence[int],
        needs: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of the tensors of a compiled call, one by one (csrc/calls)."""
        return self.flat_gradients(Context(saved, kept, lengths), needs, grads)

    def flat_gradients(
        self, ctx: Any, needs: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of the tensors of a call, one by one."""
        if any_batched(grads) and not is_grad_enabled():
            return over_batched(lambda *each: self.flat_gradients(ctx, needs, each), grads)
        if not self.tensor_lists:
            return self._gradients(ctx, needs, grads)
        found = self._gradients(ctx, self.plan.group(needs, ctx.lengths), grads)
        return with_empty_lists(found, ctx.lengths)

    def _gradients(self, ctx: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]) -> Any:
        """Returns the gradients; differentiable if grad mode is on (create_graph=True)."""
        if is_grad_enabled() and not self.differentiable_backward:
            return self._second_order(ctx, needs, grads)
        return self._first_order(ctx, needs, grads)

    def _first_order(self, ctx: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]) -> Any:
        if grads[0] is None and all(grad is None for grad in grads):
            return [None] * len(needs)
        return self.plan.find(self.plan.read(ctx, needs, grads), needs)

    def _second_order(self, ctx: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]) -> Any:
        if not self.higher_derivatives:
            raise NotImplementedError(
                f"omniattn::{self.name} has no second derivative; "
                'use backend="reference" for functions that need one'
            )
        values = self.plan.read(ctx, needs, grads)
        pieces = self._in_pieces(self.plan.arguments(values))
        if pieces is not None:
            return self._gradients_in_pieces(pieces, values, needs, grads)
        with torch.enable_grad():
            # Views detach the inputs from each other: if k was computed from q, the gradient of k
            # must not flow to q here.
            saved = self.plan.arguments(values)
            args = tree_map_only(Tensor, lambda t: t.view_as(t), saved)
            outputs = self.formula(*args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = [
                (o, g)
                for o, g in zip(outputs, grads, strict=False)
                if g is not None and o.requires_grad
            ]
            lists = len(self.tensor_lists)
            tensors, lengths = one_by_one(self._inputs(args), lists)
            flags, _ = one_by_one(needs, lists)
            wanted = [t for t, flag in zip(tensors, flags, strict=True) if flag]
            if not wanted or all(g is None for g in grads):
                return [None] * len(needs)
            if not pairs or not all(t.requires_grad for t in wanted):
                return self._of_ended_level(args, needs, grads)
            found = torch.autograd.grad(
                [o for o, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=True,
                allow_unused=True,
            )
        grads_found = iter(found)
        return self.plan.group([next(grads_found) if flag else None for flag in flags], lengths)

    def _gradients_in_pieces(
        self,
        pieces: Pieces,
        values: Sequence[Any],
        needs: Sequence[Any],
        grads: Sequence[Tensor | None],
    ) -> Any:
        """Computes the gradients by the backward, and their derivatives by pieces."""
        lists = len(self.tensor_lists)
        tensors, lengths = one_by_one(self._inputs(self.plan.arguments(values)), lists)
        flags, _ = one_by_one(needs, lists)
        wanted = [i for i, flag in enumerate(flags) if flag]
        leaves, spec = tree_flatten(values)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def by_backward(*given: Tensor) -> list[Tensor]:
            filled = list(leaves)
            first = len(given) - len(further)
            for i, t in zip(places, given[first : first + len(places)], strict=True):
                filled[i] = t
            found = self.plan.find(tree_unflatten(filled, spec), needs)
            flat = with_empty_lists(found, lengths)
            return [torch.zeros_like(tensors[i]) if flat[i] is None else flat[i] for i in wanted]

        further = [*(leaves[i] for i in places), *self.results_for_kernels(pieces, values)]
        carried = by_pieces.carried_outputs(pieces, tensors)
        found = by_pieces.vjp(pieces, tensors, carried, further, wanted, grads, by_backward)
        rest = iter(found)
        return self.plan.group([next(rest) if flag else None for flag in flags], lengths)

    def results_for_kernels(self, pieces: Pieces, values: Sequence[Any]) -> list[Tensor]:
        """Returns the results of a call, of named values, that kernels of its pieces read."""
        names = self.schema.outputs if pieces.kept else ()
        return [values[self.plan.places[n]] for n in names]

    def _of_ended_level(
        self, args: Arguments, needs: Sequence[Any], grads: Sequence[Tensor | None]
    ) -> Any:
        """Returns the gradients where saved values need none any more: those of a function of
        torch.func.vjp, once its level has ended."""
        lists = len(self.tensor_lists)
        tensors, lengths = one_by_one(self._inputs(args), lists)
        flags, _ = one_by_one(needs, lists)

        def outputs_of(wanted: list[Tensor]) -> tuple[Tensor, ...]:
            given = iter(wanted)
            flat = [next(given) if f else t for f, t in zip(flags, tensors, strict=True)]
            inputs = self._spread((*self.plan.group(flat, lengths), None))
            filled = (a if t is None else t for a, t in zip(args, inputs, strict=True))
            outputs = self.formula(*filled)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        wanted = [t for t, flag in zip(tensors, flags, strict=True) if flag]
        pulled: Any = torch.func.vjp(outputs_of, wanted)  # typed as of three values, too
        outputs, pull = pulled
        pairs = zip(outputs, grads, strict=False)
        (found,) = pull(tuple(torch.zeros_like(o) if g is None else g for o, g in pairs))
        rest = iter(found)
        return self.plan.group([next(rest) if flag else None for flag in flags], lengths)
