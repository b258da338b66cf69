"""Which kernel `linear` runs on when it is free to choose: this package's or torch's.

The figures are gains, torch's time over ours, from `benchmarks/linear_choice.py --threads 1` on an
Intel Ice Lake server and torch 2.13, over products of 256^3 to 1024^3 and of 1 to 32 rows. The
first rule that fits decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from omniattn.ops import _library as _library  # loads the ops

__all__ = ["CHOICE", "describe", "native_is_faster"]

_AVX512, _AVX512_BF16 = 2, 3  # AVX2 is 1


@dataclass(frozen=True)
class Rule:
    """`native` where `applies`(isa, whether MKL runs its best code) holds for these dtypes."""

    dtypes: tuple[torch.dtype, ...]
    condition: str
    applies: Callable[[int, bool], bool]
    native: bool
    measured: str


RULES = (
    Rule(
        (torch.float16,),
        "AVX-512, AVX2",
        lambda isa, mkl: isa > 0,
        True,
        "forward 5x to 35x, backward 40x to 80x: torch has no fast fp16 product",
    ),
    Rule(
        (torch.bfloat16,),
        "AVX-512, AVX2 without a bf16 dot product",
        lambda isa, mkl: 0 < isa < _AVX512_BF16,
        True,
        "forward 1.6x to 10x, backward 1.3x to 8x: oneDNN emulates the dot product; with AVX2 "
        "(Zen 3) forward 8x, forward and backward 20x to 36x",
    ),
    Rule(
        (torch.float32, torch.float64),
        "AVX-512, MKL on its AVX2 path (not an Intel CPU)",
        lambda isa, mkl: isa >= _AVX512 and not mkl,
        True,
        "MKL reached 41 % of the multiply-add peak on Zen 5; ours is not measured there yet",
    ),
    Rule(
        (torch.float64, torch.float32, torch.bfloat16, torch.float16),
        "otherwise",
        lambda isa, mkl: True,
        False,
        "fp32 on Intel with AVX-512 forward 0.8x to 1.6x, backward 0.7x to 1.05x; "
        "fp64 0.7x to 0.9x",
    ),
)


def _mkl_at_its_best() -> bool:
    """MKL takes its AVX-512 code on Intel CPUs only."""
    cpuinfo = Path("/proc/cpuinfo")
    intel = cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text(errors="replace")
    return intel and torch.backends.mkl.is_available()


def _choose() -> dict[torch.dtype, Rule]:
    isa, mkl = torch.ops.omniattn.cpu_isa(), _mkl_at_its_best()
    return {
        dtype: next(r for r in RULES if dtype in r.dtypes and r.applies(isa, mkl))
        for dtype in RULES[-1].dtypes
    }


#: The rule that holds on this machine, by dtype.
CHOICE = _choose()


def native_is_faster(x: Tensor) -> bool:
    """Whether products of x, and their gradients, are faster on this package's kernel."""
    return x.device.type == "cpu" and CHOICE[x.dtype].native


def describe() -> list[str]:
    """One line per dtype, for `omniattn info`."""
    return [
        f"linear {str(dtype).removeprefix('torch.')}: {'omniattn' if rule.native else 'torch'}"
        f" ({rule.condition}: {rule.measured})"
        for dtype, rule in CHOICE.items()
    ]
