"""The meaning of encoded score rules (csrc/semantics/score.h is the same for kernels)."""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor


class ScoreKind(IntEnum):
    """Kinds of rules; numbers as in csrc/ops/attention.h. Tables are (B | 1, rows, Hq)."""

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


TABLES = (ScoreKind.ALIBI, ScoreKind.BUCKETS, ScoreKind.DISTANCES, ScoreKind.WINDOW)


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
