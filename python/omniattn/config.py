"""Environment variables of the package, read once at import, and settings of the process."""

from __future__ import annotations

import os
from pathlib import Path

CPU_ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16", "amx_fp16")

#: Highest ISA level to use on the CPU (`OMNIATTN_CPU_ISA`); None or empty for the machine's best.
CPU_ISA = os.environ.get("OMNIATTN_CPU_ISA") or None
if CPU_ISA is not None and CPU_ISA not in CPU_ISAS:
    raise ImportError(f"omniattn: OMNIATTN_CPU_ISA must be one of {CPU_ISAS}, got {CPU_ISA!r}")

#: Folder of native libraries built outside the package (`OMNIATTN_LIBRARY_DIR`), or None.
LIBRARY_DIR = (
    Path(os.environ["OMNIATTN_LIBRARY_DIR"]) if "OMNIATTN_LIBRARY_DIR" in os.environ else None
)

#: Library with the ops for CPU tensors (`OMNIATTN_CPU_LIBRARY`). Development builds have others,
#: such as `libomniattn_emulated_value.so`, which runs the CUDA kernels under emulation.
CPU_LIBRARY = os.environ.get("OMNIATTN_CPU_LIBRARY", "libomniattn_cpu.so")

#: Number of bf16 pieces of fp32 operands on AMX (`OMNIATTN_FP32_PIECES`): 0 for fp32 products
#: without AMX; 3 for six products of pieces, as accurate as fp32 (docs/precision.md). Read at each
#: call, so that a program can set it.
_PIECES = os.environ.get("OMNIATTN_FP32_PIECES", "0")
if _PIECES not in ("0", "3"):
    raise ImportError(f"omniattn: OMNIATTN_FP32_PIECES must be 0 or 3, got {_PIECES!r}")
FP32_PIECES = int(_PIECES)

#: True with batch invariance (`OMNIATTN_BATCH_INVARIANT=1`), which `batch_invariant` sets.
BATCH_INVARIANT = os.environ.get("OMNIATTN_BATCH_INVARIANT", "0") not in ("", "0")

#: True if ops with several code paths log the chosen path to stderr (`OMNIATTN_LOG_PATHS=1`).
LOG_PATHS = os.environ.get("OMNIATTN_LOG_PATHS", "0") not in ("", "0")

#: False to call native ops through torch's Python (`OMNIATTN_COMPILED_CALLS=0`), also where the
#: build compiled these calls for this Python and torch.
COMPILED_CALLS = os.environ.get("OMNIATTN_COMPILED_CALLS", "1") not in ("", "0")

#: Paths of ops that calls do not take, as "op:path" of `omniattn info` (`OMNIATTN_OMIT_PATHS`, with
#: commas between them): for comparisons, and "attention:torch_flash" for our kernel instead.
OMIT_PATHS = tuple(filter(None, os.environ.get("OMNIATTN_OMIT_PATHS", "").split(",")))

#: Paths that calls take only on request, since they add in any order (`OMNIATTN_TAKE_PATHS`, in the
#: same form): "attention_backward:torch_flash".
TAKE_PATHS = tuple(filter(None, os.environ.get("OMNIATTN_TAKE_PATHS", "").split(",")))


class batch_invariant:
    """Makes the bits of each row of a result independent of the other rows of the call.

    A sequence then has the same bits alone as in any batch, and for attention, norms, experts,
    losses and linear layers a token has the same bits in a step of decoding, in a chunk and in the
    whole prompt. docs/precision.md lists the ops, and what the kernels cost that this leaves out.
    It applies to CPU tensors and to all threads, at once; with tensors of other devices it has no
    effect on their kernels.

        omniattn.config.batch_invariant(True)    # for the rest of the process
        with omniattn.config.batch_invariant():  # in a block
            logits = model(tokens)

    Args:
        enabled: False restores the fastest kernel for each size.
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"batch_invariant: enabled must be a bool, got enabled={enabled!r}")
        self._before = BATCH_INVARIANT
        _set_batch_invariance(enabled)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        _set_batch_invariance(self._before)


def _set_batch_invariance(enabled: bool) -> None:
    global BATCH_INVARIANT
    import torch

    torch.ops.omniattn.set_batch_invariance(enabled)
    BATCH_INVARIANT = enabled
