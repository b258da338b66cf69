"""Derivatives by kernels that compute tangents, in place of the pieces of a definition.

Hessians are symmetric: along x', the gradients move by the gradients of <grads, tangents along x'>.
So one kernel, which computes the tangents of the outputs and those of the gradients, has the values
of jvp, of the vjp and the jvp of a gradient, and of the vjp of a jvp. Their further derivatives are
those of the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from omniattn.ops.dispatch.pieces import Kernel, Pieces, Tensors

__all__ = ["KernelPieces", "TangentKernel"]


class TangentKernel(Protocol):
    """Tangents of an op and of its gradients, of which arguments and outputs have numbers."""

    #: Arguments that may have tangents and gradients.
    moving: ClassVar[tuple[int, ...]]
    #: Number of outputs; number of results of the call, among them private ones, that it reads.
    outputs: ClassVar[int]
    results: ClassVar[int]

    def tangents(
        self,
        arguments: Sequence[Any],
        results: Sequence[Tensor],
        moved: Mapping[int, Tensor],
        grads: Mapping[int, Tensor] | None = None,
        moved_grads: Mapping[int, Tensor] | None = None,
    ) -> Sequence[Tensor]:
        """Computes the tangents of the outputs and, with their gradients `grads`, those of the
        gradients of the moving arguments, along the tangents of both; a missing one is 0."""
        ...

    def gradients(
        self, arguments: Sequence[Any], results: Sequence[Tensor], grads: Mapping[int, Tensor]
    ) -> Sequence[Tensor]:
        """Computes the gradients of the moving arguments."""
        ...


@dataclass(frozen=True)
class KernelPieces(Pieces):
    """The definition of an op in pieces, with its kernel for tangents."""

    kernel: TangentKernel | None = None

    def vjp(self, tensors: Tensors, wanted: Sequence[int], given: Sequence[int]) -> Pieces:
        plain = super().vjp(tensors, wanted, given)
        return _Gradients(
            *(plain.pieces, plain.outputs),
            kernel=self.kernel,
            kept=self.kept,
            count=len(tensors),
            wanted=tuple(wanted),
            given=tuple(given),
        )

    def jvp(self, tensors: Tensors, given: Sequence[int]) -> Pieces:
        plain = super().jvp(tensors, given)
        return _Tangents(
            *(plain.pieces, plain.outputs),
            kernel=self.kernel,
            kept=self.kept,
            count=len(tensors),
            given=tuple(given),
        )

    def kernel_of_jvp(self, given: Sequence[int]) -> Kernel | None:
        kernel = self.kernel
        if (
            kernel is None
            or kernel.results > self.kept
            or any(i not in kernel.moving for i in given)
        ):
            return None

        def tangents(*values: Any) -> Sequence[Tensor]:
            end = len(values) - kernel.results
            count = end - len(given)
            moved = dict(zip(given, values[count:end], strict=True))
            return kernel.tangents(values[:count], values[end:], moved)[: kernel.outputs]

        return tangents


@dataclass(frozen=True)
class _Derivative(Pieces):
    """A derivative of an op, a function of its `count` arguments and of values for its outputs or
    arguments `given`."""

    kernel: TangentKernel | None = None
    count: int = 0
    given: tuple[int, ...] = ()

    def kernel_for(self, own: Sequence[int], arguments: Sequence[int]) -> TangentKernel | None:
        """Returns the kernel if these arguments of the op are moving ones, and these arguments of
        the derivative are such ones or values for `given`."""
        kernel = self.kernel
        if kernel is None or kernel.results > self.kept:
            return None
        moving = all(i in kernel.moving or i >= self.count for i in arguments)
        return kernel if moving and all(i in kernel.moving for i in own) else None

    def split(
        self, kernel: TangentKernel, values: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Tensor], dict[int, Tensor], Sequence[Any]]:
        """Returns the arguments, the results that the kernel reads, the values for `given`, and
        those for a next derivative."""
        start, end = self.count + len(self.given), len(values) - kernel.results
        own = dict(zip(self.given, values[self.count : start], strict=True))
        return values[: self.count], values[end:], own, values[start:end]


@dataclass(frozen=True)
class _Gradients(_Derivative):
    """Gradients of the arguments `wanted` from those of the outputs `given`."""

    wanted: tuple[int, ...] = ()

    def kernel_of_vjp(self, wanted: Sequence[int], given: Sequence[int]) -> Kernel | None:
        along = [self.wanted[i] for i in given]
        kernel = self.kernel_for(along, wanted)
        if kernel is None:
            return None

        def gradients(*values: Any) -> Sequence[Tensor]:
            arguments, results, grads, weights = self.split(kernel, values)
            moved = dict(zip(along, weights, strict=True))
            needed = grads if any(i < self.count for i in wanted) else None
            found = kernel.tangents(arguments, results, moved, needed)
            outputs, of_arguments = found[: kernel.outputs], found[kernel.outputs :]
            return [
                of_arguments[kernel.moving.index(i)]
                if i < self.count
                else outputs[self.given[i - self.count]]
                for i in wanted
            ]

        return gradients

    def kernel_of_jvp(self, given: Sequence[int]) -> Kernel | None:
        kernel = self.kernel_for(self.wanted, given)
        if kernel is None:
            return None

        def tangents(*values: Any) -> Sequence[Tensor]:
            arguments, results, grads, along = self.split(kernel, values)
            moved: dict[int, Tensor] = {}
            moved_grads: dict[int, Tensor] = {}
            for i, t in zip(given, along, strict=True):
                if i < self.count:
                    moved[i] = t
                else:
                    moved_grads[self.given[i - self.count]] = t
            found = kernel.tangents(arguments, results, moved, grads, moved_grads)
            return [found[kernel.outputs + kernel.moving.index(i)] for i in self.wanted]

        return tangents


@dataclass(frozen=True)
class _Tangents(_Derivative):
    """Tangents of the outputs from those of the arguments `given`."""

    def kernel_of_vjp(self, wanted: Sequence[int], given: Sequence[int]) -> Kernel | None:
        kernel = self.kernel_for(self.given, wanted)
        if kernel is None:
            return None

        def gradients(*values: Any) -> Sequence[Tensor]:
            arguments, results, moved, weights = self.split(kernel, values)
            grads = dict(zip(given, weights, strict=True))
            of_arguments: Sequence[Tensor] = ()
            of_tangents: Sequence[Tensor] = ()
            if any(i < self.count for i in wanted):
                found = kernel.tangents(arguments, results, moved, grads)
                of_arguments = found[kernel.outputs :]
            if any(i >= self.count for i in wanted):  # the outputs' tangents are linear in these
                of_tangents = kernel.gradients(arguments, results, grads)
            return [
                of_arguments[kernel.moving.index(i)]
                if i < self.count
                else of_tangents[kernel.moving.index(self.given[i - self.count])]
                for i in wanted
            ]

        return gradients
