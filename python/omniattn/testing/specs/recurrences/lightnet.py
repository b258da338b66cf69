"""OpSpec of LightNet's attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, BOTH, F32, SWEEPS, boundaries, flat_state

STATE = ("S", "n", "m")


def _case(
    label: str, B: int, T: int, H: int, K: int, V: int, tensors: tuple[str, ...] = (), **more: Any
) -> Case:
    """Makes a case; Hv is the number of value heads, N that of packed sequences."""
    counts = {name: more.pop(name) for name in ("N",) if name in more}
    sizes = {"B": B, "T": T, "H": H, "Hv": more.pop("Hv", H), "K": K, "V": V}
    return Case(label, sizes | counts, tensors, more)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes inputs; in the case "strong" logits span a large range."""
    b, t, h, hv, k, v = (case.sizes[name] for name in ("B", "T", "H", "Hv", "K", "V"))
    n = case.sizes.get("N", b)
    made = {
        "q": random.normal(b, t, h, k),
        "k": random.normal(b, t, h, k) * (100 if case.label == "strong" else 1),
        "v": random.normal(b, t, hv, v),
    }
    if "cu_seqlens" in case.tensors:
        made["cu_seqlens"] = boundaries(n, t, random)
    if "S" in case.tensors:
        made["S"] = random.normal(n, hv, k, v)
        made["n"] = 1 + random.normal(n, h, k).abs()
        made["m"] = random.normal(n, h, k)
    return made


def _means(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps lightnet_attention to take sums one by one, and to return what m does not change."""
    flat = flat_state(*STATE)(function)

    @functools.wraps(flat)
    def run(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        o, sums, n, m = flat(*args, **options)
        total = n.repeat_interleave(sums.shape[1] // max(1, n.shape[1]), 1)
        return o, sums / total[..., None], n.log() + m

    return run


def _flops(case: Case, pass_: Pass) -> float:
    s = case.sizes
    return 4.0 * s["B"] * s["T"] * s["Hv"] * s["K"] * s["V"] * SWEEPS[pass_]


SPECS = (
    OpSpec(
        name="lightnet_attention",
        family="slot attention",
        cuda="emulated",
        paper="Qin et al. 2024, arXiv 2405.21022",
        inputs=_inputs,
        differentiable=("q", "k", "v", "S", "n"),
        flops=_flops,
        second_order=True,
        special=("packed",),
        adapt=_means,
        cases=(
            _case("tiny", 2, 3, 1, 3, 2, STATE),
            _case("grouped", 2, 21, 2, 8, 6, STATE, Hv=4, scale=0.7),
            _case("packed", 1, 40, 2, 8, 6, (*STATE, "cu_seqlens"), N=4),
            _case("strong", 1, 40, 2, 8, 6),
            _case("step", 2, 1, 2, 8, 6, STATE),
            _case("nosteps", 2, 0, 2, 4, 3, STATE),
        ),
        benchmarks=(Benchmark(_case("head64", 1, 2048, 8, 64, 64), (F32, BF16), BOTH, "compute"),),
    ),
)

VARIANTS = (
    Variant(
        "Rodimus: decays with a temperature",
        ("gated_linear_attention", "Rodimus"),
        "He et al. 2024, arXiv 2410.06577",
    ),
    Variant(
        "LightNet: keys are a softmax over the tokens so far",
        ("lightnet_attention", "LightNet"),
        "Qin et al. 2024, arXiv 2405.21022",
    ),
)
