"""OpSpecs of gated linear units."""

from __future__ import annotations

from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Random
from omniattn.testing.specs._cases import BF16, F32, TRAINING, element_flops, rows


def _glu_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, n = case.sizes["M"], case.sizes["N"]
    if "packed" in case.tensors:
        return {"gate": random.normal(m, 2 * n)}
    return {"gate": random.normal(m, n), "up": random.normal(m, n)}


CASES = (
    rows("tiny", 2, 3, ("packed",)),
    *(rows("pair", m, n) for m, n in [(3, 1), (5, 63), (4, 64), (7, 65), (33, 1000), (0, 4)]),
    *(rows("packed", m, n, ("packed",)) for m, n in [(5, 63), (33, 1000), (3, 0)]),
)
TANH = tuple(
    rows(f"tanh{label}", 33, 100, tensors, approximate="tanh")
    for label, tensors in (("pair", ()), ("packed", ("packed",)))
)
LIMIT = tuple(
    rows(f"limit{label}", 33, 100, tensors, alpha=0.9, limit=0.7)
    for label, tensors in (("pair", ()), ("packed", ("packed",)))
)
FURTHER = {"geglu": TANH, "clamped_swiglu": LIMIT}
SPECIAL = {"geglu": ("tanhpacked",), "clamped_swiglu": ("limitpacked",)}
BENCHMARKS = (Benchmark(rows("pair", 2048, 1024), (F32, BF16), TRAINING),)

SPECS = tuple(
    OpSpec(
        name=name,
        family="activation",
        cuda="emulated",
        paper="OpenAI 2025, arXiv 2508.10925"
        if name == "clamped_swiglu"
        else "Shazeer 2020, arXiv 2002.05202",
        inputs=_glu_inputs,
        differentiable=("gate", "up"),
        flops=element_flops(6),
        second_order=True,
        special=SPECIAL.get(name, ()),
        cases=CASES + FURTHER.get(name, ()),
        benchmarks=BENCHMARKS,
    )
    for name in ("swiglu", "geglu", "reglu", "glu", "bilinear", "clamped_swiglu")
)
