"""OpSpecs of counter-based random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Random, Variant
from omniattn.testing.specs._cases import BF16, EACH, F32, FORWARD, element_flops, rows

PAPER = "Salmon et al. 2011, SC 2011"
SPEED = (2048, 1024)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    x = random.normal(case.sizes["M"], case.sizes["N"])
    return {"x": x, "seed": torch.tensor([1234, 5])}


DROPOUT = OpSpec(
    name="dropout",
    family="random",
    cuda="emulated",
    paper="Srivastava et al. 2014, JMLR 15",
    batch_invariant=False,
    inputs=_inputs,
    differentiable=("x",),
    flops=element_flops(1),
    second_order=True,
    special=("rare",),
    cases=(
        rows("tiny", 2, 3, p=0.3),
        *(rows("half", m, n) for m, n in [(1, 1), (5, 63), (4, 64), (7, 65), (33, 1000), (0, 4)]),
        rows("rare", 40, 100, p=0.01),
        rows("all", 3, 5, p=1.0),
    ),
    benchmarks=(Benchmark(rows("tenth", *SPEED, p=0.1), (F32, BF16), EACH),),
)

UNIFORM_LIKE = OpSpec(
    name="uniform_like",
    family="random",
    cuda="emulated",
    paper=PAPER,
    batch_invariant=False,
    inputs=_inputs,
    differentiable=(),
    flops=element_flops(1),
    dtypes=(F32,),
    cases=(
        rows("tiny", 2, 3),
        *(rows("plain", m, n) for m, n in [(5, 63), (33, 1000), (0, 4)]),
    ),
    benchmarks=(Benchmark(rows("plain", *SPEED), (F32,), FORWARD),),
)

SPECS = (DROPOUT, UNIFORM_LIKE)

VARIANTS = (
    Variant(
        "dropout, bitwise equal on every device",
        ("dropout", "Dropout"),
        "Srivastava et al. 2014, JMLR 15",
    ),
)
