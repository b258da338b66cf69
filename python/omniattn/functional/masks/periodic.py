"""Masks of every n-th key, and of blocks of keys: the patterns of sparse transformers."""

from __future__ import annotations

from dataclasses import dataclass

from omniattn.checks.arguments import require_int
from omniattn.encoding.masks import COLUMN_BITS, MaskKind, Rule
from omniattn.functional.masks.base import Mask


@dataclass(frozen=True)
class Dilated(Mask):
    """Every `dilation`-th key: i - r * dilation for r = 0 .. `steps`; also after i if not causal.

    Child et al., Sparse Transformers, 2019, arXiv:1904.10509 call it strided with one head.
    """

    dilation: int
    steps: int
    causal: bool = True

    def __post_init__(self) -> None:
        require_int("Dilated", "dilation", self.dilation, 1)
        require_int("Dilated", "steps", self.steps, 0)

    def rules(self) -> list[Rule]:
        reach = self.dilation * self.steps
        window = (MaskKind.WINDOW, reach, 0 if self.causal else reach, ())
        return [window, (MaskKind.DILATED, self.dilation, 0, ())]


@dataclass(frozen=True)
class Strided(Mask):
    """The `local` most recent keys, the query's own included, and every `stride`-th before.

    With `split_heads` even heads see the first, odd heads the second. Child et al., Sparse
    Transformers, 2019, arXiv:1904.10509 (there local = stride, and one more local key).
    """

    stride: int
    local: int
    split_heads: bool = False

    def __post_init__(self) -> None:
        require_int("Strided", "stride", self.stride, 1)
        require_int("Strided", "local", self.local, 0)

    def rules(self) -> list[Rule]:
        kind = MaskKind.STRIDED_HEADS if self.split_heads else MaskKind.STRIDED
        return [*_causal(True), (kind, self.stride, self.local, ())]


@dataclass(frozen=True)
class Fixed(Mask):
    """The query's block of `stride` keys and the last `columns` of every block, up to the query.

    With `patterns` heads differ: head h sees the columns that lie (h % patterns) * columns keys
    before the last ones. Child et al., Sparse Transformers, 2019, arXiv:1904.10509; DeepSpeed calls
    `patterns` num_different_global_patterns.
    """

    stride: int
    columns: int
    patterns: int = 1

    def __post_init__(self) -> None:
        require_int("Fixed", "stride", self.stride, 1)
        require_int("Fixed", "patterns", self.patterns, 1, (1 << 11) - 1)
        most = min(self.stride // self.patterns, (1 << COLUMN_BITS) - 1)
        require_int("Fixed", "columns", self.columns, 0, most)

    def rules(self) -> list[Rule]:
        heads = self.patterns << COLUMN_BITS if self.patterns > 1 else 0
        return [*_causal(True), (MaskKind.FIXED, self.stride, self.columns + heads, ())]


@dataclass(frozen=True)
class EveryKth(Mask):
    """Keys at multiples of `k`, and the query's own."""

    k: int
    causal: bool = True

    def __post_init__(self) -> None:
        require_int("EveryKth", "k", self.k, 1)

    def rules(self) -> list[Rule]:
        return [*_causal(self.causal), (MaskKind.EVERY, self.k, 0, ())]


def _causal(causal: bool) -> list[Rule]:
    return [(MaskKind.WINDOW, -1, 0, ())] if causal else []
