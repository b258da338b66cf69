"""Score rules: their numbers, and the meaning of tables (csrc/semantics/score.h is the same)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from omniattn.reference.precision import widen


class ScoreKind(IntEnum):
    """Kinds of rules; numbers as in csrc/semantics/score.h. Tables are (B | 1, rows, Hq)."""

    BIAS = 0  # added, broadcastable to (B, Hq, Tq, Tk)
    SOFTCAP = 1  # cap * tanh(. / cap)
    SINKS = 2  # (Hq,), one logit per head whose value is 0
    HEAD_SCALE = 3  # (Hq,), factor of scale * q k^T
    SIGMOID = 4  # weights sigmoid(logit) instead of softmax
    RELU2 = 5  # weights relu(logit)^2 instead of softmax
    ALIBI = 6  # - table[0] * |k - i|, i = q + Tk - Tq
    BUCKETS = 7  # table[T5 bucket of k - i]; a: both directions, b: max distance
    DISTANCES = 8  # table[k - i + a], the index kept inside the table
    WINDOW = 9  # table[place of q - place of k] in a window of a rows and b columns


#: Kinds whose tensor is a table.
TABLES = (ScoreKind.ALIBI, ScoreKind.BUCKETS, ScoreKind.DISTANCES, ScoreKind.WINDOW)

#: kind, parameter tensor, other parameters
ScoreRule = tuple[int, Tensor | None, tuple[float, ...]]


class EncodedTerm:
    """A term of the logits that a table holds."""

    def rule(self) -> ScoreRule:
        raise NotImplementedError

    def term(self, tq: int, tk: int, dtype: torch.dtype) -> Tensor:
        """(B | 1, Hq, Tq, Tk), computed in `dtype`."""
        kind, table, (a, b) = self.rule()
        assert table is not None
        return table_bias(kind, widen(table).to(dtype), int(a), int(b), tq, tk)

    def of_sequence(self, n: int) -> EncodedTerm:
        """The term of sequence n of a packed or cached batch."""
        kind, table, parameters = self.rule()
        if table is None or len(table) == 1:
            return self
        return Table(kind, table[n : n + 1], parameters)


@dataclass(frozen=True)
class Table(EncodedTerm):
    """A rule as a term; table (B | 1, rows, Hq)."""

    kind: int
    table: Tensor | None
    parameters: tuple[float, ...]

    def rule(self) -> ScoreRule:
        return self.kind, self.table, self.parameters


def t5_bucket(distance: Tensor, bidirectional: bool, buckets: int, max_distance: int) -> Tensor:
    """T5's bucket of key position - query position (Raffel et al. 2020, arXiv:1910.10683)."""
    if bidirectional:
        buckets //= 2
        side = (distance > 0) * buckets
        far = distance.abs()
    else:
        side = torch.zeros_like(distance)
        far = (-distance).clamp(min=0)
    exact = buckets // 2
    share = torch.log(far.clamp(min=1) / exact) / math.log(max_distance / exact)
    large = (exact + (share * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    return side + torch.where(far < exact, far, large)


def table_bias(kind: int, table: Tensor, a: int, b: int, tq: int, tk: int) -> Tensor:
    """The term (B | 1, Hq, Tq, Tk) that a table rule adds to the logits."""
    k = torch.arange(tk, device=table.device)
    i = torch.arange(tq, device=table.device)[:, None] + tk - tq
    if kind == ScoreKind.ALIBI:
        return table.transpose(1, 2)[..., None] * -(k - i).abs().to(table.dtype)
    if kind == ScoreKind.BUCKETS:
        row = t5_bucket(k - i, bool(a), table.shape[1], b)
    elif kind == ScoreKind.DISTANCES:
        row = (k - i + a).clamp(0, table.shape[1] - 1)
    else:
        row = (i // b - k // b + a - 1) * (2 * b - 1) + i % b - k % b + b - 1
    return table[:, row].permute(0, 3, 1, 2)
