"""omniattn: token mixers and channel mixers as native PyTorch ops, trainable on CPU and CUDA.

`functional` has the ops, `reference` their eager definitions, `modules` and `models` build on them,
`training` trains the models, `compare` compares them under one budget, `hf` runs Hugging Face
transformers on the ops, `compat` has the ops with the names and arguments of other packages,
`testing` compares them with their definitions.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from omniattn import config as _config

if _config.LIBRARY_DIR is not None:
    __path__.insert(0, str(_config.LIBRARY_DIR))

if TYPE_CHECKING:
    from omniattn import calculate as calculate
    from omniattn import compare as compare
    from omniattn import compat as compat
    from omniattn import functional as functional
    from omniattn import hf as hf
    from omniattn import models, modules, reference, training
    from omniattn import testing as testing

__version__ = "0.1.0"

# Without hf, so that `from omniattn import *` needs no transformers.
__all__ = ["functional", "models", "modules", "reference", "training"]

_EAGER = ("functional", "reference")
_LAZY = ("calculate", "compare", "compat", "hf", "models", "modules", "testing", "training")


@functools.cache
def load() -> None:
    """Imports torch and registers the ops.

    Runs at import, except on the command line, which parses its arguments first.
    """
    for name in _EAGER:
        importlib.import_module(f"{__name__}.{name}")
    library = importlib.import_module(f"{__name__}.ops.dispatch.library")
    library.explain_missing()
    library.explain_layouts()


def _is_command_line() -> bool:
    """Returns True in the script `omniattn`, and while Python looks up the module of option -m."""
    if sys.argv[:1] == ["-m"]:  # followed by the module's arguments
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == __name__
    return "omniattn_cli" in sys.modules


if not _is_command_line():
    load()


def __getattr__(name: str) -> ModuleType:
    """Imports a subpackage on first use, so that `import omniattn` stays fast."""
    if name not in _EAGER + _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:  # hasattr and help() expect an AttributeError
        raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_EAGER, *_LAZY})
