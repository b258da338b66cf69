"""omniattn: token mixers and channel mixers as native PyTorch ops, trainable on CPU and CUDA."""

from omniattn import config as _config

if _config.LIBRARY_DIR is not None:
    __path__.insert(0, str(_config.LIBRARY_DIR))

from omniattn import functional, reference
from omniattn.ops import _library

_library.explain_missing()
_library.explain_layouts()

__version__ = "0.1.0"

__all__ = ["functional", "reference"]
