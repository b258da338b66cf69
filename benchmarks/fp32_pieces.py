"""Measures errors of split-bf16 fp32 products on tiles, and of torch's fp32 product.

    python benchmarks/fp32_pieces.py            # prints the table
    python benchmarks/fp32_pieces.py --publish  # writes it to docs/precision.md

Needs a development build. Software tiles are bitwise equal to AMX, so any machine with AVX2 works.
Errors are against fp64, in units of 2^-24 |A| |B|: half an ulp of an fp32 number as large as the
sum of the absolute products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from omniattn import _kernels as kernels

M, N, K = 48, 48, 1024
UNIT = 2.0**-24
F32 = 1
PAGE = Path(__file__).parents[1] / "docs/precision.md"
BEGIN, END = "<!-- errors of pieces -->\n", "<!-- end -->\n"


def _scaled(low: float, high: float) -> Callable[..., np.ndarray]:
    """Returns a maker of elements of widely different magnitudes."""

    def make(rng: np.random.Generator, *shape: int) -> np.ndarray:
        return rng.standard_normal(shape) * 2.0 ** rng.uniform(low, high, shape)

    return make


def _normal(factor: float) -> Callable[..., np.ndarray]:
    return lambda rng, *shape: rng.standard_normal(shape) * factor


def _rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Makes rows of A, or columns of B, of widely different magnitudes."""
    scales = 2.0 ** rng.uniform(-60, 60, M)
    return rng.standard_normal(shape) * (scales[:, None] if shape[0] == M else scales)


def _cancelling(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Makes B with nearly opposite halves, or A with equal halves."""
    half = rng.standard_normal((K // 2, N) if shape[0] == K else (M, K // 2))
    if shape[0] == K:
        return np.concatenate([half, -half * (1 + 1e-3 * rng.standard_normal(half.shape))])
    return np.concatenate([half, half], 1)


#: Name of the data -> functions that make A (M, K) and B (K, N).
DATA: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
    "normal": (_normal(1), _normal(1)),
    "uniform in [0, 1)": (lambda rng, *s: rng.random(s), lambda rng, *s: rng.random(s)),
    "elements times 2^U(-10, 10)": (_scaled(-10, 10), _scaled(-10, 10)),
    "elements times 2^U(-40, 40)": (_scaled(-40, 40), _scaled(-40, 40)),
    "rows and columns times 2^U(-60, 60)": (_rows, _rows),
    "cancelling halves": (_cancelling, _cancelling),
    "A times 2^-115": (_normal(2.0**-115), _normal(1)),
    "A times 2^-126, B times 2^30": (_normal(2.0**-126), _normal(2.0**30)),
    "A up to the largest, B times 2^-20": (
        lambda rng, *s: rng.uniform(-3.4e38, 3.4e38, s),
        _normal(2.0**-20),
    ),
}


def operands(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns A and B in fp32."""
    rng = np.random.default_rng(0)
    a, b = DATA[name]
    return a(rng, M, K).astype(np.float32), b(rng, K, N).astype(np.float32)


def in_pieces(a: np.ndarray, b: np.ndarray, pieces: int, isa: str) -> np.ndarray:
    """Returns A B computed by the tiles of `isa`."""
    c = np.empty((a.shape[0], b.shape[1]), np.float32)
    dtypes = (F32, F32, F32)
    kernels.gemm(isa, dtypes, a, False, b, False, None, c, a.shape[1], False, pieces)
    return c


def errors(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[float, float]:
    """Returns the maximum and RMS error of C, in units."""
    exact = a.astype(np.float64) @ b.astype(np.float64)
    size = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    found = np.abs(c - exact) / (UNIT * size)
    return float(found.max()), float(np.sqrt((found**2).mean()))


def software_tiles() -> str:
    """Returns a level of software tiles that runs on this machine."""
    return next(i for i in kernels.probe_isas() if i.startswith("amx_bf16_"))


def table() -> str:
    """Returns a Markdown table: maximum / rms of torch's product, of six products and of three."""
    lines = [
        "| data | fp32 of torch (MKL) | six products | three products |",
        "|---|---|---|---|",
    ]
    for name in DATA:
        a, b = operands(name)
        products = [(torch.from_numpy(a) @ torch.from_numpy(b)).numpy()]
        products += [in_pieces(a, b, pieces, software_tiles()) for pieces in (3, 2)]
        cells = (" / ".join(f"{e:.3g}" for e in errors(a, b, c)) for c in products)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--publish", action="store_true", help=f"write {PAGE.name}")
    found = table()
    if not parser.parse_args().publish:
        print(found, end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + found + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
