"""Problem size from which attention and MoE use a matmul-only ISA level (csrc/runtime/isa.h).

A small problem does not fill dot products and tiles, and can be faster with the fp32 vectors of the
level below. `benchmarks/level_choice.py --record` measures the number of multiply-adds per kv head,
or per expert, from which a level is faster than the levels below. It writes the thresholds to
level_crossings.json by CPU family; importing this module passes them to the native library, which
looks them up in every call. For a family without a record the best level is always used. Few
queries (decoding) and experts with at most four tokens always run on vectors.

Unlike `linear`, attention and MoE never fall back to torch: their guarantees (row statistics, equal
dropout bits on all devices, gradients rounded once) would then depend on the machine. The records
show the speedup over torch for every shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from omniattn.config import CPU_ISAS
from omniattn.ops.dispatch import library as library  # loads the ops
from omniattn.ops.dispatch.cpu import cpu_family, record_of_family

__all__ = ["NEVER", "OPS", "RECORDS", "describe", "install", "product_levels", "record_of"]

#: File with the records of CPU families.
RECORDS = Path(__file__).with_name("level_crossings.json")

#: Ops in the order of their numbers in the native library (runtime/measured_isa.h).
OPS = ("attention", "moe_experts")

#: Threshold in multiply-adds that no problem reaches.
NEVER = 1 << 62

#: Matmul-only levels -> dtype of their operands.
_PRODUCTS = {
    "avx512_bf16": torch.bfloat16,
    "amx_bf16": torch.bfloat16,
    "amx_fp16": torch.float16,
}


def product_levels(dtype: torch.dtype | None = None) -> list[str]:
    """Returns this machine's matmul-only levels, of one dtype or of all."""
    has = torch.ops.omniattn.has_cpu_isa
    return [n for n, d in _PRODUCTS.items() if dtype in (d, None) and has(CPU_ISAS.index(n))]


def install(record: dict[str, Any] | None) -> None:
    """Passes a record to the native library; None makes it always choose the best level."""
    for number, op in enumerate(OPS):
        least = record["ops"][op]["least"] if record is not None else {}
        for name in _PRODUCTS:
            torch.ops.omniattn.set_least_madds(number, CPU_ISAS.index(name), least.get(name, 0))


def _levels_in_use() -> list[str]:
    """Returns the matmul-only levels up to this process's level (OMNIATTN_CPU_ISA)."""
    highest = torch.ops.omniattn.cpu_isa()
    return [name for name in product_levels() if CPU_ISAS.index(name) <= highest]


def describe(record: dict[str, Any] | None) -> list[str]:
    """Returns one line per op and level in use on this machine, for `omniattn info`."""
    levels = _levels_in_use()
    if record is None:
        best = sorted({_PRODUCTS[name]: name for name in levels}.values())
        return [f"{op} uses {name} (no record of this CPU)" for op in OPS for name in best]
    lines, source = [], f" (measured with torch {record['torch']})"
    for op in OPS:
        for name in levels:
            least = record["ops"][op]["least"].get(name, 0)
            when = "always" if least == 0 else f"from {least:.1e} multiply-adds of a head on"
            when = when if op == "attention" else when.replace("a head", "an expert")
            lines.append(f"{op} uses {name} {'never' if least >= NEVER else when}{source}")
    return lines


def record_of(family: str) -> dict[str, Any] | None:
    """Returns the measured thresholds of the CPU family, or None."""
    found: dict[str, Any] | None = record_of_family(json.loads(RECORDS.read_text()), family)
    return found


install(record_of(cpu_family()))
