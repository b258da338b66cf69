"""OpSpec of DeltaFormer's attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BOTH, F32, SWEEPS, boundaries


def _case(
    label: str, B: int, T: int, H: int, K: int, V: int, tensors: tuple[str, ...] = (), **more: Any
) -> Case:
    """Makes a case; P is the number of earlier tokens, N that of packed sequences."""
    counts = {name: more.pop(name) for name in ("P", "N") if name in more}
    return Case(label, {"B": B, "T": T, "H": H, "K": K, "V": V} | counts, tensors, more)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, k, v = (case.sizes[name] for name in ("B", "T", "H", "K", "V"))
    past = case.sizes.get("P", 0)
    made = {
        "q": random.normal(b, t, h, k),
        "k": random.normal(b, past + t, h, k),
        "v": random.normal(b, t, h, v),
    }
    if "beta" in case.tensors:
        made["beta"] = random.normal(b, t, h).sigmoid()
    if "past" in case.tensors:
        made["past"] = random.normal(b, past, h, v)
    if "cu_seqlens" in case.tensors:
        made["cu_seqlens"] = boundaries(case.sizes["N"], t, random)
    return made


def _flops(case: Case, pass_: Pass) -> float:
    s = case.sizes
    pairs = s["T"] * (s["T"] + 1) / 2 + s["T"] * s.get("P", 0)
    return 2.0 * s["B"] * s["H"] * pairs * (s["K"] + s["V"]) * (1 + 1.5 * (SWEEPS[pass_] - 1))


SPECS = (
    OpSpec(
        name="deltaformer_attention",
        family="DeltaFormer",
        cuda="emulated",
        paper="Zhong et al. 2025, arXiv 2505.19488",
        batch_invariant=False,
        inputs=_inputs,
        differentiable=("q", "k", "v", "beta", "past"),
        flops=_flops,
        second_order=True,
        special=("packed",),
        cases=(
            _case("tiny", 2, 3, 1, 3, 2, ("beta", "past"), P=2),
            _case("plain", 1, 17, 2, 8, 6, scale=0.7),
            _case("packed", 1, 20, 2, 8, 6, ("beta", "cu_seqlens"), N=3),
            _case("step", 2, 1, 2, 8, 6, ("beta", "past"), P=9),
            _case("nosteps", 2, 0, 2, 4, 3, ("beta", "past"), P=2),
        ),
        benchmarks=(
            Benchmark(_case("head64", 1, 2048, 8, 64, 64, ("beta",)), (F32,), BOTH, "compute"),
        ),
    ),
)

VARIANTS = (
    Variant(
        "DeltaFormer: values less what attention to earlier ones reads",
        ("deltaformer_attention", "DeltaFormerAttention"),
        "Zhong et al. 2025, arXiv 2505.19488",
    ),
)
