"""OpSpec of multi-token attention."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Random, Variant
from omniattn.testing.specs._cases import F32, TRAINING
from omniattn.testing.specs.attention._attention_cases import attention_flops, attention_inputs, qkv
from omniattn.testing.specs.attention.attention import GRADIENT_FACTOR

_PAPER = "Golovneva et al. 2025, arXiv 2504.00927"


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = attention_inputs(replace(case, tensors=()), random)
    heads, rows, width = case.sizes["H"], case.sizes.get("cq", 3), case.sizes.get("ck", 5)
    made["weight"] = random.normal(heads, rows, width) * (rows * width) ** -0.5
    if "C" in case.sizes:
        size = case.sizes["C"]
        made["head_weight"] = random.normal(heads // size, size, size) * size**-0.5
    return made


def _case(case: Case, **sizes: int) -> Case:
    return replace(case, sizes={**case.sizes, **sizes})


MULTI_TOKEN_ATTENTION = OpSpec(
    name="multi_token_attention",
    family="attention",
    cuda="emulated",
    paper=_PAPER,
    inputs=_inputs,
    differentiable=("q", "k", "v", "weight", "head_weight"),
    flops=attention_flops,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    cases=(
        _case(qkv("tiny", 1, 5, 6, 2, 1, 3), C=2, cq=2, ck=3),
        _case(qkv("plain", 2, 65, 65, 4, 2, 32), C=2),
        qkv("full", 1, 40, 70, 2, 2, 16, 24, causal=False, scale=0.4),
        _case(qkv("lead", 1, 7, 50, 4, 1, 8, lead=2), C=4),
        _case(qkv("wide", 1, 75, 75, 2, 2, 8), cq=6, ck=11),
        _case(qkv("tiles", 1, 40, 150, 2, 1, 8), cq=6, ck=11, C=2),
        qkv("short", 1, 50, 33, 2, 2, 16),
        qkv("nokeys", 1, 5, 0, 2, 1, 8),
    ),
    benchmarks=(
        Benchmark(
            _case(qkv("model", 1, 1024, 1024, 8, 8, 64), cq=6, ck=11, C=2),
            (F32,),
            TRAINING,
            "compute",
        ),
    ),
)

SPECS = (MULTI_TOKEN_ATTENTION,)

VARIANTS = (
    Variant(
        "multi-token attention: logits convolved over queries and keys, heads mixed",
        ("multi_token_attention", "MultiTokenAttention", "QueryCache"),
        _PAPER,
    ),
)
