"""OpSpecs of neighborhood attention."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from omniattn.functional import masks
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, F32, TRAINING
from omniattn.testing.specs.attention.attention import GRADIENT_FACTOR

_AXES = ("Z", "Y", "X")


def grid(
    label: str,
    B: int,
    shape: tuple[int, ...],
    H: int,
    G: int,
    D: int,
    Dv: int | None = None,
    **options: Any,
) -> Case:
    axes = dict(zip(_AXES[-len(shape) :], shape, strict=True))
    sizes = {"B": B, **axes, "H": H, "G": G, "D": D}
    return Case(label, sizes if Dv is None else {**sizes, "Dv": Dv}, (), options)


def _shape(case: Case) -> tuple[int, ...]:
    return tuple(case.sizes[axis] for axis in _AXES if axis in case.sizes)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, h, g, d = (case.sizes[k] for k in ("B", "H", "G", "D"))
    tokens = (b, *_shape(case))
    return {
        "query": random.normal(*tokens, h, d),
        "key": random.normal(*tokens, g, d),
        "value": random.normal(*tokens, g, case.sizes.get("Dv", d)),
    }


def _flops(case: Case, pass_: Pass) -> float:
    """Counts attention's FLOPs on the pairs that the mask allows."""
    names = ("kernel_size", "stride", "dilation", "is_causal")
    options = {name: case.options[name] for name in names if name in case.options}
    mask, s = masks.GridNeighborhood(_shape(case), **options), case.sizes
    tokens = math.prod(_shape(case))
    pairs = mask.count(tokens, tokens, batch=s["B"], heads=s["H"])
    d, dv = s["D"], s.get("Dv", s["D"])
    forward, backward = 2.0 * (d + dv), 2.0 * (3 * d + 2 * dv)
    per_pair = {"forward": forward, "backward": backward, "forward+backward": forward + backward}
    return pairs * per_pair[pass_]


def _spec(
    name: str, special: tuple[str, ...], cases: tuple[Case, ...], benchmarks: tuple[Benchmark, ...]
) -> OpSpec:
    return OpSpec(
        name=name,
        family="attention",
        cuda="emulated",
        paper="Hassani et al. 2022, arXiv 2204.07143",
        inputs=_inputs,
        differentiable=("query", "key", "value"),
        flops=_flops,
        gradient_factor=GRADIENT_FACTOR,
        second_order=True,
        special=special,
        cases=cases,
        benchmarks=benchmarks,
    )


NA1D = _spec(
    "na1d",
    ("causal",),
    (
        grid("tiny", 1, (4,), 2, 1, 3, 2, kernel_size=2, return_lse=True),
        grid("even", 2, (150,), 4, 2, 16, kernel_size=8),
        grid("strided", 1, (130,), 2, 2, 16, kernel_size=21, stride=4),
        grid("causal", 1, (130,), 2, 2, 16, kernel_size=9, dilation=3, stride=2, is_causal=True),
        grid("whole", 1, (70,), 2, 1, 8, kernel_size=70),
    ),
    (
        Benchmark(
            grid("window", 1, (1024,), 8, 8, 64, kernel_size=128), (F32,), TRAINING, "compute"
        ),
    ),
)
NA2D = _spec(
    "na2d",
    ("odd", "dilated", "causal"),
    (
        grid("tiny", 1, (2, 3), 2, 1, 3, 2, kernel_size=(1, 2), return_lse=True),
        grid("plain", 2, (14, 14), 4, 2, 16, kernel_size=7),
        grid("odd", 1, (9, 33), 2, 1, 16, 8, kernel_size=(4, 5), return_lse=True),
        grid("dilated", 1, (20, 17), 2, 2, 16, kernel_size=(3, 5), dilation=(6, 2), scale=0.3),
        grid("strided", 1, (12, 20), 2, 2, 16, kernel_size=(5, 8), stride=(2, 8)),
        grid("causal", 1, (13, 11), 2, 1, 24, kernel_size=3, is_causal=(True, False)),
        grid("rows", 1, (5, 40), 2, 1, 16, kernel_size=(1, 40)),
    ),
    (
        Benchmark(
            grid("nat", 1, (32, 32), 8, 8, 32, kernel_size=7), (F32, BF16), TRAINING, "compute"
        ),
        Benchmark(
            grid("dinat", 1, (32, 32), 8, 8, 32, kernel_size=7, dilation=4),
            (F32,),
            TRAINING,
            "compute",
        ),
    ),
)
NA3D = _spec(
    "na3d",
    ("video",),
    (
        grid("tiny", 1, (2, 2, 2), 2, 1, 3, 2, kernel_size=(1, 2, 2), return_lse=True),
        grid("plain", 1, (4, 6, 8), 4, 2, 16, kernel_size=3),
        grid(
            "video", 2, (3, 7, 9), 2, 1, 16, kernel_size=(2, 3, 4), is_causal=(True, False, False)
        ),
        grid("each", 1, (4, 8, 9), 2, 2, 8, kernel_size=2, stride=(1, 2, 1), dilation=(1, 3, 2)),
    ),
    (
        Benchmark(
            grid("video", 1, (8, 16, 16), 8, 8, 32, kernel_size=(3, 5, 5)),
            (F32,),
            TRAINING,
            "compute",
        ),
    ),
)

SPECS = (NA1D, NA2D, NA3D)

VARIANTS = (
    Variant(
        "neighborhood attention in 1-D to 3-D: dilated, strided, causal",
        (
            *("na1d", "na2d", "na3d", "GridNeighborhood"),
            *("NeighborhoodAttention1D", "NeighborhoodAttention2D", "NeighborhoodAttention3D"),
        ),
        "Hassani et al. 2025, arXiv 2504.16922",
    ),
)
