"""OpSpecs: one row per op, with the cases of tests, benchmarks and `omniattn check`.

Case sizes: B batch, Tq/Tk lengths, H query heads, G key/value heads, D/Dv head sizes, R rotary
size, M rows (tokens), N columns (features out), K features in or taps of a filter, V vocabulary,
E experts, S slots; in paged attention, N pages of Tk tokens per sequence.
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
    """Returns the modules of `specs`."""
    files = pkgutil.walk_packages(specs.__path__, f"{specs.__name__}.")
    names = (each.name for each in files if not each.ispkg and "._" not in each.name)
    return tuple(importlib.import_module(name) for name in names)


@functools.cache
def registry() -> dict[str, OpSpec]:
    """Returns all OpSpecs of `specs` by name."""
    return {spec.name: spec for family in _families() for spec in family.SPECS}


def variants() -> tuple[Variant, ...]:
    """Returns the published forms in `specs`, then those that combine several families."""
    found = (each for family in _families() for each in getattr(family, "VARIANTS", ()))
    return (*found, *VARIANTS)
