"""Measures register tiles against the ceilings of this machine, per ISA level and operand type.

    python benchmarks/microkernel.py [--isa avx512 ...] [--seconds 0.3]

Prints GFLOP/s of the product on blocks that stay in L1 and L2, with B packed, B as plain rows, and
A read by columns, as a share of the multiply-add rate probed in the same run; then the read and
triad bandwidths, the ceilings of memory-bound kernels. Every figure is the best of many short
windows, since other load only slows the machine down.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from omniattn import _kernels

BLOCKS = [  # (m, n, k) of the tiles' calls by attention and linear
    (96, 128, 64),
    (96, 128, 128),
    (96, 64, 128),
    (192, 256, 128),
    (96, 256, 256),
    (96, 80, 128),
    (6, 64, 256),
]
WINDOW_SECONDS = 3e-3
FORMS = [("packed_rows", False), ("rows", False), ("rows", True)]
KIB = 1024


def best(rate: Callable[[float], float], seconds: float) -> float:
    return max(rate(WINDOW_SECONDS) for _ in range(max(1, round(seconds / WINDOW_SECONDS))))


def report_tiles(probe: _kernels.Probe, seconds: float) -> None:
    for dtype in ("f32", "f64", "bf16"):
        if probe.operand(dtype) != dtype:
            continue
        print(f"\n{probe.isa} {dtype:26} B packed          B rows    A columns     peak GF/s")
        peak = 0.0
        for m, n, k in BLOCKS:
            cells = []
            for layout, a_transposed in FORMS:
                if dtype == "bf16" and layout == "rows":
                    cells.append(f"{'-':>14}")
                    continue
                rate = best(partial(probe.tile_rate, dtype, layout, a_transposed, m, n, k), seconds)
                peak = max(peak, best(partial(probe.peak, dtype, 1), seconds / 3))
                cells.append(f"{rate:7.1f} {rate / peak:6.1%}")
            print(f"  {m:4} x {n:4} x {k:4}          {'  '.join(cells)}  {peak:8.1f}")


def report_bandwidth(probe: _kernels.Probe, seconds: float) -> None:
    sizes = {"L1": 24 * KIB, "L2": 512 * KIB, "L3": 8 * KIB**2, "DRAM": 256 * KIB**2}
    for threads in (1, 2):
        reads = [
            f"{name} {best(partial(probe.read_bandwidth, size, threads), seconds):.0f}"
            for name, size in sizes.items()
        ]
        triads = [
            f"{best(partial(probe.triad, 64 * KIB**2, threads, stream), seconds):.0f}"
            for stream in (False, True)
        ]
        print(
            f"{probe.isa}, {threads} thread(s), GB/s: read {', '.join(reads)};"
            f" triad {triads[0]}, non-temporal {triads[1]};"
            f" FMA fp32 {best(partial(probe.peak, 'f32', threads), seconds):.0f} GF/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", nargs="*", default=None, help="default: all of this machine")
    parser.add_argument("--seconds", type=float, default=0.3, help="per measurement")
    arguments = parser.parse_args()
    isas = [isa for isa in _kernels.probe_isas() if not isa.endswith("emulated")]
    for isa in arguments.isa or isas:
        probe = _kernels.Probe(isa)
        report_tiles(probe, arguments.seconds)
        print()
        report_bandwidth(probe, arguments.seconds)


if __name__ == "__main__":
    main()
