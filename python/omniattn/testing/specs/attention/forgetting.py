"""OpSpec of forgetting attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import F32, TRAINING
from omniattn.testing.specs.attention._attention_cases import attention_flops, attention_inputs, qkv
from omniattn.testing.specs.attention.attention import GRADIENT_FACTOR

#: Mean of the gates' logits: weak gates keep most, strong ones 1e-9 of what they meet.
_MEANS = {"weak": 3.0, "strong": -20.0}


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    kinds = [name for name in case.tensors if name in _MEANS]
    others = tuple(name for name in case.tensors if name not in _MEANS)
    made = attention_inputs(replace(case, tensors=others), random)
    logits = random.normal(case.sizes["B"], case.sizes["Tk"], case.sizes["H"])
    mean = _MEANS[kinds[0]] if kinds else 0.0
    return made | {"log_f": torch.nn.functional.logsigmoid(2 * logits + mean)}


def _flops(case: Case, pass_: Pass) -> float:
    return attention_flops(replace(case, options={"causal": True}), pass_)


FORGETTING_ATTENTION = OpSpec(
    name="forgetting_attention",
    family="attention",
    cuda="emulated",
    paper="Lin et al. 2025, arXiv 2503.02130",
    inputs=_inputs,
    differentiable=("q", "k", "v", "log_f"),
    flops=_flops,
    gradient_factor=GRADIENT_FACTOR,
    # The gradient of a gate sums the error of O's rounding over all queries after it and all keys
    # before it.
    gradient_factors={"log_f": 20.0},
    second_order=True,
    special=("strong",),
    cases=(
        qkv("tiny", 1, 5, 6, 2, 1, 3),
        qkv("plain", 2, 65, 65, 4, 2, 32),
        qkv("strong", 1, 130, 130, 2, 2, 16, 24, ("strong",)),
        qkv("options", 2, 40, 70, 4, 4, 16, None, ("weak", "mask"), softcap=3.0, scale=0.4),
        qkv("window", 1, 70, 70, 2, 1, 16, None, ("weak",), window_size=(20, 0)),
        qkv("dropout", 1, 70, 70, 2, 2, 16, None, ("seed",), dropout_p=0.2),
        qkv("one", 2, 1, 40, 4, 1, 16, None, ("weak",)),
        qkv("short", 1, 50, 33, 2, 2, 16),
        qkv("nokeys", 1, 5, 0, 2, 1, 8),
    ),
    benchmarks=(
        Benchmark(
            qkv("model", 1, 2048, 2048, 8, 8, 64, None, ("weak",)), (F32,), TRAINING, "compute"
        ),
    ),
)

SPECS = (FORGETTING_ATTENTION,)

VARIANTS = (
    Variant(
        "forgetting attention (FoX): gates between key and query",
        ("forgetting_attention", "Attention"),
        "Lin et al. 2025, arXiv 2503.02130",
    ),
)
