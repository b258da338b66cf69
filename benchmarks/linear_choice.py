"""Measures this package's linear kernel against torch's, for ops/dispatch/gemm_choice.py.

    python benchmarks/linear_choice.py [--threads 2] [--seconds 0.3] [--dtypes bfloat16 ...]
    python benchmarks/linear_choice.py --record    # adds this family of CPUs to what is installed

Both kernels alternate; the best time of each counts, since other load only adds to it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from omniattn.config import CPU_ISAS
from omniattn.functional import linear
from omniattn.ops.dispatch import gemm_choice
from omniattn.ops.dispatch.cpu import cpu_family

SHAPES = [  # (M, N, K)
    (1, 1024, 1024),
    (4, 1024, 1024),
    (32, 1024, 1024),
    (64, 64, 64),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (1024, 64, 1024),
    (2048, 1408, 512),
]
#: Numbers of rows of calls without gradients, and their (N, K).
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
WEIGHTS = [(1024, 1024), (3072, 768), (768, 3072), (4096, 4096)]
#: Sizes and numbers of rows of small square weights, for calls that cost more than their products.
SMALL, FEW = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536), (1, 4, 16)


def best_times(functions: list[Callable[[], object]], seconds: float) -> list[float]:
    best = [float("inf")] * len(functions)
    for f in functions:
        f()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, f in enumerate(functions):
            start = time.perf_counter()
            f()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


@dataclass(frozen=True)
class Measured:
    """Seconds of a product and its gradients, ours and torch's."""

    shape: tuple[int, int, int]
    forward: list[float]
    backward: list[float]

    @property
    def madds(self) -> int:
        return math.prod(self.shape)

    @property
    def gain(self) -> float:
        """Returns the speed-up of forward and backward together."""
        ours, theirs = (f + b for f, b in zip(self.forward, self.backward, strict=True))
        return theirs / ours

    def __str__(self) -> str:
        rates = [
            (count * 2e-9 * self.madds / t for t in times)
            for count, times in ((1, self.forward), (2, self.backward))
        ]
        parts = [f"{ours:8.1f} {theirs:8.1f} {ours / theirs:6.2f}" for ours, theirs in rates]
        return f"{self.shape[0]:5} {self.shape[1]:5} {self.shape[2]:5}  {'   '.join(parts)}"


def measure(dtype: torch.dtype, shape: tuple[int, int, int], seconds: float) -> Measured:
    m, n, k = shape
    leaves = [torch.randn(r, k).to(dtype).requires_grad_() for r in (m, n)]
    grad = torch.randn(m, n).to(dtype)
    functions = [functools.partial(linear, backend="cpu"), torch.nn.functional.linear]
    with torch.no_grad():
        forward = best_times([functools.partial(f, *leaves) for f in functions], seconds)
    backward = [
        functools.partial(torch.autograd.grad, f(*leaves), leaves, grad, retain_graph=True)
        for f in functions
    ]
    return Measured(shape, forward, best_times(backward, seconds))


def crossings(measured: list[Measured]) -> tuple[int, int]:
    """Returns (least, most), the range of multiply-adds with our largest total gain over torch.

    Returns (1, 0) without a gain. Sizes between the last shape inside and the first outside use
    torch. A range that includes the largest measured product is unbounded.
    """
    order = sorted(measured, key=lambda m: m.madds)
    counts = sorted({m.madds for m in order})
    best, found = 0.0, (1, 0)
    for least in counts:
        for most in counts:
            total = sum(math.log(m.gain) for m in order if least <= m.madds <= most)
            if total > best:
                best, found = total, (0 if least == counts[0] else least, most)
    return (found[0], gemm_choice.UNBOUNDED) if found[1] == counts[-1] else found


def rows_of_ours(gains: dict[int, float]) -> tuple[int, int]:
    """Returns (first, last), the longest run of numbers of rows with a gain, or (1, 0)."""
    best: tuple[int, ...] = ()
    run: tuple[int, ...] = ()
    for rows, gain in sorted(gains.items()):
        run = (*run, rows) if gain > 1 else ()
        best = max(best, run, key=len)
    return (best[0], best[-1]) if best else (1, 0)


def gains_without_gradients(dtype: torch.dtype, seconds: float) -> dict[int, float]:
    """Returns number of rows -> torch's time / ours, the geometric mean over the weights."""
    functions = [functools.partial(linear, backend="cpu"), torch.nn.functional.linear]
    weights = [torch.randn(shape).to(dtype) for shape in WEIGHTS]
    gains = {}
    for rows in ROWS:
        logs = 0.0
        for weight in weights:
            x = torch.randn(rows, weight.shape[1]).to(dtype)
            ours, theirs = best_times([functools.partial(f, x, weight) for f in functions], seconds)
            logs += math.log(theirs / ours)
        gains[rows] = round(math.exp(logs / len(weights)), 2)
    return gains


def smallest_of_ours(gains: list[tuple[int, float]]) -> int:
    """Returns the number of elements of a weight from which on our total gain is largest.

    `gains`: elements and torch's time / ours. 0 if ours gains for all, UNBOUNDED if for none.
    """
    counts = sorted({elements for elements, _ in gains})
    totals = {
        least: sum(math.log(gain) for elements, gain in gains if elements >= least)
        for least in (*counts, gemm_choice.UNBOUNDED)
    }
    best = max(totals, key=lambda least: totals[least])
    return 0 if best == counts[0] else best


def gains_of_small(dtype: torch.dtype, seconds: float) -> list[tuple[int, float]]:
    """Returns elements of a weight and torch's time / ours of small products without gradients, on
    one thread."""
    functions = [functools.partial(linear, backend="cpu"), torch.nn.functional.linear]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gains = []
    for size in SMALL:
        weight = torch.randn(size, size).to(dtype)
        for rows in FEW:
            x = torch.randn(rows, size).to(dtype)
            ours, theirs = best_times([functools.partial(f, x, weight) for f in functions], seconds)
            gains.append((size * size, float(f"{theirs / ours:.2g}")))
    torch.set_num_threads(threads)
    return gains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="per measurement")
    parser.add_argument(
        "--dtypes", nargs="*", default=["float32", "bfloat16", "float16", "float64"]
    )
    parser.add_argument(
        "--record", action="store_true", help=f"write {gemm_choice.RECORDS.name} for this family"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(cpu_family(), *gemm_choice.describe(), sep="\n")
    print("dtype         M     N     K   forward: ours torch GF/s gain   backward: ours torch gain")
    dtypes = {}
    for name in arguments.dtypes:
        found = []
        for shape in SHAPES:
            found.append(measure(getattr(torch, name), shape, arguments.seconds))
            print(f"{name:9} {found[-1]}", flush=True)
        least, most = crossings(found)
        gains = [[*m.shape, round(m.gain, 2)] for m in found]
        without = gains_without_gradients(getattr(torch, name), arguments.seconds)
        rows = rows_of_ours(without)
        dtypes[name] = {"least": least, "most": most, "rows": rows, "gains": gains}
        dtypes[name]["gains_without_gradients"] = without
        small = gains_of_small(getattr(torch, name), arguments.seconds)
        dtypes[name] |= {"smallest": smallest_of_ours(small), "gains_of_small": small}
        print(f"{name:9} ours from {least:.2e} to {most:.2e} multiply-adds")
        print(f"{name:9} ours from {rows[0]} to {rows[1]} rows without gradients: {without}")
        print(f"{name:9} ours for weights of {dtypes[name]['smallest']} elements: {small}")
    if arguments.record:
        records = json.loads(gemm_choice.RECORDS.read_text())
        records[cpu_family()] = {
            "isa": CPU_ISAS[torch.ops.omniattn.cpu_isa()],
            "torch": torch.__version__,
            "threads": arguments.threads,
            "dtypes": dtypes,
        }
        gemm_choice.RECORDS.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
