"""Baselines of the benchmarks: alternatives in torch and transformers, with our ops' signatures.

A provider raises NotImplementedError for unsupported options. "aten" is torch's best eager form,
"math" its unfused attention, "hf" a formula of Hugging Face transformers (eager), "compiled"
torch.compile of the eager form, "flex" compiled flex_attention, "grouped" torch's grouped product.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from baselines import attention
from baselines._common import Function
from omniattn import reference

__all__ = ["BASELINES", "ON_GPU", "Function"]

_NAMES = (each.name for each in pkgutil.iter_modules(__path__, f"{__name__}."))
_FAMILIES = [importlib.import_module(name) for name in _NAMES if "._" not in name]
#: Op -> provider -> function; the eager form comes first.
BASELINES: Mapping[str, Mapping[str, Function]] = {
    **{op: providers for family in _FAMILIES for op, providers in family.BASELINES.items()},
    # Torch's random numbers differ.
    "dropout": {"eager": reference.dropout},
    "uniform_like": {"eager": reference.uniform_like},
}
#: Baselines on a GPU; gpu_steps/peers.py has the baselines from other libraries.
ON_GPU: Mapping[str, Mapping[str, Function]] = BASELINES | attention.ON_GPU
