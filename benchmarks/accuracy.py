"""Measures the errors of recurrences against fp64, for docs/accuracy.md.

python benchmarks/accuracy.py            # prints the tables; takes minutes, mostly loops in torch
python benchmarks/accuracy.py --record   # writes them into the pages
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from omniattn.testing import Measured, OpSpec, Pass, measure_error, registry
from omniattn.testing.spec import SHORT_DTYPE, Case
from omniattn.testing.table import replace_block

ROOT = Path(__file__).parents[1]
#: Block -> page that contains it.
PAGES = {
    "budgets": ROOT / "benchmarks/results/accuracy.md",
    "many tokens": ROOT / "docs/accuracy.md",
}
TOKENS, WINDOW = 65536, 1024
HALVES = (torch.bfloat16, torch.float16)
#: Ops whose kernel carries a state from token to token.
OPS = [
    name
    for name, spec in registry().items()
    if spec.family in ("recurrence", "scan") and "state" in " ".join(spec.differentiable)
] + ["mlstm"]


class Long(NamedTuple):
    """Relative errors of a long call, in its first and last `WINDOW` tokens."""

    first: float
    last: float


def long_case(spec: OpSpec, tokens: int) -> Case:
    plain = spec.case("plain")
    return replace(plain, label=f"{tokens} tokens", sizes=plain.sizes | {"B": 1, "T": tokens})


def relative(found: Tensor, exact: Tensor) -> float:
    """Returns the relative RMS error."""
    found = found.double()
    return ((found - exact).square().mean() / exact.square().mean()).sqrt().item()


@torch.no_grad()
def measure_long(spec: OpSpec, dtype: torch.dtype, tokens: int, eager: bool = False) -> Long:
    """Measures errors of the outputs against the fp64 kernel on the same rounded inputs."""
    call = spec.call(long_case(spec, tokens), dtype)
    exact = call.to(torch.float64).run(spec.function)[0]
    found = call.run((spec.eager or spec.reference) if eager else spec.function)[0]
    window = min(WINDOW, tokens)
    return Long(
        relative(found[:, :window], exact[:, :window]),
        relative(found[:, -window:], exact[:, -window:]),
    )


def measure_worst(spec: OpSpec, dtype: torch.dtype, pass_: Pass) -> Measured:
    """Returns the measurement that comes closest to its budget."""
    found = [measure_error(spec, case, dtype, pass_) for case in spec.cases]
    return max(found, key=lambda m: m.error / m.budget if m.budget else 0.0)


def long_table() -> str:
    lines = [
        "| op | fp32, first 1k | fp32, last 1k | loop in fp32, last 1k | bf16, last 1k | "
        "fp16, last 1k |",
        "|---|---|---|---|---|---|",
    ]
    for name in OPS:
        spec = registry()[name]
        single = measure_long(spec, torch.float32, TOKENS)
        loop = measure_long(spec, torch.float32, TOKENS, eager=True)
        halves = [measure_long(spec, dtype, TOKENS).last for dtype in HALVES]
        numbers = (*single, loop.last, *halves)
        lines.append(f"| `{name}` | " + " | ".join(f"{n:.1e}" for n in numbers) + " |")
    return "\n".join(lines)


def budget_table() -> str:
    lines = [
        "| op | dtype | output: error / budget | gradient: error / budget |",
        "|---|---|---|---|",
    ]
    for name in OPS:
        spec = registry()[name]
        for dtype in (torch.float32, *HALVES):
            passes: tuple[Pass, Pass] = ("forward", "backward")
            found = [measure_worst(spec, dtype, pass_) for pass_ in passes]
            cells = " | ".join(f"{m.error:.1e} / {m.budget:.1e}" for m in found)
            lines.append(f"| `{name}` | {SHORT_DTYPE[dtype]} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", action="store_true", help="write both pages")
    args = parser.parse_args()
    tables = {"budgets": budget_table(), "many tokens": long_table()}
    print(*tables.values(), sep="\n\n")
    if args.record:
        for name, page in PAGES.items():
            page.write_text(replace_block(page.read_text(), name, tables[name]))


if __name__ == "__main__":
    main()
