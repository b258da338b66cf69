"""OpSpec of stick-breaking attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.reference.precision import widen
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, F32, TRAINING
from omniattn.testing.specs.attention._attention_cases import attention_flops, attention_inputs, qkv


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    others = tuple(name for name in case.tensors if name != "strong")
    made = attention_inputs(replace(case, tensors=others), random)
    if "strong" in case.tensors:  # logits of up to 100: most keys take all or nothing
        return made | {"q": 30 * made["q"]}
    # With logits around 0 most keys would take nothing, as each one before them takes a half.
    return made | {"q": made["q"] + 1, "k": made["k"] - 1}


def _rounded_weights(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Rounds the weights to the dtype of the inputs, as kernels on 16-bit tiles do.

    The largest weight of a row, which is 1 in a softmax, is rounded, too."""
    one = torch.eye(k.shape[1], dtype=v.dtype, device=v.device)
    values = one[None, :, None].expand(*k.shape[:3], -1)
    found = reference.stick_breaking_attention(q, k, values, **options)
    weights, *others = found if isinstance(found, tuple) else (found,)
    of_heads = widen(v).repeat_interleave(q.shape[2] // max(k.shape[2], 1), 2)
    o = torch.einsum("bqhk,bkhd->bqhd", widen(weights), of_heads).to(q.dtype)
    return (o, *others) if others else o


def _flops(case: Case, pass_: Pass) -> float:
    return attention_flops(replace(case, options={"causal": True}), pass_)


STICK_BREAKING_ATTENTION = OpSpec(
    name="stick_breaking_attention",
    family="attention",
    cuda="emulated",
    paper="Tan et al. 2024, arXiv 2410.17980",
    inputs=_inputs,
    differentiable=("q", "k", "v"),
    flops=_flops,
    eager=_rounded_weights,
    second_order=True,
    special=("strong",),
    cases=(
        qkv("tiny", 1, 5, 6, 2, 1, 3, return_remainder=True),
        qkv("plain", 2, 65, 65, 4, 2, 32),
        qkv("current", 1, 130, 260, 2, 1, 16, 24, attend_current=True, return_remainder=True),
        qkv("strong", 1, 130, 130, 2, 2, 16, None, ("strong",)),
        qkv("options", 2, 40, 70, 4, 4, 16, None, ("mask",), softcap=3.0, scale=0.4),
        qkv("window", 1, 70, 70, 2, 1, 16, window_size=(20, 0)),
        qkv("dropout", 1, 70, 70, 2, 2, 16, None, ("seed",), dropout_p=0.2),
        qkv("one", 2, 1, 600, 4, 1, 16, return_remainder=True),
        qkv("short", 1, 50, 33, 2, 2, 16, return_remainder=True),
        qkv("nokeys", 1, 5, 0, 2, 1, 8, return_remainder=True),
    ),
    benchmarks=(
        Benchmark(qkv("model", 1, 2048, 2048, 8, 8, 64), (F32, BF16), TRAINING, "compute"),
    ),
)

SPECS = (STICK_BREAKING_ATTENTION,)

VARIANTS = (
    Variant(
        "stick-breaking attention",
        ("stick_breaking_attention", "Attention"),
        "Tan et al. 2024, arXiv 2410.17980",
    ),
)
