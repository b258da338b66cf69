"""OpSpec of path attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import F32, TRAINING, boundaries
from omniattn.testing.specs.attention._attention_cases import attention_flops, attention_inputs, qkv
from omniattn.testing.specs.attention.attention import GRADIENT_FACTOR

#: Mean of the gates' logits: weak gates keep most, strong ones 1e-9 of what they meet.
_MEANS = {"weak": 3.0, "strong": -20.0}


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = attention_inputs(replace(case, tensors=()), random)
    b, tq, tk, h, g, d = (case.sizes[k] for k in ("B", "Tq", "Tk", "H", "G", "D"))
    made["w"] = torch.nn.functional.normalize(random.normal(b, tq, g, d), dim=-1)
    made["beta"] = (2 * random.uniform(b, tq, g)).to(random.dtype)
    for name, mean in _MEANS.items():
        if name in case.tensors:
            made["g"] = torch.nn.functional.logsigmoid(2 * random.normal(b, tk, h) + mean)
    if "packed" in case.tensors:
        made["cu_seqlens"] = boundaries(3, tq, random)
    return made


def _flops(case: Case, pass_: Pass) -> float:
    return attention_flops(replace(case, options={"causal": True}), pass_)


PATH_ATTENTION = OpSpec(
    name="path_attention",
    family="attention",
    cuda="emulated",
    paper="Yang et al. 2025, arXiv 2505.16381",
    batch_invariant=False,
    inputs=_inputs,
    differentiable=("q", "k", "v", "w", "beta", "g"),
    flops=_flops,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    special=("blocks",),
    cases=(
        qkv("tiny", 1, 5, 6, 2, 1, 3, None, ("weak",), return_keys=True),
        qkv("plain", 2, 9, 9, 4, 2, 8),
        qkv("blocks", 1, 150, 160, 2, 1, 8, 4, ("strong",), return_keys=True),
        qkv("packed", 1, 140, 140, 2, 2, 8, None, ("packed", "weak"), scale=0.4),
        qkv("one", 2, 1, 20, 4, 1, 8, return_keys=True),
    ),
    benchmarks=(Benchmark(qkv("model", 1, 2048, 2048, 8, 8, 64), (F32,), TRAINING, "compute"),),
)

SPECS = (PATH_ATTENTION,)

VARIANTS = (
    Variant(
        "PaTH attention: products of reflections between key and query",
        ("path_attention", "PaTHAttention"),
        "Yang et al. 2025, arXiv 2505.16381",
    ),
)
