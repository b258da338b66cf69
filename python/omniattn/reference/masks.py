"""The meaning of encoded mask rules (csrc/semantics/mask.h is the same for kernels)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor


class MaskKind(IntEnum):
    """Kinds of rules; numbers as in csrc/semantics/mask.h."""

    WINDOW = 0  # q + off - a <= k <= q + off + b, off = Tk - Tq; -1: unbounded
    WINDOW_TOP_LEFT = 1  # the same with off = 0
    KEY_LENGTHS = 2  # k < lengths[b], int64 (B,)
    TENSOR = 3  # bool, broadcastable to (B, Hq, Tq, Tk)


#: kind, a, b, side tensor
Rule = tuple[int, int, int, Tensor | None]


def window_rule(causal: bool, window_size: tuple[int, int]) -> Rule:
    """(left, right) inclusive around the bottom-right diagonal; causal closes the right side."""
    left, right = window_size
    return (MaskKind.WINDOW, left, 0 if causal else right, None)


def visible(rules: Sequence[Rule], tq: int, tk: int, device: torch.device) -> Tensor:
    """Boolean, True = attend, broadcastable to (B, Hq, Tq, Tk): the AND of all rules."""
    q = torch.arange(tq, device=device)[:, None]
    k = torch.arange(tk, device=device)[None, :]
    allowed = torch.ones(tq, tk, dtype=torch.bool, device=device)
    for kind, a, b, side in rules:
        if kind in (MaskKind.WINDOW, MaskKind.WINDOW_TOP_LEFT):
            distance = k - q - (tk - tq if kind == MaskKind.WINDOW else 0)
            if a >= 0:
                allowed = allowed & (distance >= -a)
            if b >= 0:
                allowed = allowed & (distance <= b)
        elif kind == MaskKind.KEY_LENGTHS:
            assert side is not None
            allowed = allowed & (k < side[:, None, None, None])
        else:
            assert side is not None
            allowed = allowed & side
    return allowed
