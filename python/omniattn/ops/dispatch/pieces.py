"""Differentiates the definition of an op piece by piece, so that the memory of one piece suffices.

`Pieces` is a function of tensors, y = sum over n of f_n(parts of the arguments), in which each
result of f_n is added to a part of an output. A piece may also read what earlier pieces added to
outputs, such as the state before a chunk of tokens. The vjp is such a function, too: f_n's vjp, in
the reverse order, reads the same parts, which are then arguments, and parts of the gradients, and
adds to the parts that f_n read. So are its jvp and its vmap. So derivatives of every order, in
every mode, are evaluated piece by piece, and only arguments and results are held between orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from omniattn.ops.dispatch.vmap import any_batched, over_batched
from omniattn.reference.precision import widen

__all__ = ["ELEMENTS", "Composed", "Piece", "Pieces", "carried_outputs", "evaluate", "jvp", "vjp"]

#: Number of elements of the largest tensors of a piece, for functions that choose their pieces.
ELEMENTS = 1 << 19

#: Subscript of a part of a tensor; () is all of it.
Index = tuple[slice, ...]
#: Arguments; None for those that a call lacks.
Tensors = Sequence[Tensor | None]
#: Function of the arguments and further ones that computes the outputs.
Kernel = Callable[..., Sequence[Tensor]]
_ALL = slice(None)


@dataclass(frozen=True)
class Piece:
    """A function of parts of the arguments and of carried outputs, whose results are added to parts
    of the outputs."""

    function: Callable[..., Sequence[Tensor]]
    reads: tuple[Index, ...]
    adds_to: tuple[Index, ...]


@dataclass(frozen=True)
class Pieces:
    """Sums of pieces, with the shapes and dtypes of all outputs, of which pieces read those
    `carried`.

    `direct`, if given, computes the outputs by other means from the arguments and further ones,
    whose derivatives are part of the arguments' own. The last `kept` of these are the further
    arguments of kernels that compute derivatives.
    """

    pieces: tuple[Piece, ...]
    outputs: tuple[tuple[torch.Size, torch.dtype], ...]
    carried: tuple[int, ...] = ()
    direct: Kernel | None = None
    further: int = 0
    kept: int = 0

    @classmethod
    def whole(
        cls, function: Callable[..., Sequence[Tensor]], arguments: int, like: Sequence[Tensor]
    ) -> Pieces:
        """Returns a single piece, with outputs like these tensors."""
        piece = Piece(function, ((),) * arguments, ((),) * len(like))
        return cls((piece,), tuple((t.shape, t.dtype) for t in like))

    def run(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """Evaluates the pieces one by one; sums over half-precision tensors are in fp32."""
        wide = [t if t is None or not t.is_floating_point() else widen(t) for t in tensors]
        device = next(t.device for t in wide if t is not None)
        sums: list[Tensor | None] = [None] * len(self.outputs)
        for i in self.carried:
            shape, dtype = self.outputs[i]
            sums[i] = torch.zeros(shape, dtype=dtype, device=device)
        for piece in self.pieces:
            read = (*wide, *(sums[i] for i in self.carried))
            parts = (None if t is None else t[at] for t, at in zip(read, piece.reads, strict=True))
            results = piece.function(*parts)
            for i, (result, at) in enumerate(zip(results, piece.adds_to, strict=True)):
                if len(self.pieces) == 1 and not at:
                    sums[i] = result
                    continue
                total = sums[i]
                if total is None:
                    shape = self.outputs[i][0]
                    total = torch.zeros(shape, dtype=result.dtype, device=device)
                    sums[i] = total
                total[at] += result
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) if total is None else total.to(dtype)
            for total, (shape, dtype) in zip(sums, self.outputs, strict=True)
        )

    def vjp(self, tensors: Tensors, wanted: Sequence[int], given: Sequence[int]) -> Pieces:
        """Returns the function of `tensors`, the carried outputs and the gradients of the outputs
        `given` that computes the gradients of the arguments `wanted`, and carries those of the
        carried outputs."""
        count = len(tensors) + len(self.carried)
        varied = (*wanted, *range(len(tensors), count))
        used = sorted({*given, *self.carried})

        def pulled(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
            def gradients(*values: Any) -> Sequence[Tensor]:
                arguments, grads = values[:count], values[count:]
                found = dict(zip(given, grads, strict=False))
                for i, grad in zip(self.carried, grads[len(given) :], strict=True):
                    found[i] = grad + found[i] if i in found else grad
                run = _of(function, arguments, varied, used)
                pull: Any = torch.func.vjp(run, *(arguments[i] for i in varied))[1]
                return pull(tuple(found[i] for i in used))

            return gradients

        pieces = tuple(
            Piece(
                pulled(p.function),
                (*p.reads, *(p.adds_to[i] for i in (*given, *self.carried))),
                tuple(p.reads[i] for i in varied),
            )
            for p in reversed(self.pieces)
        )
        carried = tuple(self.outputs[i] for i in self.carried)
        places = tuple(range(len(wanted), len(varied)))
        return Pieces(pieces, (*_like(tensors, wanted), *carried), places)

    def kernel_of_vjp(self, wanted: Sequence[int], given: Sequence[int]) -> Kernel | None:
        """Returns a `direct` function for the result of `vjp`, None if there is no kernel."""
        return None

    def kernel_of_jvp(self, given: Sequence[int]) -> Kernel | None:
        """Returns a `direct` function for the result of `jvp`, None if there is no kernel."""
        return None

    def jvp(self, tensors: Tensors, given: Sequence[int]) -> Pieces:
        """Returns the function of `tensors`, the carried outputs and tangents of the arguments
        `given` that computes the tangents of the outputs."""
        count, everything = len(tensors) + len(self.carried), range(len(self.outputs))
        varied = (*given, *range(len(tensors), count))

        def pushed(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
            def tangents(*values: Any) -> Sequence[Tensor]:
                arguments = values[:count]
                run = _of(function, arguments, varied, everything)
                # torch.func.jvp writes tangents in the layout of their values.
                at = tuple(arguments[i].contiguous() for i in varied)
                # Without grad mode, a backward of torch may call kernels that have no tangents.
                with torch.enable_grad():
                    found: Any = torch.func.jvp(run, at, values[count:])
                return found[1]

            return tangents

        pieces = tuple(
            Piece(pushed(p.function), (*p.reads, *(p.reads[i] for i in varied)), p.adds_to)
            for p in self.pieces
        )
        return Pieces(pieces, self.outputs, self.carried)

    def vmap(self, size: int, dims: Sequence[int | None]) -> Pieces:
        """Returns the function of a batch of arguments, whose batch dimension comes first."""
        batched = (*(None if dim is None else 0 for dim in dims), *(0 for _ in self.carried))
        step = max(1, size // max(1, len(self.pieces)))
        parts = [slice(i, min(i + step, size)) for i in range(0, size, step)]
        pieces = tuple(
            Piece(
                torch.func.vmap(p.function, batched),
                tuple(
                    at if dim is None else (part, *at)
                    for at, dim in zip(p.reads, batched, strict=True)
                ),
                tuple((part, *at) for at in p.adds_to),
            )
            for part in parts
            for p in self.pieces
        )
        outputs = tuple((torch.Size((size, *s)), d) for s, d in self.outputs)
        return Pieces(pieces, outputs, self.carried)


@dataclass(frozen=True)
class Composed(Pieces):
    """A single piece, whose tangents are a function of the arguments and their tangents, which is
    made of differentiable functions and calls the piece's own only without tangents."""

    tangents: Callable[[Tensors, Tensors], Sequence[Tensor]] | None = None

    def run(self, tensors: Tensors) -> tuple[Tensor, ...]:
        pairs = [(t, None) if t is None else forward_ad.unpack_dual(t) for t in tensors]
        at, along = ([pair[i] for pair in pairs] for i in (0, 1))
        found = super().run(at)
        if all(t is None for t in along):
            return found
        moved = self.tangents_at(at, [None if t is None else widen(t) for t in along])
        return tuple(
            forward_ad.make_dual(y, t.to(y.dtype)) for y, t in zip(found, moved, strict=True)
        )

    def tangents_at(self, tensors: Tensors, along: Tensors) -> Sequence[Tensor]:
        assert self.tangents is not None
        return self.tangents(tensors, along)

    def vjp(self, tensors: Tensors, wanted: Sequence[int], given: Sequence[int]) -> Pieces:
        plain = super().vjp(tensors, wanted, given)
        return Pulled(plain.pieces, plain.outputs, of=self, wanted=wanted, given=given)

    def jvp(self, tensors: Tensors, given: Sequence[int]) -> Pieces:
        count = len(tensors)

        def pushed(*values: Any) -> Sequence[Tensor]:
            return self.tangents_at(values[:count], _filled(count, given, values[count:]))

        piece = Piece(pushed, ((),) * (count + len(given)), ((),) * len(self.outputs))
        return Pieces((piece,), self.outputs)

    def vmap(self, size: int, dims: Sequence[int | None]) -> Pieces:
        return Mapped.over(self, size, dims, (False,) * len(self.outputs))


@dataclass(frozen=True)
class Pulled(Pieces):
    """The gradients of the arguments `wanted` of a composed function, a function of its arguments
    and of the gradients of its outputs `given`.

    Hessians are symmetric: along x', the gradients move by the gradients of <grads, tangents along
    x'>.
    """

    of: Composed | None = None
    wanted: Sequence[int] = ()
    given: Sequence[int] = ()

    def vjp(self, tensors: Tensors, wanted: Sequence[int], given: Sequence[int]) -> Pieces:
        total = len(tensors)
        count = total - len(self.given)
        of_arguments = [i for i in wanted if i < count]

        def gradients(*values: Any) -> Sequence[Tensor]:
            arguments, grads, weights = values[:count], values[count:total], values[total:]
            along = _filled(count, [self.wanted[i] for i in given], weights)
            moved, pulled = self._moved(arguments, along, of_arguments, grads)
            rest = iter(pulled)
            return [next(rest) if i < count else moved[i - count] for i in wanted]

        piece = Piece(gradients, ((),) * (total + len(given)), ((),) * len(wanted))
        return Pieces((piece,), _like(tensors, wanted))

    def jvp(self, tensors: Tensors, given: Sequence[int]) -> Pieces:
        total, gradients = len(tensors), self.pieces[0].function
        count = total - len(self.given)

        def tangents(*values: Any) -> Sequence[Tensor]:
            arguments, grads = values[:count], values[count:total]
            moved = _filled(total, given, values[total:])
            found: Sequence[Tensor] = [torch.zeros_like(arguments[i]) for i in self.wanted]
            if any(t is not None for t in moved[:count]):
                found = self._moved(arguments, moved[:count], self.wanted, grads)[1]
            if any(t is not None for t in moved[count:]):
                pairs = zip(moved[count:], grads, strict=True)
                of_grads = [torch.zeros_like(g) if t is None else t for t, g in pairs]
                added = gradients(*arguments, *of_grads)
                found = [a + b for a, b in zip(found, added, strict=True)]
            return found

        piece = Piece(tangents, ((),) * (total + len(given)), ((),) * len(self.wanted))
        return Pieces((piece,), self.outputs)

    def vmap(self, size: int, dims: Sequence[int | None]) -> Pieces:
        return Mapped.over(self, size, dims, (False,) * len(self.outputs))

    def _moved(
        self, arguments: Sequence[Any], along: Tensors, varied: Sequence[int], grads: Sequence[Any]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns the tangents of the outputs `given`, and the gradients of their products with
        `grads` with respect to the arguments `varied`."""
        assert self.of is not None
        composed = self.of

        def tangents(*values: Any) -> Sequence[Tensor]:
            return composed.tangents_at(values, along)

        run = _of(tangents, arguments, varied, self.given)
        if not varied:
            return run(), ()
        found: Any = torch.func.vjp(run, *(arguments[i] for i in varied))
        moved, pull = found
        return moved, pull(tuple(grads))


@dataclass(frozen=True)
class Mapped(Pieces):
    """A composed function or its derivative over a batch of arguments, with its own derivatives.

    `dims` has 0 for arguments with a batch dimension, which comes first, else None; outputs are
    sums over the batch where `summed` is True.
    """

    inner: Pieces | None = None
    size: int = 0
    dims: tuple[int | None, ...] = ()
    summed: tuple[bool, ...] = ()

    @classmethod
    def over(
        cls, inner: Pieces, size: int, dims: Sequence[int | None], summed: Sequence[bool]
    ) -> Pieces:
        places: tuple[int | None, ...] = tuple(None if dim is None else 0 for dim in dims)
        mapped: Any = torch.func.vmap(inner.pieces[0].function, places)

        def run(*values: Any) -> Sequence[Tensor]:
            return [t.sum(0) if s else t for t, s in zip(mapped(*values), summed, strict=True)]

        outputs = tuple(
            (shape if s else torch.Size((size, *shape)), dtype)
            for (shape, dtype), s in zip(inner.outputs, summed, strict=True)
        )
        piece = Piece(run, ((),) * len(places), ((),) * len(outputs))
        return cls((piece,), outputs, inner=inner, size=size, dims=places, summed=tuple(summed))

    def vjp(self, tensors: Tensors, wanted: Sequence[int], given: Sequence[int]) -> Pieces:
        assert self.inner is not None
        inner = self.inner.vjp(self._sample(tensors), wanted, given)
        dims = (*self.dims, *(None if self.summed[i] else 0 for i in given))
        return Mapped.over(inner, self.size, dims, [self.dims[i] is None for i in wanted])

    def jvp(self, tensors: Tensors, given: Sequence[int]) -> Pieces:
        assert self.inner is not None
        inner = self.inner.jvp(self._sample(tensors), given)
        dims = (*self.dims, *(self.dims[i] for i in given))
        return Mapped.over(inner, self.size, dims, self.summed)

    def vmap(self, size: int, dims: Sequence[int | None]) -> Pieces:
        return Mapped.over(self, size, dims, (False,) * len(self.outputs))

    def _sample(self, tensors: Tensors) -> Tensors:
        pairs = zip(tensors, self.dims, strict=True)
        return [t if t is None or dim is None else t[0] for t, dim in pairs]


def _filled(count: int, places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Returns `count` values, those at other places None."""
    found = [None] * count
    for i, value in zip(places, values, strict=True):
        found[i] = value
    return found


def _of(
    function: Callable[..., Sequence[Tensor]],
    arguments: Sequence[Any],
    varied: Sequence[int],
    outputs: Sequence[int],
) -> Callable[..., tuple[Tensor, ...]]:
    """Returns the `outputs` of a function as a function of the arguments `varied`."""

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        filled = list(arguments)
        for i, value in zip(varied, values, strict=True):
            filled[i] = value
        found = function(*filled)
        return tuple(found[i] for i in outputs)

    return run


def _like(tensors: Tensors, wanted: Sequence[int]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    chosen = (tensors[i] for i in wanted)
    return tuple((t.shape, t.dtype) for t in chosen if t is not None)


def evaluate(pieces: Pieces, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Evaluates pieces as a function with derivatives of every order."""
    if any_batched(tensors):
        return tuple(over_batched(partial(_Evaluated.apply, pieces), tensors))
    return _Evaluated.apply(pieces, *tensors)


class _Evaluated(torch.autograd.Function):
    @staticmethod
    def forward(pieces: Pieces, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        if pieces.direct is not None:
            return tuple(pieces.direct(*tensors))
        with _without_hooks():
            return pieces.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.pieces, *tensors = inputs
        ctx.count = len(tensors) - ctx.pieces.further
        carried = (output[i] for i in ctx.pieces.carried)
        saved = (*tensors[: ctx.count], *carried, *tensors[len(tensors) - ctx.pieces.kept :])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        pieces, count = ctx.pieces, ctx.count
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[1 : 1 + count]) if need]
        found = vjp(pieces, *_Evaluated.saved(ctx), wanted, grads)
        rest = iter(found)
        return (
            None,
            *(next(rest) if i in wanted else None for i in range(count)),
            *(None,) * pieces.further,
        )

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        return jvp(ctx.pieces, *_Evaluated.saved(ctx), tangents[: ctx.count])

    @staticmethod
    def saved(ctx: Any) -> tuple[Tensors, Tensors, Tensors]:
        """Returns the arguments, the carried outputs and the arguments of kernels."""
        count, end = ctx.count, ctx.count + len(ctx.pieces.carried)
        saved = ctx.saved_tensors
        return saved[:count], saved[count:end], saved[end:]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], pieces: Pieces, *tensors: Tensor | None) -> Any:
        count = len(tensors) - pieces.further
        dims = in_dims[1 : 1 + count]
        first = [
            t if t is None or dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, dims, strict=False)
        ]
        results = evaluate(pieces.vmap(info.batch_size, dims), *first)
        return results, (0,) * len(results)


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Suspends hooks of saved tensors, such as those of a checkpoint: torch.func refuses them, and
    the graph of a piece ends with it."""
    state, hooks = torch._C._autograd, []
    while (top := state._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        state._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            state._push_saved_tensors_default_hooks(pack, unpack)


def vjp(
    pieces: Pieces,
    tensors: Tensors,
    carried: Tensors,
    further: Tensors,
    wanted: Sequence[int],
    grads: Tensors,
    direct: Kernel | None = None,
) -> tuple[Tensor | None, ...]:
    """Computes the gradients of the arguments `wanted`, None without gradients of outputs.

    `carried` has the values of the carried outputs. `direct`, by default a kernel of the pieces, is
    a function that computes the gradients, with the arguments `further`.
    """
    given = [i for i, g in enumerate(grads) if g is not None]
    if not given or not wanted:
        return (None,) * len(wanted)
    made, values = pieces.vjp(tensors, wanted, given), [grads[i] for i in given]
    direct = direct or pieces.kernel_of_vjp(wanted, given)
    return _evaluate_by(direct, made, (*tensors, *carried, *values), further)[: len(wanted)]


def jvp(
    pieces: Pieces, tensors: Tensors, carried: Tensors, further: Tensors, tangents: Tensors
) -> tuple[Tensor, ...]:
    """Computes the tangents of the outputs; `carried` and `further` as for `vjp`."""
    given = [i for i, t in enumerate(tangents) if t is not None]
    made, chosen = pieces.jvp(tensors, given), [tangents[i] for i in given]
    kernel = pieces.kernel_of_jvp(given)
    return _evaluate_by(kernel, made, (*tensors, *carried, *chosen), further)


def _evaluate_by(
    direct: Kernel | None, pieces: Pieces, tensors: Tensors, further: Tensors
) -> tuple[Tensor, ...]:
    """Evaluates pieces by a function of `tensors` and `further`, if there is one."""
    if direct is None or pieces.carried:
        return evaluate(replace(pieces, kept=0), *tensors)
    return evaluate(replace(pieces, direct=direct, further=len(further)), *tensors, *further)


def carried_outputs(pieces: Pieces, tensors: Tensors) -> tuple[Tensor, ...]:
    """Computes the values of the carried outputs, with derivatives."""
    if not pieces.carried:
        return ()
    outputs = evaluate(pieces, *tensors)
    return tuple(outputs[i] for i in pieces.carried)
