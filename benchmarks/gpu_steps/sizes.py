"""Sizes at which benchmarks/gpu.py times each op, taken from real models."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from omniattn.testing import Benchmark, Case, OpSpec

F32, BF16 = torch.float32, torch.bfloat16
EACH = ("forward", "backward")
#: Factor of the batch or of the rows of a CPU's benchmark, for ops that have no sizes here.
GROWTH = 16
DRY_SIZE = 8


def case(label: str, *tensors: str, **sizes_and_options: Any) -> Case:
    sizes = {k: v for k, v in sizes_and_options.items() if k[0].isupper()}
    options = {k: v for k, v in sizes_and_options.items() if not k[0].isupper()}
    return Case(label, sizes, tensors, options)


def attention(label: str, tokens: int, dim: int, **options: Any) -> Case:
    """Makes a case of 16384 tokens and width 2048, as in FlashAttention-2's and -3's figures."""
    heads = {"H": 2048 // dim, "G": 2048 // dim, "D": dim}
    return case(label, B=16384 // tokens, Tq=tokens, Tk=tokens, **heads, **options)


def _chosen() -> dict[str, list[Benchmark]]:
    """Returns benchmarks of which memory-bound ones far exceed the L2 cache, in order of worth."""
    heads = {"H": 32, "G": 8, "D": 128}
    return {
        "attention": [
            *(
                Benchmark(attention("causal", tokens, dim, causal=True), (BF16,), EACH, "compute")
                for tokens, dim in [(2048, 64), (2048, 128), (16384, 64), (16384, 128)]
            ),
            Benchmark(attention("full", 16384, 128), (BF16,), EACH, "compute"),
            Benchmark(
                attention("window", 16384, 128, causal=True, window_size=(1023, 0)),
                (BF16,),
                EACH,
                "compute",
            ),
            Benchmark(case("decode", B=64, Tq=1, Tk=8192, **heads), (BF16,), ("forward",)),
            Benchmark(case("decode", B=1, Tq=1, Tk=131072, **heads), (BF16,), ("forward",)),
        ],
        "rms_norm": [
            Benchmark(case("plain", "weight", M=16384, N=8192), (BF16, F32), EACH),
            Benchmark(case("residual", "weight", "residual", M=16384, N=8192), (BF16,), EACH),
        ],
        "layer_norm": [
            Benchmark(case("plain", "weight", "bias", M=16384, N=8192), (BF16,), EACH),
        ],
        "group_norm": [
            Benchmark(case("heads", "weight", "bias", M=16384, N=8192, num_groups=8), (BF16,), EACH)
        ],
        "rms_norm_gated": [
            Benchmark(case("after", "gate", "weight", M=16384, N=8192), (BF16,), EACH)
        ],
        "dropout": [Benchmark(case("tenth", M=16384, N=8192, p=0.1), (BF16,), EACH)],
        "apply_rotary": [Benchmark(case("half", B=8, T=4096, **heads), (BF16,), ("forward",))],
        "qk_norm_rotary": [Benchmark(case("half", "weights", B=8, T=4096, **heads), (BF16,), EACH)],
        "top_k": [Benchmark(case("experts", M=65536, N=64, k=6), (F32,), ("forward",))],
        "moe_experts": [
            Benchmark(case("mixtral", M=8192, E=8, S=2, K=2048, N=8192), (BF16,), EACH, "compute")
        ],
        "swiglu": [Benchmark(case("pair", M=16384, N=14336), (BF16,), EACH)],
        "geglu": [Benchmark(case("pair", M=16384, N=14336), (BF16,), EACH)],
        "linear": [Benchmark(case("square", M=8192, N=8192, K=8192), (BF16,), EACH, "compute")],
        "cross_entropy": [
            Benchmark(case("plain", M=8192, V=128256), (BF16, F32), EACH),
            Benchmark(case("odd", M=8192, V=50257), (BF16,), EACH),
        ],
        "linear_cross_entropy": [
            Benchmark(
                case("plain", M=8192, V=128256, K=4096), (BF16,), ("forward+backward",), "compute"
            ),
        ],
        "linear_log_prob": [
            Benchmark(
                case("plain", M=8192, V=128256, K=4096), (BF16,), ("forward+backward",), "compute"
            ),
        ],
        "jsd": [Benchmark(case("plain", M=8192, V=128256), (BF16, F32), EACH)],
        "linear_jsd": [
            Benchmark(
                case("plain", M=8192, V=128256, K=4096, J=4096),
                (BF16,),
                ("forward+backward",),
                "compute",
            ),
        ],
    }


CHOSEN = _chosen()


def by_worth(ops: tuple[str, ...]) -> list[str]:
    """Orders ops: those with sizes here come first, in the order of the sizes."""
    return [*(op for op in CHOSEN if op in ops), *(op for op in ops if op not in CHOSEN)]


def benchmarks(spec: OpSpec, dry: bool) -> list[Benchmark]:
    """Returns the benchmarks of an op, small ones for a dry run."""
    if spec.name in CHOSEN:
        return [_shrunk(each) if dry else each for each in CHOSEN[spec.name]]
    first = spec.benchmarks[0]
    dtype = BF16 if BF16 in first.dtypes else F32
    passes = EACH if spec.differentiable else ("forward",)
    case = spec.cases[0] if dry else _grown(first.case)
    return [dataclasses.replace(first, case=case, dtypes=(dtype,), passes=passes)]


def _shrunk(benchmark: Benchmark) -> Benchmark:
    sizes = {k: min(n, DRY_SIZE) for k, n in benchmark.case.sizes.items()}
    return dataclasses.replace(benchmark, case=dataclasses.replace(benchmark.case, sizes=sizes))


def _grown(case: Case) -> Case:
    """Returns a case with more batch entries or rows."""
    rows = next(name for name in ("B", "M", "H") if name in case.sizes)
    return dataclasses.replace(case, sizes={**case.sizes, rows: GROWTH * case.sizes[rows]})
