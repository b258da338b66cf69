"""Derivatives of attention by its kernel for tangents on the CPU, with the tiles for further ones.

Hessians are symmetric: along x', the gradients move by the gradients of <grads, tangents along x'>.
So one kernel, which computes the tangents of the outputs and those of the gradients, has the values
of jvp, of the vjp and the jvp of a gradient, and of the vjp of a jvp. It takes scores that are a
softmax of scaled products plus terms without derivatives (`CONSTANT`), with every mask but pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn.encoding.options import TABLES, ScoreKind
from omniattn.ops.dispatch.backward import BackwardOp, private_op
from omniattn.ops.dispatch.library import has_kernel
from omniattn.ops.dispatch.names import like
from omniattn.ops.dispatch.pieces import Kernel, Pieces, Tensors

__all__ = ["AttentionPieces", "has_tangent_kernel"]

#: Score rules whose terms the kernel adds to the logits, or to the sum of a row, as constants.
CONSTANT = frozenset((ScoreKind.BIAS, ScoreKind.SINKS, ScoreKind.HEAD_SCALE, *TABLES))
#: Numbers of q, k and v among the arguments, and the number of results that the kernel reads.
_QKV, _RESULTS = range(3), 3


def _gradient(t: Tensor, grad_out: Tensor | None) -> Tensor:
    return t.new_empty(0) if grad_out is None else like(t)


_tangents = BackwardOp(
    "attention_tangents",
    fakes={
        "tangent_out": lambda out: like(out),
        "tangent_lse": lambda lse: like(lse),
        "tangent_grad_q": lambda q, grad_out: _gradient(q, grad_out),
        "tangent_grad_k": lambda k, grad_out: _gradient(k, grad_out),
        "tangent_grad_v": lambda v, grad_out: _gradient(v, grad_out),
    },
).call
_backward = private_op("attention_backward")
#: Emulated kernels of CUDA, which tests run on the CPU, have none for tangents.
_PRESENT = has_kernel("attention_tangents", "cpu")


def has_tangent_kernel(q: Tensor, score: Sequence[int]) -> bool:
    return _PRESENT and q.is_cpu and all(kind in CONSTANT for kind in score[::3])


@dataclass(frozen=True)
class AttentionPieces(Pieces):
    """Tiles of a call for which `has_tangent_kernel` holds, functions of q, k, v, seed and aux."""

    mask: Sequence[int] = ()
    score: Sequence[int] = ()
    params: Sequence[float] = ()
    kept: int = _RESULTS

    def vjp(self, tensors: Tensors, wanted: Sequence[int], given: Sequence[int]) -> Pieces:
        plain = super().vjp(tensors, wanted, given)
        return _Gradients(
            *(plain.pieces, plain.outputs),
            of=self,
            kept=self.kept,
            count=len(tensors),
            wanted=tuple(wanted),
            given=tuple(given),
        )

    def jvp(self, tensors: Tensors, given: Sequence[int]) -> Pieces:
        plain = super().jvp(tensors, given)
        return _Tangents(
            *(plain.pieces, plain.outputs),
            of=self,
            kept=self.kept,
            count=len(tensors),
            given=tuple(given),
        )

    def kernel_of_jvp(self, given: Sequence[int]) -> Kernel | None:
        if not self.kept or any(i not in _QKV for i in given):
            return None

        def tangents(*values: Any) -> Sequence[Tensor]:
            end = len(values) - _RESULTS
            count = end - len(given)
            moved = dict(zip(given, values[count:end], strict=True))
            return self.tangents(values[:count], moved, values[end:])[:2]

        return tangents

    def tangents(
        self,
        arguments: Sequence[Any],
        moved: Mapping[int, Tensor],
        results: Sequence[Tensor],
        grads: Mapping[int, Tensor] | None = None,
        moved_grads: Mapping[int, Tensor] | None = None,
    ) -> Sequence[Tensor]:
        """Computes the tangents of out, lse and, with gradients of these, of those of q, k and v,
        from the tangents of arguments and gradients by their numbers."""
        q, k, v, seed, *aux = arguments
        given = [(_filled(g) if g else [None, None]) for g in (grads, moved_grads)]
        if grads is not None and given[0][0] is None:
            given[0][0] = torch.zeros_like(results[0])
        return _tangents(
            *(q, k, v, *(moved.get(i) for i in _QKV), *given[0], *given[1]),
            *(aux, seed, *results, self.mask, self.score, self.params),
        )

    def gradients(
        self, arguments: Sequence[Any], results: Sequence[Tensor], grads: Mapping[int, Tensor]
    ) -> Sequence[Tensor]:
        """Computes the gradients of q, k and v."""
        q, k, v, seed, *aux = arguments
        grad_out, grad_lse = _filled(grads)
        grad_out = torch.zeros_like(results[0]) if grad_out is None else grad_out
        rules = (self.mask, self.score, self.params)
        return _backward(grad_out, grad_lse, q, k, v, aux, seed, *results, *rules, [])[:3]


def _filled(grads: Mapping[int, Tensor]) -> list[Tensor | None]:
    """Returns the gradients of out and lse, None for those that are not given."""
    return [grads.get(0), grads.get(1)]


@dataclass(frozen=True)
class _Derivative(Pieces):
    """A derivative of `of`, a function of its `count` arguments and of values for outputs or
    arguments `given`."""

    of: AttentionPieces | None = None
    count: int = 0
    given: tuple[int, ...] = ()

    def split(self, values: Sequence[Any]) -> tuple[Sequence[Any], dict[int, Tensor], Any, Any]:
        """Returns the arguments, the values for `given`, those for a next derivative, and the
        results that the kernel reads."""
        start, end = self.count + len(self.given), len(values) - _RESULTS
        own = dict(zip(self.given, values[self.count : start], strict=True))
        return values[: self.count], own, values[start:end], values[end:]

    def takes(self, numbers: Sequence[int]) -> bool:
        """Returns whether these arguments are q, k, v or values for `given`."""
        return self.kept > 0 and all(i in _QKV or i >= self.count for i in numbers)


@dataclass(frozen=True)
class _Gradients(_Derivative):
    """Gradients of the arguments `wanted` from those of the outputs `given`."""

    wanted: tuple[int, ...] = ()

    def kernel_of_vjp(self, wanted: Sequence[int], given: Sequence[int]) -> Kernel | None:
        along = [self.wanted[i] for i in given]
        if self.of is None or not self.takes(wanted) or any(i not in _QKV for i in along):
            return None
        call = self.of

        def gradients(*values: Any) -> Sequence[Tensor]:
            arguments, grads, weights, results = self.split(values)
            moved = dict(zip(along, weights, strict=True))
            needed = grads if any(i in _QKV for i in wanted) else None
            outputs, found = _halves(call.tangents(arguments, moved, results, needed))
            return [found[i] if i in _QKV else outputs[self.given[i - self.count]] for i in wanted]

        return gradients

    def kernel_of_jvp(self, given: Sequence[int]) -> Kernel | None:
        if self.of is None or not self.takes(given) or any(i not in _QKV for i in self.wanted):
            return None
        call = self.of

        def tangents(*values: Any) -> Sequence[Tensor]:
            arguments, grads, along, results = self.split(values)
            moved, moved_grads = {}, {}
            for i, t in zip(given, along, strict=True):
                if i in _QKV:
                    moved[i] = t
                else:
                    moved_grads[self.given[i - self.count]] = t
            found = _halves(call.tangents(arguments, moved, results, grads, moved_grads))[1]
            return [found[i] for i in self.wanted]

        return tangents


@dataclass(frozen=True)
class _Tangents(_Derivative):
    """Tangents of the outputs from those of the arguments `given`."""

    def kernel_of_vjp(self, wanted: Sequence[int], given: Sequence[int]) -> Kernel | None:
        if self.of is None or not self.takes((*wanted, *self.given)):
            return None
        call = self.of

        def gradients(*values: Any) -> Sequence[Tensor]:
            arguments, moved, weights, results = self.split(values)
            grads = dict(zip(given, weights, strict=True))
            second: Sequence[Tensor] = ()
            first: Sequence[Tensor] = ()
            if any(i in _QKV for i in wanted):
                second = _halves(call.tangents(arguments, moved, results, grads))[1]
            if any(i not in _QKV for i in wanted):  # the tangents are linear in these
                first = call.gradients(arguments, results, grads)
            return [second[i] if i in _QKV else first[self.given[i - self.count]] for i in wanted]

        return gradients


def _halves(found: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns the tangents of out and lse, and those of the gradients of q, k and v."""
    return found[:2], found[2:]
