"""Options shared by losses over a vocabulary; documented in `functional.cross_entropy` and
`functional.jsd`."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from torch import Tensor


class CrossEntropyOptions(TypedDict, total=False):
    """Options of cross entropies."""

    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    temperature: float
    reduction: str


class CrossEntropy(NamedTuple):
    """Options of a call, in the op's order."""

    class_weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    temperature: float = 1.0
    reduction: str = "mean"


class DivergenceOptions(TypedDict, total=False):
    """Options of divergences."""

    beta: float
    temperature: float
    ignore_index: int


class Divergence(NamedTuple):
    """Options of a call."""

    beta: float = 0.5
    temperature: float = 1.0
    ignore_index: int = -100
