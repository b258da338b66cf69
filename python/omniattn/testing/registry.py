"""The OpSpecs: one row per op, with the cases that tests, benchmarks and `omniattn check` use.

Case sizes: B batch, Tq/Tk lengths, H query heads, G key/value heads, D/Dv head sizes, R rotary
size, M rows (tokens), N columns (features out), K features in, V vocabulary, E experts, S slots; of
paged attention N pages of Tk tokens for each sequence.
"""

from __future__ import annotations

import functools
from types import ModuleType

from omniattn.testing.spec import OpSpec
from omniattn.testing.specs import (
    activation,
    attention,
    ffn,
    gemm,
    loss,
    moe,
    norm,
    random,
    rope,
    sequences,
    topk,
)

__all__ = ["registry"]

FAMILIES: tuple[ModuleType, ...] = (
    attention,
    sequences,
    norm,
    rope,
    activation,
    ffn,
    gemm,
    loss,
    moe,
    topk,
    random,
)


@functools.cache
def registry() -> dict[str, OpSpec]:
    """All OpSpecs by name."""
    return {spec.name: spec for family in FAMILIES for spec in family.SPECS}
