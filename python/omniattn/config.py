"""Every environment variable that the package reads, read once at import."""

from __future__ import annotations

import os
from pathlib import Path

CPU_ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16", "amx_fp16")

#: Highest CPU instruction set to use (`OMNIATTN_CPU_ISA`); None, or empty: the best of the machine.
CPU_ISA = os.environ.get("OMNIATTN_CPU_ISA") or None
if CPU_ISA is not None and CPU_ISA not in CPU_ISAS:
    raise ImportError(f"omniattn: OMNIATTN_CPU_ISA must be one of {CPU_ISAS}, got {CPU_ISA!r}")

#: Folder of native libraries built outside the package (`OMNIATTN_LIBRARY_DIR`), or None.
LIBRARY_DIR = (
    Path(os.environ["OMNIATTN_LIBRARY_DIR"]) if "OMNIATTN_LIBRARY_DIR" in os.environ else None
)

#: File with the ops of CPU tensors (`OMNIATTN_CPU_LIBRARY`). Development builds have others, where
#: CPU tensors run through the CUDA kernels under emulation: `libomniattn_emulated_value.so`.
CPU_LIBRARY = os.environ.get("OMNIATTN_CPU_LIBRARY", "libomniattn_cpu.so")

#: Pieces of bf16 that fp32 products are made of on AMX (`OMNIATTN_FP32_PIECES`): 0, fp32 products
#: that need no AMX; 3, six products of pieces with the accuracy of fp32 (docs/precision.md). Calls
#: read it, so that a program may set it.
_PIECES = os.environ.get("OMNIATTN_FP32_PIECES", "0")
if _PIECES not in ("0", "3"):
    raise ImportError(f"omniattn: OMNIATTN_FP32_PIECES must be 0 or 3, got {_PIECES!r}")
FP32_PIECES = int(_PIECES)

#: Whether each call of an op with a choice of paths says on stderr which one it takes
#: (`OMNIATTN_LOG_PATHS=1`).
LOG_PATHS = os.environ.get("OMNIATTN_LOG_PATHS", "0") not in ("", "0")
