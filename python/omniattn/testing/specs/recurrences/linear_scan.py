"""OpSpec of the linear scan."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as nnf

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, BOTH, F32, FORWARD, SWEEPS, boundaries

STATE = ("initial_state",)
PACKED = ("initial_state", "cu_seqlens")


def _case(label: str, B: int, T: int, C: int, tensors: tuple[str, ...] = (), **sizes: int) -> Case:
    return Case(label, {"B": B, "T": T, "C": C} | sizes, tensors)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes inputs; in the case "strong" many decays are 0."""
    b, t, c = (case.sizes[letter] for letter in "BTC")
    strength = 100 if case.label == "strong" else 1
    tensors = {
        "x": random.normal(b, t, c),
        "g": strength * nnf.logsigmoid(2 + 2 * random.normal(b, t, c)),
    }
    n = case.sizes.get("N", b)
    if "cu_seqlens" in case.tensors:
        tensors["cu_seqlens"] = boundaries(n, t, random)
    if "initial_state" in case.tensors:
        tensors["initial_state"] = random.normal(n, c)
    return tensors


def _flops(case: Case, pass_: Pass) -> float:
    return 2.0 * SWEEPS[pass_] * case.sizes["B"] * case.sizes["T"] * case.sizes["C"]


SPECS = (
    OpSpec(
        name="linear_scan",
        family="scan",
        cuda="emulated",
        paper="Qin et al. 2023, arXiv 2311.04823",
        inputs=_inputs,
        differentiable=("x", "g", "initial_state"),
        flops=_flops,
        second_order=True,
        special=("packed",),
        cases=(
            _case("tiny", 2, 3, 3, STATE),
            _case("plain", 2, 33, 67),
            _case("packed", 1, 70, 9, PACKED, N=5),
            _case("strong", 1, 40, 5, STATE),
            _case("step", 3, 1, 40, STATE),
            _case("nosteps", 2, 0, 4, STATE),
            _case("nobatch", 0, 5, 4),
            _case("nochannels", 2, 5, 0, STATE),
        ),
        benchmarks=(
            Benchmark(_case("model", 1, 2048, 1024), (F32, BF16), BOTH, "memory"),
            Benchmark(_case("batch", 8, 512, 1024), (F32,), BOTH, "memory"),
            Benchmark(_case("step", 8, 1, 1024, STATE), (F32,), FORWARD),
        ),
    ),
)

VARIANTS = (
    Variant(
        "HGRN: forget gates of channels",
        ("linear_scan", "HGRN"),
        "Qin et al. 2023, arXiv 2311.04823",
    ),
)
