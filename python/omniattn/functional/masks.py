"""Attention masks as small values: each encodes itself as rules for the kernels; `&` combines them.

A new rule on (query, key) indices is a dataclass here, a case in csrc/semantics/mask.h and one in
reference/masks.py; no schema, fake kernel or gradient changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omniattn.reference.masks import MaskKind, Rule

__all__ = ["All", "BoolMask", "Causal", "KeyLengths", "KeyPadding", "Mask", "SlidingWindow"]


class Mask:
    """A set of (query, key) pairs that may attend."""

    def rules(self) -> list[Rule]:
        raise NotImplementedError

    def __and__(self, other: Mask) -> All:
        return All((self, other))


@dataclass(frozen=True)
class All(Mask):
    """Pairs allowed by every one of `masks`."""

    masks: tuple[Mask, ...]

    def rules(self) -> list[Rule]:
        return [rule for mask in self.masks for rule in mask.rules()]


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Keys from `left` before to `right` behind the query, inclusive; -1 is unbounded.

    "The W most recent tokens including this one" is SlidingWindow(W - 1, 0). The last query meets
    the last key; with `top_left` the first query meets the first key.
    """

    left: int = -1
    right: int = -1
    top_left: bool = False

    def rules(self) -> list[Rule]:
        kind = MaskKind.WINDOW_TOP_LEFT if self.top_left else MaskKind.WINDOW
        return [(kind, self.left, self.right, None)]


@dataclass(frozen=True)
class Causal(Mask):
    """Keys up to the query; `top_left` as in SlidingWindow."""

    top_left: bool = False

    def rules(self) -> list[Rule]:
        return SlidingWindow(-1, 0, self.top_left).rules()


@dataclass(frozen=True)
class KeyLengths(Mask):
    """The first lengths[b] keys of sequence b; lengths (B,) of integers."""

    lengths: Tensor

    def rules(self) -> list[Rule]:
        return [(MaskKind.KEY_LENGTHS, 0, 0, self.lengths.to(torch.int64))]


@dataclass(frozen=True)
class KeyPadding(Mask):
    """Keys whose entry in `real` (B, Tk) is True."""

    real: Tensor

    def rules(self) -> list[Rule]:
        return [(MaskKind.TENSOR, 0, 0, self.real[:, None, None, :])]


@dataclass(frozen=True)
class BoolMask(Mask):
    """Pairs whose entry in `mask`, broadcastable to (B, Hq, Tq, Tk), is True."""

    mask: Tensor

    def rules(self) -> list[Rule]:
        return [(MaskKind.TENSOR, 0, 0, self.mask)]
