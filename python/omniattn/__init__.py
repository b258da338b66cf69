"""omniattn: token mixers and channel mixers as native PyTorch ops, trainable on CPU and CUDA.

`functional` has the ops, `reference` their eager definitions, `modules` and `models` build on them,
`training` trains the models, `hf` runs Hugging Face transformers on the ops, `compat` has the ops
under the names and arguments of other packages, `testing` compares them with their definitions.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from omniattn import config as _config

if _config.LIBRARY_DIR is not None:
    __path__.insert(0, str(_config.LIBRARY_DIR))

from omniattn import compositions as compositions
from omniattn import functional, reference
from omniattn.ops import _library

if TYPE_CHECKING:
    from omniattn import compat as compat
    from omniattn import hf as hf
    from omniattn import models, modules, training
    from omniattn import testing as testing

_library.explain_missing()
_library.explain_layouts()

__version__ = "0.1.0"

# Without hf, so that `from omniattn import *` needs no transformers.
__all__ = ["functional", "models", "modules", "reference", "training"]

_LAZY = ("compat", "hf", "models", "modules", "testing", "training")


def __getattr__(name: str) -> ModuleType:
    """Imports a subpackage at its first use, so that `import omniattn` stays fast."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:  # hasattr and help() expect an AttributeError
        raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
