"""OpSpec of wall attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import F32, TRAINING, boundaries
from omniattn.testing.specs.attention._attention_cases import attention_flops, attention_inputs, qkv
from omniattn.testing.specs.attention.attention import GRADIENT_FACTOR


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    others = tuple(name for name in case.tensors if name == "sinks")
    made = attention_inputs(replace(case, tensors=others), random)
    b, tq, tk, h, d = (case.sizes[k] for k in ("B", "Tq", "Tk", "H", "D"))
    mean = -20.0 if "strong" in case.tensors else 3.0
    made["g"] = torch.nn.functional.logsigmoid(2 * random.normal(b, tq, h, d) + mean)
    if "scalar" in case.tensors:
        made["g_scalar"] = torch.nn.functional.logsigmoid(2 * random.normal(b, tk, h) + mean)
    if "packed" in case.tensors:
        made["cu_seqlens"] = boundaries(3, tq, random)
    return made


def _flops(case: Case, pass_: Pass) -> float:
    return attention_flops(replace(case, options={"causal": True}), pass_)


WALL_ATTENTION = OpSpec(
    name="wall_attention",
    family="attention",
    cuda="emulated",
    paper="Averbuch and Pai 2026, https://blog.tilderesearch.com/blog/wall-attn",
    batch_invariant=False,
    inputs=_inputs,
    differentiable=("q", "k", "v", "g", "g_scalar", "sinks"),
    flops=_flops,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    special=("blocks",),
    cases=(
        qkv("tiny", 1, 5, 6, 2, 2, 3, None, ("scalar", "sinks"), return_keys=True),
        qkv("plain", 2, 9, 9, 4, 2, 8),
        qkv("blocks", 1, 45, 50, 2, 2, 8, 4, ("strong", "scalar"), return_keys=True),
        qkv("packed", 1, 40, 40, 2, 1, 8, None, ("packed", "scalar"), scale=0.4),
        qkv("one", 2, 1, 20, 4, 4, 8, return_keys=True),
    ),
    benchmarks=(Benchmark(qkv("model", 1, 2048, 2048, 8, 8, 64), (F32,), TRAINING, "compute"),),
)

SPECS = (WALL_ATTENTION,)

VARIANTS = (
    Variant(
        "wall attention: decays of channels between key and query",
        ("wall_attention", "WallAttention"),
        "Averbuch and Pai 2026, https://blog.tilderesearch.com/blog/wall-attn",
    ),
)
