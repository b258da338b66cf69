"""OpSpecs of matrix products."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Random
from omniattn.testing.specs._cases import BF16, EACH, F16, F32, FORWARD, gemm_flops


def _gemm(
    label: str, M: int, N: int, K: int, tensors: tuple[str, ...] = (), **options: Any
) -> Case:
    return Case(label, {"M": M, "N": N, "K": K}, tensors, options)


def _linear_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, n, k = (case.sizes[s] for s in "MNK")
    made = {"x": random.normal(m, k), "weight": random.normal(n, k)}
    return made | {"bias": random.normal(n)} if "bias" in case.tensors else made


LINEAR = OpSpec(
    name="linear",
    family="gemm",
    cuda="emulated",
    paper="Goto and van de Geijn 2008, doi 10.1145/1356052.1356053",
    inputs=_linear_inputs,
    differentiable=("x", "weight", "bias"),
    flops=gemm_flops,
    second_order=True,
    chooses=True,
    special=("offtile",),
    cases=(
        _gemm("tiny", 2, 3, 4, ("bias",)),
        _gemm("plain", 64, 64, 64),
        *(
            _gemm("offtile", m, n, k, ("bias",))
            for m, n, k in [(1, 1, 1), (63, 65, 100), (65, 63, 1), (1, 300, 257), (130, 1, 33)]
        ),
        _gemm("blocks", 200, 520, 700, ("bias",)),
        *(_gemm("empty", m, n, k, ("bias",)) for m, n, k in [(0, 5, 6), (5, 0, 6), (5, 6, 0)]),
    ),
    benchmarks=(
        Benchmark(_gemm("square", 1024, 1024, 1024), (F32,), EACH, "compute"),
        Benchmark(_gemm("square", 1024, 1024, 1024), (BF16, F16), FORWARD, "compute"),
    ),
)

SPECS = (LINEAR,)
