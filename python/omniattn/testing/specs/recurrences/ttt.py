"""OpSpec of TTT-Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BOTH, F32, FORWARD, SWEEPS, boundaries, flat_state

STATE = ("W", "B0", "G", "g0")


def _case(
    label: str, B: int, T: int, H: int, D: int, tensors: tuple[str, ...] = (), **more: Any
) -> Case:
    """Makes a case; N is the number of packed sequences."""
    counts = {"N": more.pop("N")} if "N" in more else {}
    return Case(label, {"B": B, "T": T, "H": H, "D": D} | counts, tensors, more)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes biases of size 1, as the norm of small predictions is ill-conditioned."""
    b, t, h, d = (case.sizes[name] for name in "BTHD")
    n = case.sizes.get("N", b)
    made = {
        "q": random.normal(b, t, h, d),
        "k": nnf.normalize(random.normal(b, t, h, d), dim=-1),
        "v": random.normal(b, t, h, d),
        "w": 1 + random.normal(h, d) / 8,
        "b": random.normal(h, d) / 8,
        "eta": random.normal(b, t, h).sigmoid() / 8,
    }
    if "lr" in case.tensors:
        made["lr"] = random.normal(b, t, h).sigmoid()
    if "cu_seqlens" in case.tensors:
        made["cu_seqlens"] = boundaries(n, t, random)
    if "W" in case.tensors:
        made |= {name: random.normal(n, h, d, d) / 4 for name in ("W", "G")}
        made |= {name: random.normal(n, h, d) for name in ("B0", "g0")}
        packed = "cu_seqlens" in case.tensors
        made["position"] = random.integers(9, n) if packed else torch.full((n,), 3)
    return made


def _flops(case: Case, pass_: Pass) -> float:
    """Counts three products with W, and those of queries, keys and gradients in mini-batches."""
    s = case.sizes
    size = case.options.get("mini_batch_size", 16)
    return 2.0 * s["B"] * s["T"] * s["H"] * s["D"] * (3 * s["D"] + 2 * size) * SWEEPS[pass_]


SPECS = (
    OpSpec(
        name="ttt_linear",
        family="test-time training",
        cuda="emulated",
        paper="Sun et al. 2024, arXiv 2407.04620",
        inputs=_inputs,
        differentiable=("q", "k", "v", "w", "b", "eta", "lr", *STATE),
        flops=_flops,
        second_order=True,
        special=("packed",),
        adapt=flat_state(*STATE),
        cases=(
            _case("tiny", 2, 3, 1, 4, STATE, mini_batch_size=2),
            _case("plain", 2, 33, 2, 8),
            _case("whole", 2, 32, 2, 8),
            _case("packed", 1, 30, 2, 8, ("lr", "cu_seqlens", *STATE), N=4, mini_batch_size=4),
            _case("query", 1, 20, 2, 8, ("lr",), scale=1.0, residual="query", mini_batch_size=5),
            _case("step", 2, 1, 2, 8, ("lr", *STATE), mini_batch_size=4),
            _case("nosteps", 2, 0, 2, 4, STATE),
        ),
        benchmarks=(
            Benchmark(_case("head64", 1, 2048, 8, 64), (F32,), BOTH, "compute"),
            Benchmark(_case("step", 8, 1, 8, 64, STATE), (F32,), FORWARD),
        ),
    ),
)

VARIANTS = (
    Variant(
        "TTT-Linear: a linear model that descends the loss of each mini-batch",
        ("ttt_linear", "TTTLinear"),
        "Sun et al. 2024, arXiv 2407.04620",
    ),
)
