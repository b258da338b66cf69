"""OpSpec of selective attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import F32, TRAINING
from omniattn.testing.specs.attention.attention import (
    GRADIENT_FACTOR,
    attention_flops,
    attention_inputs,
    qkv,
)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    others = tuple(name for name in case.tensors if name != "penalty")
    made = attention_inputs(replace(case, tensors=others), random)
    if "penalty" in case.tensors:
        wide = torch.promote_types(random.dtype, torch.float32)
        made["penalty"] = random.uniform(case.sizes["B"], case.sizes["Tk"]).to(wide)
    return made


def _flops(case: Case, pass_: Pass) -> float:
    """Counts the FLOPs of causal attention, and the products q k of head 0 a second time."""
    causal = replace(case, options={"causal": True})
    return attention_flops(causal, pass_) * (1 + 0.5 / case.sizes["H"])


SELECTIVE_ATTENTION = OpSpec(
    name="selective_attention",
    family="attention",
    cuda="emulated",
    paper="Leviathan et al. 2024, arXiv 2410.02703",
    inputs=_inputs,
    differentiable=("q", "k", "v", "penalty", "sinks", "head_scale"),
    flops=_flops,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    special=("parts",),
    cases=(
        qkv("tiny", 1, 4, 5, 2, 1, 3, None, ("penalty",), return_penalty=True),
        qkv("plain", 2, 65, 65, 4, 2, 32),
        qkv("parts", 1, 520, 600, 2, 1, 16, 24, ("penalty",), return_penalty=True),
        qkv("terms", 2, 40, 70, 4, 4, 16, None, ("sinks", "head scale"), softcap=3.0, scale=0.4),
        qkv("dropout", 1, 70, 70, 2, 2, 16, None, ("seed",), dropout_p=0.2),
        qkv("one", 2, 1, 40, 4, 1, 16, None, ("penalty",), return_penalty=True),
        qkv("short", 1, 9, 4, 2, 1, 8),
        qkv("nokeys", 1, 5, 0, 2, 1, 8),
    ),
    benchmarks=(Benchmark(qkv("model", 1, 2048, 2048, 8, 8, 64), (F32,), TRAINING, "compute"),),
)

SPECS = (SELECTIVE_ATTENTION,)

VARIANTS = (
    Variant(
        "selective attention",
        ("selective_attention", "SelectiveAttention"),
        "Leviathan et al. 2024, arXiv 2410.02703",
    ),
)
