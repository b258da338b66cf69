"""Losses over a vocabulary in pieces of some rows, for derivatives of higher orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omniattn.ops.dispatch.pieces import ELEMENTS, Piece, Pieces, Tensors, evaluate
from omniattn.reference.losses.loss import reduced
from omniattn.reference.precision import compute_dtype

__all__ = ["loss_pieces"]


def loss_pieces(
    of_rows: Callable[..., tuple[Tensor, Tensor]],
    tensors: Sequence[Tensor | None],
    reduction: str,
    whole: Sequence[int] = (),
) -> Pieces | None:
    """Returns a loss in pieces, or None if it is small enough to be evaluated at once.

    Args:
        of_rows: function of the tensors that computes the losses of rows and their weights.
        tensors: logits (..., V), and others (..., V) or (...), or None.
        reduction: of the losses.
        whole: numbers of the tensors that have no rows.
    """
    logits = tensors[0]
    assert logits is not None
    if logits.numel() <= ELEMENTS:
        return None
    width, shape, dtype = logits.shape[-1], logits.shape[:-1], compute_dtype(logits)
    count, step = shape.numel(), max(1, ELEMENTS // width)
    pieces = []
    for first in range(0, count, step):
        rows = (slice(first, first + step),)
        reads = tuple(() if i in whole else rows for i in range(len(tensors)))
        pieces.append(Piece(of_rows, reads, (rows, rows)))
    by_rows = Pieces(tuple(pieces), ((torch.Size((count,)), dtype),) * 2)

    def run(*given: Tensor | None) -> tuple[Tensor]:
        flat: Tensors = [
            t if t is None or i in whole else t.reshape(count, *t.shape[len(shape) :])
            for i, t in enumerate(given)
        ]
        losses, weights = evaluate(by_rows, *flat)
        return (reduced(losses, weights, reduction).reshape(output),)

    output = shape if reduction == "none" else torch.Size(())
    return Pieces((Piece(run, ((),) * len(tensors), ((),)),), ((output, dtype),))
