"""OpSpec of attention with the weights of sparsemax and entmax."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Random, Variant
from omniattn.testing.specs._cases import F32, TRAINING, boundaries
from omniattn.testing.specs.attention._attention_cases import attention_flops, attention_inputs, qkv

_PAPER = "Martins and Astudillo 2016, arXiv 1602.02068; Peters et al. 2019, arXiv 1905.05702"


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = attention_inputs(replace(case, tensors=()), random)
    if "strong" in case.tensors:  # logits of up to 100: one key takes all
        made["q"] = 30 * made["q"]
    if "packed" in case.tensors:
        made["cu_seqlens"] = boundaries(3, case.sizes["Tq"], random)
    return made


SPARSEMAX_ATTENTION = OpSpec(
    name="sparsemax_attention",
    family="attention",
    cuda="emulated",
    paper=_PAPER,
    inputs=_inputs,
    differentiable=("q", "k", "v"),
    flops=attention_flops,
    second_order=True,
    special=("strong",),
    cases=(
        qkv("tiny", 1, 5, 6, 2, 1, 3),
        qkv("plain", 2, 65, 65, 4, 2, 32, causal=True),
        qkv("entmax", 1, 70, 130, 2, 1, 16, 24, causal=True, alpha=1.5, scale=0.4),
        qkv("between", 1, 33, 40, 2, 2, 8, alpha=1.25),
        qkv("strong", 1, 130, 130, 2, 2, 16, None, ("strong",)),
        qkv("packed", 1, 40, 40, 2, 1, 8, None, ("packed",), causal=True, alpha=1.5),
        qkv("one", 2, 1, 600, 4, 1, 16),
        qkv("short", 1, 50, 33, 2, 2, 16, causal=True),
        qkv("nokeys", 1, 5, 0, 2, 1, 8),
    ),
    benchmarks=(
        Benchmark(qkv("model", 1, 2048, 2048, 8, 8, 64, causal=True), (F32,), TRAINING, "compute"),
    ),
)

SPECS = (SPARSEMAX_ATTENTION,)

VARIANTS = (Variant("sparsemax and entmax attention", ("sparsemax_attention",), _PAPER),)
