"""This package's linear kernel against torch's: the measurement for ops/gemm_choice.py.

    python benchmarks/linear_choice.py [--threads 1] [--seconds 0.3] [--dtypes bfloat16 ...]

Both kernels alternate; the best time of each counts, since a shared machine only ever adds to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from omniattn.functional import linear
from omniattn.ops import gemm_choice

SHAPES = [  # (M, N, K)
    (1, 1024, 1024),
    (4, 1024, 1024),
    (32, 1024, 1024),
    (64, 64, 64),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (1024, 64, 1024),
    (2048, 1408, 512),
]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="per measurement")
    parser.add_argument(
        "--dtypes", nargs="*", default=["float32", "bfloat16", "float16", "float64"]
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(*gemm_choice.describe(), sep="\n")
    print("dtype         M     N     K   forward: ours torch GF/s gain   backward: ours torch gain")
    for name in arguments.dtypes:
        for m, n, k in SHAPES:
            x, weight = (torch.randn(r, k).to(getattr(torch, name)) for r in (m, n))
            grad = torch.randn(m, n).to(x.dtype)
            flops = 2e-9 * m * n * k
            leaves = [t.requires_grad_() for t in (x, weight)]
            outputs = [linear(*leaves, backend="cpu"), torch.nn.functional.linear(*leaves)]

            def backward(y: torch.Tensor) -> Callable[[], object]:
                return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)  # noqa: B023

            with torch.no_grad():
                forward = [
                    lambda: linear(x, weight, backend="cpu"),  # noqa: B023
                    lambda: torch.nn.functional.linear(x, weight),  # noqa: B023
                ]
                ours, theirs = best_times(forward, arguments.seconds)
            ours_back, theirs_back = best_times([backward(y) for y in outputs], arguments.seconds)
            print(
                f"{name:9} {m:5} {n:5} {k:5}  {flops / ours:8.1f} {flops / theirs:8.1f}"
                f" {theirs / ours:6.2f}   {2 * flops / ours_back:8.1f}"
                f" {2 * flops / theirs_back:8.1f} {theirs_back / ours_back:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
