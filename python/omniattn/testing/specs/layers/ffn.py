"""OpSpecs of feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omniattn.reference.layers.activation import ACTIVATIONS
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, EACH, F32, SWEEPS, TRAINING


def _ffn(
    label: str,
    M: int,
    K: int,
    F: int,
    N: int | None = None,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    return Case(label, {"M": M, "K": K, "F": F, "N": K if N is None else N}, tensors, options)


def _ffn_inputs(gated: bool) -> Callable[[Case, Random], dict[str, Tensor]]:
    def inputs(case: Case, random: Random) -> dict[str, Tensor]:
        m, k, f, n = (case.sizes[s] for s in "MKFN")
        scale = max(k, 1) ** -0.5, max(f, 1) ** -0.5
        shapes = {"gate_bias": (f,), "up_bias": (f,), "down_bias": (n,)}
        made = {"x": random.normal(m, k)}
        if gated:
            made["gate_weight"] = random.normal(f, k) * scale[0]
        made |= {
            "up_weight": random.normal(f, k) * scale[0],
            "down_weight": random.normal(n, f) * scale[1],
        }
        if "biases" in case.tensors:
            made |= {b: random.normal(*s) for b, s in shapes.items() if gated or b != "gate_bias"}
        return made | ({"seed": torch.tensor([7, 3])} if "seed" in case.tensors else {})

    return inputs


def _ffn_flops(projections: int) -> Callable[[Case, Pass], float]:
    def flops(case: Case, pass_: Pass) -> float:
        m, k, f, n = (case.sizes[s] for s in "MKFN")
        return 2.0 * m * f * (projections * k + n) * SWEEPS[pass_]

    return flops


SIZES = [(1, 1, 1, 1), (33, 65, 100, 63), (5, 300, 17, 40), (0, 5, 6, 7), (5, 6, 7, 0)]
CASES = (
    _ffn("tiny", 2, 3, 4, 5, ("biases",)),
    _ffn("plain", 64, 64, 128),
    *(_ffn("offtile", m, k, f, n, ("biases",)) for m, k, f, n in SIZES),
    _ffn("recompute", 33, 48, 80, None, ("biases",), recompute=True),
    _ffn("dropout", 33, 48, 80, None, ("seed",), dropout_p=0.3),
    *(
        _ffn(name, 17, 33, 40, None, (), activation=name)
        for name in ACTIVATIONS
        if name not in ("identity", "silu")
    ),
)

CLAMPED = {"activation": "clamped_swiglu"}

GLU_MLP = OpSpec(
    name="glu_mlp",
    family="ffn",
    cuda="emulated",
    paper="Shazeer 2020, arXiv 2002.05202",
    inputs=_ffn_inputs(True),
    differentiable=(
        "x",
        "gate_weight",
        "up_weight",
        "down_weight",
        "gate_bias",
        "up_bias",
        "down_bias",
    ),
    flops=_ffn_flops(2),
    benchmarks=(
        Benchmark(_ffn("swiglu", 2048, 512, 1408), (F32,), EACH, "compute"),
        Benchmark(_ffn("swiglu", 2048, 512, 1408), (BF16,), TRAINING, "compute"),
        Benchmark(_ffn("geglu", 512, 512, 1408, activation="gelu"), (F32,), TRAINING, "compute"),
    ),
    second_order=True,
    chooses=True,
    special=("recompute", "dropout", "clamped"),
    cases=(
        *CASES,
        _ffn("clamped", 17, 33, 40, None, ("biases",), **CLAMPED, alpha=2.0, limit=0.7),
        _ffn("clampedrecompute", 5, 33, 40, None, (), **CLAMPED, recompute=True),
    ),
)

MLP = OpSpec(
    name="mlp",
    family="ffn",
    cuda="emulated",
    paper="Vaswani et al. 2017, arXiv 1706.03762",
    inputs=_ffn_inputs(False),
    differentiable=("x", "up_weight", "down_weight", "up_bias", "down_bias"),
    flops=_ffn_flops(1),
    benchmarks=(
        Benchmark(_ffn("gelu", 2048, 512, 2048), (F32,), TRAINING, "compute"),
        *(
            Benchmark(_ffn(name, 512, 512, 2048, activation=how), (F32,), TRAINING, "compute")
            for name, how in (("relu", "relu"), ("silu", "silu"), ("relu2", "relu_squared"))
        ),
    ),
    second_order=True,
    chooses=True,
    special=("recompute",),
    cases=CASES,
)

SPECS = (GLU_MLP, MLP)

VARIANTS = (
    Variant(
        "feed-forward layers: ReLU, GELU, SiLU, squared ReLU",
        ("mlp", "MLP"),
        "Vaswani et al. 2017, arXiv 1706.03762",
    ),
    Variant(
        "gated feed-forward layers (GLU family), fused",
        ("glu_mlp", "swiglu", "geglu", "reglu", "glu", "bilinear", "GatedMLP"),
        "Shazeer 2020, arXiv 2002.05202",
    ),
    Variant(
        "clamped SwiGLU (gpt-oss)",
        ("clamped_swiglu", "glu_mlp", "GatedMLP", "moe_experts"),
        "OpenAI 2025, arXiv 2508.10925",
    ),
)
