"""Chooses between this package's and torch's kernel of `linear` if the caller does not.

`benchmarks/linear_choice.py --record` measures a CPU family and writes to gemm_crossings.json, per
dtype, the numbers of multiply-adds for which our kernel is faster in forward and backward, and for
calls without gradients, as in decoding, the numbers of rows of x for which it is faster and the
size of the weight below which a call of torch costs less. For a family without a record the first
matching rule decides. The figures in rules are speedups, torch's time / ours, from an Intel Ice
Lake server and torch 2.13, for 256^3 to 1024^3 and 1 to 32 rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_tracing as is_tracing
from torch.compiler import is_compiling

from omniattn import config
from omniattn.config import CPU_ISAS
from omniattn.ops.dispatch import library as _library  # loads the ops
from omniattn.ops.dispatch.cpu import cpu_family, cpuinfo, record_of_family
from omniattn.ops.dispatch.plain import may_need_gradient

__all__ = ["CHOICE", "RECORDS", "describe", "native_is_faster"]

_AVX512, _AVX512_BF16 = 2, 3  # AVX2 is 1

#: File with the records of CPU families.
RECORDS = Path(__file__).with_name("gemm_crossings.json")

#: Number of multiply-adds that no product reaches.
UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class Rule:
    """Chooses `native` for these dtypes if `applies`(isa, MKL uses its best code)."""

    dtypes: tuple[torch.dtype, ...]
    condition: str
    applies: Callable[[int, bool], bool]
    native: bool
    measured: str

    @cached_property
    def ranges(self) -> tuple[int, int, int, int, int]:
        """As `Crossings.ranges`."""
        return (0, UNBOUNDED, 1, UNBOUNDED, 0) if self.native else (1, 0, 1, 0, 0)

    @property
    def products(self) -> str:
        """Library that computes the products, for `omniattn info`."""
        return "omniattn" if self.native else "torch"


RULES = (
    Rule(
        (torch.float16,),
        "AVX-512, AVX2",
        lambda isa, mkl: isa > 0,
        True,
        "forward 5x to 35x, backward 40x to 80x: torch has no fast fp16 product but on AMX-FP16, "
        "where it is not compared with ours yet",
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


#: Applies where float64 has kernels on a slower level than other dtypes (`kF64Level` in
#: csrc/runtime/isa.h).
SLOW_FLOAT64 = Rule(
    (torch.float64,),
    "float64 kernels built for a slower level",
    lambda isa, mkl: True,
    False,
    "with AVX2 1.5x slower on baseline",
)


def _mkl_at_its_best() -> bool:
    """Returns True on Intel CPUs, the only ones on which MKL uses its AVX-512 code."""
    return cpuinfo().get("vendor_id") == "GenuineIntel" and torch.backends.mkl.is_available()


@dataclass(frozen=True)
class Crossings:
    """Ranges in which this package's kernel is faster than torch's.

    It is faster for `least` to `most` multiply-adds, none if most < least; without gradients also
    for x of `rows[0]` to `rows[1]` rows, and never for weights of fewer than `smallest` elements.
    """

    least: int
    most: int
    rows: tuple[int, int]
    condition: str
    smallest: int = 0

    @cached_property
    def ranges(self) -> tuple[int, int, int, int, int]:
        """The numbers (least, most, *rows, smallest), for compiled calls (csrc/calls)."""
        return (self.least, self.most, *self.rows, self.smallest)

    @property
    def native(self) -> bool:
        """True if this package's kernel is faster with gradients for some size."""
        return self.least <= self.most

    @property
    def products(self) -> str:
        """Library that computes the products, for `omniattn info`."""
        if not self.native:
            return "torch"
        few, many = self.least > 0, self.most < UNBOUNDED
        least = f"from {self.least:.1e}" if few else ""
        most = f"up to {self.most:.1e}" if many else ""
        limits = " ".join(filter(None, (least, most)))
        return f"omniattn {limits} multiply-adds, else by torch" if limits else "omniattn"

    @property
    def measured(self) -> str:
        found = "never ours"
        if self.native:
            found = f"ours for {self.least:.1e} to {self.most:.1e} multiply-adds"
        first, last = self.rows
        if first <= last:
            found += f", without gradients for {first} to {last} rows"
        if self.smallest > 0:
            found += f", never without gradients for weights below {self.smallest:.1e}"
        return found


def _recorded(family: str, isa: str, records: dict[str, Any]) -> dict[torch.dtype, Crossings]:
    """Returns dtype -> measured crossings of the CPU family at this ISA level."""
    record = record_of_family(records, family)
    if record is None or record["isa"] != isa:
        return {}
    condition = f"measured on {family}, torch {record['torch']}, {record['threads']} threads"
    return {
        getattr(torch, dtype): Crossings(
            found["least"],
            found["most"],
            tuple(found.get("rows", (1, 0))),
            condition,
            found.get("smallest", 0),
        )
        for dtype, found in record["dtypes"].items()
    }


def _choose() -> dict[torch.dtype, Rule | Crossings]:
    isa, mkl = torch.ops.omniattn.cpu_isa(), _mkl_at_its_best()
    rules: dict[torch.dtype, Rule | Crossings] = {
        dtype: next(r for r in RULES if dtype in r.dtypes and r.applies(isa, mkl))
        for dtype in RULES[-1].dtypes
    }
    found = rules | _recorded(cpu_family(), CPU_ISAS[isa], json.loads(RECORDS.read_text()))
    built = [n for n in _library.built_isas() if CPU_ISAS.index(n) <= min(isa, _AVX512)]
    return found if len(built) == 1 else found | {torch.float64: SLOW_FLOAT64}


#: dtype -> rule or measured crossings that apply on this machine.
CHOICE = _choose()

_TORCH_READS_ON: bool = torch.ops.omniattn.detected_cpu_isa() >= CPU_ISAS.index("amx_bf16")


def native_is_faster(x: Tensor, weight: Tensor, split_bf16: int = 0) -> bool:
    """True if x weight^T and its gradients should run on this package's kernel.

    On AMX this includes bf16 products with an odd inner dimension: oneDNN reads past the row there
    (torch 2.13), and a NaN in the next row would reach the result.

    It also includes split-bf16 fp32 products (precision.py) of any size, which the user requested
    and torch does not have, and all products with `config.batch_invariant`.
    """
    if not x.is_cpu:
        return False
    if (
        split_bf16 > 0
        or config.BATCH_INVARIANT
        or (_TORCH_READS_ON and x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 1)
    ):
        return True
    choice = CHOICE[x.dtype]
    if isinstance(choice, Rule):
        return choice.native
    # Each comparison with a symbolic size adds a guard of torch.compile, and so recompilations if
    # the number of rows varies: compare only if it matters.
    in_range = choice.least <= choice.most and bool(
        choice.least <= x.numel() * weight.shape[0] <= choice.most
    )
    if is_compiling() or is_tracing():
        return in_range
    if is_grad_enabled() and (may_need_gradient(x) or may_need_gradient(weight)):
        return in_range
    if weight.numel() < choice.smallest:
        return False
    least, most = choice.rows
    return in_range or least <= x.numel() // max(1, x.size(-1)) <= most


def describe() -> list[str]:
    """Returns one line per dtype for `omniattn info`."""
    return [
        f"linear {str(dtype).removeprefix('torch.')}: {'omniattn' if rule.native else 'torch'}"
        f" ({rule.condition}: {rule.measured})"
        for dtype, rule in CHOICE.items()
    ]
