"""OpSpec of softpick attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.reference.precision import widen
from omniattn.testing.spec import Benchmark, Case, OpSpec, Random, Variant
from omniattn.testing.specs._cases import BF16, F32, TRAINING
from omniattn.testing.specs.attention._attention_cases import attention_flops, attention_inputs, qkv


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    others = tuple(name for name in case.tensors if name not in ("strong", "weak"))
    made = attention_inputs(replace(case, tensors=others), random)
    if "strong" in case.tensors:  # logits of up to 100: most weights are 0
        made["q"] = 30 * made["q"]
    if "weak" in case.tensors:  # logits near 0, where exp(z) - 1 cancels
        made["q"] = made["q"] / 1024
    return made


def _rounded_weights(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Rounds the weights to the dtype of the inputs, as kernels on 16-bit tiles do."""
    one = torch.eye(k.shape[1], dtype=v.dtype, device=v.device)
    values = one[None, :, None].expand(*k.shape[:3], -1)
    found = reference.softpick_attention(q, k, values, **options)
    weights, *others = found if isinstance(found, tuple) else (found,)
    of_heads = widen(v).repeat_interleave(q.shape[2] // max(k.shape[2], 1), 2)
    o = torch.einsum("bqhk,bkhd->bqhd", widen(weights), of_heads).to(q.dtype)
    return (o, *others) if others else o


SOFTPICK_ATTENTION = OpSpec(
    name="softpick_attention",
    family="attention",
    cuda="emulated",
    paper="Zuhri et al. 2025, arXiv 2504.20966",
    inputs=_inputs,
    differentiable=("q", "k", "v", "bias"),
    flops=attention_flops,
    eager=_rounded_weights,
    second_order=True,
    special=("strong", "weak"),
    cases=(
        qkv("tiny", 1, 5, 6, 2, 1, 3, return_lse=True),
        qkv("plain", 2, 65, 65, 4, 2, 32, causal=True),
        qkv("offset", 1, 130, 260, 2, 1, 16, 24, causal=True, return_lse=True),
        qkv("strong", 1, 130, 130, 2, 2, 16, None, ("strong",), return_lse=True),
        qkv("weak", 1, 130, 130, 2, 2, 16, None, ("weak",), return_lse=True),
        qkv("options", 2, 40, 70, 4, 4, 16, None, ("mask", "bias"), softcap=3.0, scale=0.4),
        qkv("window", 1, 70, 70, 2, 1, 16, causal=True, window_size=(20, 0)),
        qkv("dropout", 1, 70, 70, 2, 2, 16, None, ("seed",), dropout_p=0.2),
        qkv("one", 2, 1, 600, 4, 1, 16, return_lse=True),
        qkv("short", 1, 50, 33, 2, 2, 16, causal=True, return_lse=True),
        qkv("nokeys", 1, 5, 0, 2, 1, 8, return_lse=True),
    ),
    benchmarks=(
        Benchmark(
            qkv("model", 1, 2048, 2048, 8, 8, 64, causal=True), (F32, BF16), TRAINING, "compute"
        ),
    ),
)

SPECS = (SOFTPICK_ATTENTION,)

VARIANTS = (
    Variant(
        "softpick attention",
        ("softpick_attention", "Attention"),
        "Zuhri et al. 2025, arXiv 2504.20966",
    ),
)
