"""The OpSpecs: one row per op, with the cases that tests, benchmarks and `omniattn check` use.

Case sizes: B batch, Tq/Tk lengths, H query heads, G key/value heads, D/Dv head sizes, R rotary
size, M rows (tokens), N columns (features out), K features in or taps of a filter, V vocabulary,
E experts, S slots; of paged attention N pages of Tk tokens for each sequence.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType

from omniattn.testing import specs
from omniattn.testing.spec import OpSpec, Variant
from omniattn.testing.variants import VARIANTS

__all__ = ["registry", "variants"]


@functools.cache
def _families() -> tuple[ModuleType, ...]:
    """The files of `specs`."""
    names = (each.name for each in pkgutil.iter_modules(specs.__path__, f"{specs.__name__}."))
    return tuple(importlib.import_module(name) for name in names if "._" not in name)


@functools.cache
def registry() -> dict[str, OpSpec]:
    """All OpSpecs by name, from every file of `specs`."""
    return {spec.name: spec for family in _families() for spec in family.SPECS}


def variants() -> tuple[Variant, ...]:
    """The published forms of every file of `specs`, then those that combine several families."""
    found = (each for family in _families() for each in getattr(family, "VARIANTS", ()))
    return (*found, *VARIANTS)
