"""OpSpec of Parallax."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from omniattn.functional import masks
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import F32, TRAINING, boundaries
from omniattn.testing.specs.attention._attention_cases import attention_inputs, qkv

_PAPER = "Zuo et al. 2026, arXiv 2605.29157"


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = attention_inputs(replace(case, tensors=()), random)
    made["r"] = random.normal(*made["q"].shape) * made["q"].shape[3] ** -0.5
    if "packed" in case.tensors:
        made["cu_seqlens"] = boundaries(3, case.sizes["Tq"], random)
    return made


def _flops(case: Case, pass_: Pass) -> float:
    """Counts 2 FLOP per visible (query, key) and feature, with 3 GEMMs forward and 8 backward."""
    s = case.sizes
    left, right = case.options.get("window_size", (-1, -1))
    mask = masks.SlidingWindow(left, 0 if case.options.get("causal", True) else right)
    pairs = mask.count(s["Tq"], s["Tk"], batch=s["B"], heads=s["H"])
    d, dv = s["D"], s.get("Dv", s["D"])
    forward, backward = 2.0 * (2 * d + dv), 2.0 * (6 * d + 2 * dv)
    per_pair = {"forward": forward, "backward": backward, "forward+backward": forward + backward}
    return pairs * per_pair[pass_]


PARALLAX_ATTENTION = OpSpec(
    name="parallax_attention",
    family="attention",
    cuda="emulated",
    paper=_PAPER,
    inputs=_inputs,
    differentiable=("q", "r", "k", "v"),
    flops=_flops,
    second_order=True,
    cases=(
        qkv("tiny", 1, 5, 6, 2, 1, 3),
        qkv("plain", 2, 65, 65, 4, 2, 32),
        qkv("full", 1, 40, 70, 2, 2, 16, 24, causal=False, scale=0.4),
        qkv("window", 2, 33, 75, 2, 1, 8, window_size=(6, 0)),
        qkv("sides", 1, 40, 35, 2, 2, 8, causal=False, window_size=(4, 3)),
        qkv("packed", 1, 40, 40, 2, 1, 8, None, ("packed",), window_size=(9, 0)),
        qkv("one", 2, 1, 600, 4, 1, 16),
        qkv("short", 1, 50, 33, 2, 2, 16),
        qkv("nokeys", 1, 5, 0, 2, 1, 8),
    ),
    benchmarks=(Benchmark(qkv("model", 1, 2048, 2048, 8, 8, 64), (F32,), TRAINING, "compute"),),
)

SPECS = (PARALLAX_ATTENTION,)

VARIANTS = (
    Variant(
        "Parallax: attention minus a covariance times a second query",
        ("parallax_attention", "ParallaxAttention"),
        _PAPER,
    ),
)
