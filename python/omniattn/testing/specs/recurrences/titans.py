"""OpSpec of Titans' linear memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BOTH, F32, FORWARD, SWEEPS, boundaries, flat_state

STATE = ("M", "S", "N0")
NORM = ("w", "b")


def _case(
    label: str, B: int, T: int, H: int, K: int, V: int, tensors: tuple[str, ...] = (), **more: Any
) -> Case:
    """Makes a case; N is the number of packed sequences."""
    counts = {"N": more.pop("N")} if "N" in more else {}
    return Case(label, {"B": B, "T": T, "H": H, "K": K, "V": V} | counts, tensors, more)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, k, v = (case.sizes[name] for name in "BTHKV")
    n = case.sizes.get("N", b)
    made = {
        "q": random.normal(b, t, h, k),
        "k": nnf.normalize(random.normal(b, t, h, k), dim=-1),
        "v": random.normal(b, t, h, v),
        "theta": random.normal(b, t, h).sigmoid() / 8,
    }
    for name in ("alpha", "eta"):
        if name in case.tensors:
            made[name] = random.normal(b, t, h).sigmoid()
    if "w" in case.tensors:
        made |= {"w": 1 + random.normal(h, v) / 8, "b": random.normal(h, v) / 8}
    if "cu_seqlens" in case.tensors:
        made["cu_seqlens"] = boundaries(n, t, random)
    if "M" in case.tensors:
        made |= {name: random.normal(n, h, k, v) for name in STATE}
        packed = "cu_seqlens" in case.tensors
        made["position"] = random.integers(9, n) if packed else torch.full((n,), 3)
    return made


def _flops(case: Case, pass_: Pass) -> float:
    """Counts five products with states, and those of tokens in mini-batches."""
    s = case.sizes
    size = case.options.get("mini_batch_size", 16)
    tokens = s["B"] * s["T"] * s["H"]
    return 2.0 * tokens * (5 * s["K"] * s["V"] + size * (s["K"] + s["V"])) * SWEEPS[pass_]


SPECS = (
    OpSpec(
        name="titans_linear",
        family="test-time training",
        cuda="emulated",
        paper="Behrouz et al. 2025, arXiv 2501.00663",
        inputs=_inputs,
        differentiable=("q", "k", "v", "theta", "alpha", "eta", *NORM, *STATE),
        flops=_flops,
        second_order=True,
        special=("packed",),
        adapt=flat_state(*STATE),
        cases=(
            _case("tiny", 2, 3, 1, 4, 3, ("alpha", "eta", *STATE), mini_batch_size=2),
            _case("plain", 2, 33, 2, 8, 6, ("alpha", "eta")),
            _case("norm", 2, 32, 2, 8, 8, ("alpha", "eta", *NORM), scale=0.5),
            _case(
                "packed",
                1,
                30,
                2,
                8,
                6,
                ("alpha", "eta", "cu_seqlens", *STATE),
                N=4,
                mini_batch_size=4,
            ),
            _case("each", 1, 9, 2, 8, 6, ("eta",), mini_batch_size=1),
            _case("step", 2, 1, 2, 8, 6, ("alpha", "eta", *STATE), mini_batch_size=4),
            _case("nosteps", 2, 0, 2, 4, 3, ("alpha", *STATE)),
        ),
        benchmarks=(
            Benchmark(
                _case("head64", 1, 2048, 8, 64, 64, ("alpha", "eta", *NORM)),
                (F32,),
                BOTH,
                "compute",
            ),
            Benchmark(
                _case("step", 8, 1, 8, 64, 64, ("alpha", "eta", *NORM, *STATE)), (F32,), FORWARD
            ),
        ),
    ),
)

VARIANTS = (
    Variant(
        "Titans: a linear memory that learns by descent with momentum and forgetting",
        ("titans_linear", "TitansLinear"),
        "Behrouz et al. 2025, arXiv 2501.00663",
    ),
)
