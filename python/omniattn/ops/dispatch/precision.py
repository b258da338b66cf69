"""Selects split-bf16 products of fp32 operands on AMX tiles.

`torch.set_float32_matmul_precision("high")` allows products less accurate than fp32. On the CPU it
sets `torch.backends.mkldnn.matmul.fp32_precision = "tf32"`. Operands are then split into two bf16
pieces, with three products. `omniattn.config.FP32_PIECES = 3` splits into three pieces, with six
products, which are as accurate as fp32. Without AMX tiles neither setting has an effect; torch's
own setting has none on most CPUs. "medium", a plain bf16 product, is left to torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _get_fp32_precision_getter

from omniattn import config
from omniattn.ops.dispatch import library as _library
from omniattn.ops.dispatch.compile import assume_constant_result

__all__ = ["split_bf16_of"]

_AMX = config.CPU_ISAS.index("amx_bf16")
_HAS_TILES: bool = torch.ops.omniattn.detected_cpu_isa() >= _AMX


def split_bf16_of(x: Tensor) -> int:
    """Returns the number of bf16 pieces per element in products with x: 2, 3, or 0 for none.

    Compiled code follows `torch.set_float32_matmul_precision` and `FP32_PIECES`, which
    torch.compile guards. Other settings of torch are fixed at compilation.
    """
    pieces = config.FP32_PIECES
    if type(pieces) is not int or pieces not in (0, 3):
        raise ValueError(f"omniattn: config.FP32_PIECES must be 0 or 3, got FP32_PIECES={pieces!r}")
    if not _HAS_TILES or x.dtype != torch.float32 or not x.is_cpu:
        return 0
    return _allowed(pieces)


@assume_constant_result
def _allowed(ours: int) -> int:
    # torch.backends.mkldnn.matmul.fp32_precision, without 1.7 us of attribute hooks.
    pieces = 2 if _get_fp32_precision_getter("mkldnn", "matmul") == "tf32" else ours
    return pieces if _library.active_isa() >= _AMX else 0
