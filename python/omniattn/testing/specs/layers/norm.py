"""OpSpecs of normalisations."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Random, Variant
from omniattn.testing.specs._cases import BF16, BOTH, F32, TRAINING, element_flops, rows


def _norm_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, n = case.sizes["M"], case.sizes["N"]
    shapes = {"x": (m, n), "weight": (n,), "bias": (n,), "residual": (m, n), "gate": (m, n)}
    made = {name: random.normal(*shapes[name]) for name in ("x", *case.tensors) if name in shapes}
    if "stream" in case.tensors:
        made["residual"] = random.uniform(m, n).to(torch.promote_types(random.dtype, F32))
    return made


SIZES = [(3, 1), (5, 63), (4, 64), (7, 65), (33, 100), (64, 1024), (3, 4097), (700, 48)]
EMPTIES = [(0, 8), (3, 0)]
SPEED = ((2048, 1024), (8192, 512))


def _timed(
    name: str, tensors: tuple[str, ...], dtypes: tuple[torch.dtype, ...], **options: bool
) -> tuple[Benchmark, ...]:
    return tuple(Benchmark(rows(name, *s, tensors, **options), dtypes, TRAINING) for s in SPEED)


RMS_NORM = OpSpec(
    name="rms_norm",
    family="norm",
    cuda="emulated",
    paper="Zhang and Sennrich 2019, arXiv 1910.07467",
    inputs=_norm_inputs,
    differentiable=("x", "weight", "residual"),
    flops=element_flops(4),
    second_order=True,
    special=("bareresidual", "llama", "stream"),
    cases=(
        rows("tiny", 3, 5, ("weight", "residual"), offset=1.0),
        *(rows("plain", m, n, ("weight",)) for m, n in SIZES + EMPTIES),
        rows("bare", 17, 130, eps=1e-3),
        rows("offset", 17, 130, ("weight",), offset=1.0),
        rows("residual", 33, 65, ("weight", "residual")),
        rows("bareresidual", 9, 1025, ("residual",)),
        rows("llama", 17, 130, ("weight", "residual"), casting="llama"),
        rows("stream", 33, 100, ("weight", "stream"), casting="llama"),
        rows("longstream", 3, 4097, ("stream",)),
    ),
    benchmarks=(
        *_timed("plain", ("weight",), (F32, BF16)),
        *_timed("residual", ("weight", "residual"), (F32,)),
        *_timed("stream", ("weight", "stream"), (BF16,)),
        Benchmark(rows("call", 4, 64, ("weight",)), (F32,), BOTH),
    ),
)

LAYER_NORM = OpSpec(
    name="layer_norm",
    family="norm",
    cuda="emulated",
    paper="Ba, Kiros and Hinton 2016, arXiv 1607.06450",
    inputs=_norm_inputs,
    differentiable=("x", "weight", "bias", "residual"),
    flops=element_flops(6),
    second_order=True,
    special=("residual",),
    cases=(
        rows("tiny", 3, 5, ("weight", "bias", "residual")),
        *(rows("plain", m, n, ("weight", "bias")) for m, n in SIZES[1:] + EMPTIES),
        rows("bare", 17, 130, eps=1e-3),
        rows("nobias", 17, 130, ("weight",)),
        rows("residual", 33, 65, ("weight", "bias", "residual")),
        rows("stream", 17, 130, ("weight", "bias", "stream")),
    ),
    benchmarks=(
        *_timed("plain", ("weight", "bias"), (F32, BF16)),
        *_timed("residual", ("weight", "bias", "residual"), (F32,)),
    ),
)

GROUP_NORM = OpSpec(
    name="group_norm",
    family="norm",
    cuda="emulated",
    paper="Wu and He 2018, arXiv 1803.08494",
    inputs=_norm_inputs,
    differentiable=("x", "weight", "bias"),
    flops=element_flops(6),
    second_order=True,
    special=("rms",),
    cases=(
        rows("tiny", 3, 6, ("weight", "bias"), num_groups=2),
        *(
            rows("groups", m, n, ("weight", "bias"), num_groups=g)
            for m, n, g in [
                (5, 63, 3),
                (7, 130, 2),
                (33, 256, 4),
                (300, 48, 6),
                (0, 8, 2),
                (3, 0, 1),
            ]
        ),
        rows("bare", 17, 130, num_groups=13, eps=1e-3),
        rows("rms", 17, 130, ("weight",), num_groups=2, center=False),
        rows("long", 3, 5000, ("bias",), num_groups=1),
    ),
    benchmarks=(
        Benchmark(
            rows("heads", 2048, 1024, ("weight", "bias"), num_groups=16), (F32, BF16), TRAINING
        ),
    ),
)

RMS_NORM_GATED = OpSpec(
    name="rms_norm_gated",
    family="norm",
    cuda="emulated",
    paper="Dao and Gu 2024, arXiv 2405.21060",
    inputs=_norm_inputs,
    differentiable=("x", "gate", "weight"),
    flops=element_flops(10),
    second_order=True,
    special=("beforegroups", "sigmoid", "mamba2", "qwen3next"),
    cases=(
        rows("tiny", 3, 6, ("gate", "weight"), num_groups=2, norm_before_gate=False),
        *(rows("after", m, n, ("gate", "weight")) for m, n in [*SIZES[1:-1], (3, 1), *EMPTIES]),
        rows("before", 33, 130, ("gate", "weight"), norm_before_gate=False),
        rows("beforegroups", 33, 256, ("gate",), norm_before_gate=False, num_groups=4),
        rows("sigmoid", 17, 96, ("gate", "weight"), activation="sigmoid", num_groups=3),
        rows("sigmoidbefore", 9, 64, ("gate",), activation="sigmoid", norm_before_gate=False),
        rows(
            "mamba2",
            17,
            130,
            ("gate", "weight"),
            casting="llama",
            norm_before_gate=False,
            num_groups=2,
        ),
        rows("qwen3next", 17, 130, ("gate", "weight"), casting="llama"),
    ),
    benchmarks=(
        *_timed("after", ("gate", "weight"), (F32, BF16)),
        *_timed("before", ("gate", "weight"), (F32, BF16), norm_before_gate=False),
    ),
)
SPECS = (RMS_NORM, LAYER_NORM, GROUP_NORM, RMS_NORM_GATED)

VARIANTS = (
    Variant("LayerNorm", ("layer_norm", "LayerNorm"), "Ba et al. 2016, arXiv 1607.06450"),
    Variant("RMSNorm", ("rms_norm", "RMSNorm"), "Zhang and Sennrich 2019, arXiv 1910.07467"),
    Variant(
        "gated RMSNorm, norm before or after the gate",
        ("rms_norm_gated", "RMSNormGated"),
        "Dao and Gu 2024, arXiv 2405.21060",
    ),
    Variant(
        "GroupNorm, per-head norm", ("group_norm", "GroupNorm"), "Wu and He 2018, arXiv 1803.08494"
    ),
)
