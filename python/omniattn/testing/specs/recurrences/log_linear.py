"""OpSpec of log-linear attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BOTH, F32, SWEEPS, boundaries

STATE = ("initial_state",)


def _case(
    label: str, B: int, T: int, H: int, K: int, V: int, tensors: tuple[str, ...] = (), **more: Any
) -> Case:
    """Makes a case; Hv is the number of value heads, N that of packed sequences."""
    sizes = {"B": B, "T": T, "H": H, "Hv": more.pop("Hv", H), "K": K, "V": V}
    return Case(label, sizes | more, tensors)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, hv, k, v = (case.sizes[name] for name in ("B", "T", "H", "Hv", "K", "V"))
    n, levels = case.sizes.get("N", b), (2 * t + 16).bit_length() + 1
    strength = 100 if case.label == "strong" else 1
    made = {
        "q": random.normal(b, t, h, k),
        "k": random.normal(b, t, h, k),
        "v": random.normal(b, t, hv, v),
        "g": strength * nnf.logsigmoid(3 + 2 * random.normal(b, t, hv)),
        "level_scales": random.normal(b, t, hv, levels).sigmoid(),
    }
    if "cu_seqlens" in case.tensors:
        made["cu_seqlens"] = boundaries(n, t, random)
    if "initial_state" in case.tensors:
        made["initial_state"] = random.normal(n, hv, levels, k, v)
        made["position"] = (
            torch.full((n,), 5) if "cu_seqlens" not in case.tensors else 3 + (random.integers(9, n))
        )
    return made


def _flops(case: Case, pass_: Pass) -> float:
    """Counts products inside chunks of 64, and half a product with a state for each level above."""
    s = case.sizes
    above = max(0, (max(1, s["T"] - 1) // 64).bit_length())
    products = min(64, s["T"]) * (s["K"] + s["V"]) / 2 + (1 + above / 2) * s["K"] * s["V"]
    return 2.0 * s["B"] * s["T"] * s["Hv"] * products * SWEEPS[pass_]


SPECS = (
    OpSpec(
        name="log_linear_attention",
        family="log-linear attention",
        cuda="emulated",
        paper="Guo et al. 2025, arXiv 2506.04761",
        inputs=_inputs,
        differentiable=("q", "k", "v", "g", "level_scales", "initial_state"),
        flops=_flops,
        second_order=True,
        special=("packed",),
        cases=(
            _case("tiny", 2, 3, 1, 3, 2, STATE),
            _case("grouped", 2, 21, 2, 8, 6, STATE, Hv=4),
            _case("packed", 1, 40, 2, 8, 6, ("initial_state", "cu_seqlens"), N=4),
            _case("strong", 1, 40, 2, 8, 6),
            _case("chunks", 1, 133, 2, 8, 6, STATE),
            _case("step", 2, 1, 2, 8, 6, STATE),
            _case("nosteps", 2, 0, 2, 4, 3, STATE),
        ),
        benchmarks=(Benchmark(_case("head64", 1, 4096, 8, 64, 64), (F32,), BOTH, "compute"),),
    ),
)

VARIANTS = (
    Variant(
        "log-linear attention: a state for each power of two of past tokens",
        ("log_linear_attention", "LogLinearMamba2"),
        "Guo et al. 2025, arXiv 2506.04761",
    ),
)
