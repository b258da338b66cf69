"""OpSpecs of top-k."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Random
from omniattn.testing.specs._cases import F32, FORWARD, element_flops


def _scores(
    label: str, M: int, N: int, k: int, tensors: tuple[str, ...] = (), **options: Any
) -> Case:
    return Case(label, {"M": M, "N": N}, tensors, {"k": k, **options})


def _top_k_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, n = case.sizes["M"], case.sizes["N"]
    made = {"scores": random.normal(m, n)}
    if "ties" in case.tensors:
        made["scores"] = made["scores"].round()
    if "mask" in case.tensors:
        made["mask"] = random.uniform(m, n) < 0.2
    return made


TOP_K = OpSpec(
    name="top_k",
    family="topk",
    cuda="emulated",
    paper="stable, as np.argsort",
    inputs=_top_k_inputs,
    differentiable=("scores",),
    flops=element_flops(1),
    second_order=True,
    special=("mask",),
    cases=(
        _scores("tiny", 2, 5, 3),
        _scores("experts", 33, 64, 6),
        _scores("one", 1, 1, 1),
        *(_scores("edge", 3, n, 4) for n in (63, 65, 1024, 1025)),
        _scores("ties", 20, 100, 40, ("ties",)),
        _scores("mask", 20, 65, 20, ("ties", "mask")),
        _scores("by-index", 20, 65, 20, ("ties", "mask"), sorted_by_index=True),
        _scores("long", 3, 3000, 9),
        _scores("all", 5, 17, 17),
        _scores("none", 5, 17, 0),
        _scores("empty", 0, 4, 2),
    ),
    benchmarks=(
        Benchmark(_scores("experts", 2048, 64, 6), (F32,), FORWARD),
        Benchmark(_scores("keys", 1024, 4096, 64), (F32,), FORWARD),
    ),
)

SPECS = (TOP_K,)
