"""The kernel for tangents of attention on the CPU (tangent_kernels.py).

It takes scores that are a softmax of scaled products plus terms without derivatives (`CONSTANT`),
with every mask but pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from omniattn.encoding.options import TABLES, ScoreKind
from omniattn.ops.dispatch.backward import BackwardOp, private_op
from omniattn.ops.dispatch.library import has_kernel
from omniattn.ops.dispatch.names import like

__all__ = ["AttentionKernel", "has_tangent_kernel"]

#: Score rules whose terms the kernel adds to the logits, or to the sum of a row, as constants.
CONSTANT = frozenset((ScoreKind.BIAS, ScoreKind.SINKS, ScoreKind.HEAD_SCALE, *TABLES))


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
class AttentionKernel:
    """The kernel of a call for which `has_tangent_kernel` holds, with arguments q, k, v, seed and
    aux, outputs out and lse, and results out, lse and lse_tail."""

    mask: Sequence[int]
    score: Sequence[int]
    params: Sequence[float]
    moving: ClassVar[tuple[int, ...]] = (0, 1, 2)
    outputs: ClassVar[int] = 2
    results: ClassVar[int] = 3

    def tangents(
        self,
        arguments: Sequence[Any],
        results: Sequence[Tensor],
        moved: Mapping[int, Tensor],
        grads: Mapping[int, Tensor] | None = None,
        moved_grads: Mapping[int, Tensor] | None = None,
    ) -> Sequence[Tensor]:
        q, k, v, seed, *aux = arguments
        of_outputs: list[Tensor | None] = [None, None]
        if grads is not None:
            of_outputs = _gradients_of_outputs(grads, results)
        along = moved_grads or {}
        return _tangents(
            *(
                q,
                k,
                v,
                *(moved.get(i) for i in self.moving),
                *of_outputs,
                along.get(0),
                along.get(1),
            ),
            *(aux, seed, *results, self.mask, self.score, self.params),
        )

    def gradients(
        self, arguments: Sequence[Any], results: Sequence[Tensor], grads: Mapping[int, Tensor]
    ) -> Sequence[Tensor]:
        q, k, v, seed, *aux = arguments
        given = (*_gradients_of_outputs(grads, results), q, k, v, aux, seed, *results)
        return _backward(*given, self.mask, self.score, self.params, [])[:3]


def _gradients_of_outputs(
    grads: Mapping[int, Tensor], results: Sequence[Tensor]
) -> list[Tensor | None]:
    """Returns the gradient of out, zeros without one, and that of lse or None."""
    return [grads[0] if 0 in grads else torch.zeros_like(results[0]), grads.get(1)]
