"""Finds and loads the native libraries."""

from __future__ import annotations

from pathlib import Path

import torch

import omniattn
from omniattn import config

MINIMUM_TORCH = (2, 11)
CUDA_LIBRARY = "libomniattn_cuda.so"

#: Paths of the loaded libraries by device type.
loaded: dict[str, Path] = {}
#: Why the CUDA library is not loaded; None when it is.
cuda_unavailable: str | None = None


def find(name: str) -> Path | None:
    """The path of a library file of this package, or None.

    An editable install and OMNIATTN_LIBRARY_DIR keep libraries and Python files in different
    folders; the package's path has both.
    """
    return next((Path(f) / name for f in omniattn.__path__ if (Path(f) / name).exists()), None)


def _load(device: str, name: str) -> None:
    path = find(name)
    if path is None:
        raise ImportError(
            f"omniattn: {name} not found beside the package; install it with `pip install .`"
            f" (looked in {', '.join(omniattn.__path__)})"
        )
    torch.ops.load_library(path)
    loaded[device] = path


def _load_cuda() -> str | None:
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if find(CUDA_LIBRARY) is None:
        return "this build of omniattn has no CUDA library"
    try:
        _load("cuda", CUDA_LIBRARY)
    except OSError as error:
        return f"{CUDA_LIBRARY} did not load: {error}"
    return None


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < MINIMUM_TORCH:
        raise ImportError(
            f"omniattn: needs torch >= {'.'.join(map(str, MINIMUM_TORCH))}, "
            f"got torch=={torch.__version__}; upgrade it with: pip install -U torch"
        )


_check_torch()
_load("cpu", config.CPU_LIBRARY)
cuda_unavailable = _load_cuda()
