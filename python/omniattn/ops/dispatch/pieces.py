"""Differentiates the definition of an op piece by piece, so that the memory of one piece suffices.

`Pieces` is a function of tensors, y = sum over n of f_n(parts of the arguments), in which each
result of f_n is added to a part of an output. Its vjp is such a function, too: f_n's vjp reads the
same parts of the arguments and parts of the incoming gradients, and adds to the parts that f_n
read. So are its jvp and its vmap. So derivatives of every order, in every mode, are evaluated
piece by piece, and only arguments and results are held between two orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from omniattn.reference.precision import widen

__all__ = ["ELEMENTS", "Piece", "Pieces", "evaluate", "gradients", "jvp", "vjp"]

#: Number of elements of the largest tensors of a piece, for functions that choose their pieces.
ELEMENTS = 1 << 19

#: Subscript of a part of a tensor; () is all of it.
Index = tuple[slice, ...]
#: Arguments; None for those that a call lacks.
Tensors = Sequence[Tensor | None]
_ALL = slice(None)


@dataclass(frozen=True)
class Piece:
    """A function of parts of the arguments, whose results are added to parts of the outputs."""

    function: Callable[..., Sequence[Tensor]]
    reads: tuple[Index, ...]
    adds_to: tuple[Index, ...]


@dataclass(frozen=True)
class Pieces:
    """Sums of pieces, with the shapes and dtypes of all outputs.

    `direct`, if given, computes the outputs by other means from the arguments and further ones,
    whose derivatives are part of the arguments' own.
    """

    pieces: tuple[Piece, ...]
    outputs: tuple[tuple[torch.Size, torch.dtype], ...]
    direct: Callable[..., Sequence[Tensor]] | None = None
    further: int = 0

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
        for piece in self.pieces:
            parts = (None if t is None else t[at] for t, at in zip(wide, piece.reads, strict=True))
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
        """Returns the function of `tensors` and the gradients of the outputs `given` that computes
        the gradients of the arguments `wanted`."""
        count = len(tensors)

        def pulled(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
            def gradients(*values: Any) -> Sequence[Tensor]:
                arguments, grads = values[:count], values[count:]
                run = _of(function, arguments, wanted, given)
                pull: Any = torch.func.vjp(run, *(arguments[i] for i in wanted))[1]
                return pull(grads)

            return gradients

        pieces = tuple(
            Piece(
                pulled(p.function),
                (*p.reads, *(p.adds_to[i] for i in given)),
                tuple(p.reads[i] for i in wanted),
            )
            for p in self.pieces
        )
        return Pieces(pieces, _like(tensors, wanted))

    def jvp(self, tensors: Tensors, given: Sequence[int]) -> Pieces:
        """Returns the function of `tensors` and tangents of the arguments `given` that computes the
        tangents of the outputs."""
        count, everything = len(tensors), range(len(self.outputs))

        def pushed(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
            def tangents(*values: Any) -> Sequence[Tensor]:
                arguments = values[:count]
                run = _of(function, arguments, given, everything)
                found: Any = torch.func.jvp(run, tuple(arguments[i] for i in given), values[count:])
                return found[1]

            return tangents

        pieces = tuple(
            Piece(pushed(p.function), (*p.reads, *(p.reads[i] for i in given)), p.adds_to)
            for p in self.pieces
        )
        return Pieces(pieces, self.outputs)

    def vmap(self, size: int, dims: Sequence[int | None]) -> Pieces:
        """Returns the function of a batch of arguments, whose batch dimension comes first."""
        batched = tuple(None if dim is None else 0 for dim in dims)
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
        return Pieces(pieces, tuple((torch.Size((size, *s)), d) for s, d in self.outputs))


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
    return _Evaluated.apply(pieces, *tensors)


class _Evaluated(torch.autograd.Function):
    @staticmethod
    def forward(pieces: Pieces, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        if pieces.direct is not None:
            return tuple(pieces.direct(*tensors))
        return pieces.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.pieces, *tensors = inputs
        tensors = tensors[: len(tensors) - ctx.pieces.further]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        pieces, tensors = ctx.pieces, ctx.saved_tensors
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[1 : 1 + len(tensors)]) if need]
        found = vjp(pieces, tensors, wanted, grads)
        rest = iter(found)
        return (
            None,
            *(next(rest) if i in wanted else None for i in range(len(tensors))),
            *(None,) * pieces.further,
        )

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        return jvp(ctx.pieces, tensors, tangents[: len(tensors)])

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


def vjp(
    pieces: Pieces, tensors: Tensors, wanted: Sequence[int], grads: Tensors
) -> tuple[Tensor | None, ...]:
    """Computes the gradients of the arguments `wanted`, None without gradients of outputs."""
    given = [i for i, g in enumerate(grads) if g is not None]
    if not given or not wanted:
        return (None,) * len(wanted)
    chosen = [grads[i] for i in given]
    return evaluate(pieces.vjp(tensors, wanted, given), *tensors, *chosen)


def gradients(
    pieces: Pieces,
    tensors: Tensors,
    wanted: Sequence[int],
    grads: Tensors,
    direct: Callable[..., Sequence[Tensor]],
    further: Tensors,
) -> tuple[Tensor | None, ...]:
    """As `vjp`, with values computed by `direct`, whose last arguments are `further`."""
    given = [i for i, g in enumerate(grads) if g is not None]
    if not given or not wanted:
        return (None,) * len(wanted)
    chosen = [grads[i] for i in given]
    made = pieces.vjp(tensors, wanted, given)
    made = replace(made, direct=direct, further=len(further))
    return evaluate(made, *tensors, *chosen, *further)


def jvp(pieces: Pieces, tensors: Tensors, tangents: Tensors) -> tuple[Tensor, ...]:
    """Computes the tangents of the outputs."""
    given = [i for i, t in enumerate(tangents) if t is not None]
    chosen = [tangents[i] for i in given]
    return evaluate(pieces.jvp(tensors, given), *tensors, *chosen)
