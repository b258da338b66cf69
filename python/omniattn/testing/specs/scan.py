"""OpSpecs of scans."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random
from omniattn.testing.specs._cases import BF16, BOTH, F32, FORWARD, SWEEPS

STATE = ("initial_state",)
PACKED = ("initial_state", "cu_seqlens")


def _boundaries(case: Case, random: Random) -> dict[str, Tensor]:
    """N sequences from the first row to the last, where they are packed."""
    if "cu_seqlens" not in case.tensors:
        return {}
    steps = case.sizes["T"]
    inner = random.integers(steps + 1, case.sizes["N"] - 1).sort().values
    return {"cu_seqlens": torch.cat((nnf.pad(inner, (1, 0)), torch.tensor([steps])))}


def _flops(per_element: int, *letters: str) -> Callable[[Case, Pass], float]:
    def flops(case: Case, pass_: Pass) -> float:
        count = per_element * SWEEPS[pass_]
        for letter in letters:
            count *= case.sizes[letter]
        return float(count)

    return flops


def _wkv(label: str, B: int, T: int, C: int, tensors: tuple[str, ...] = (), **sizes: int) -> Case:
    return Case(label, {"B": B, "T": T, "C": C} | sizes, tensors)


def _wkv_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, c = (case.sizes[letter] for letter in "BTC")
    tensors = {
        "w": random.normal(c).exp() + 0.01,
        "u": random.normal(c),
        "k": random.normal(b, t, c),
        "v": random.normal(b, t, c),
    } | _boundaries(case, random)
    if "initial_state" in case.tensors:
        n = case.sizes.get("N", b)
        num, den, top = random.normal(3, n, c)
        tensors["initial_state"] = torch.stack((num, den.abs() + 1, top), 1)
    return tensors


RWKV4 = OpSpec(
    name="rwkv4",
    family="scan",
    cuda="emulated",
    paper="Peng et al. 2023, arXiv 2305.13048",
    inputs=_wkv_inputs,
    differentiable=("w", "u", "k", "v", "initial_state"),
    flops=_flops(20, "B", "T", "C"),
    second_order=True,
    special=("packed", "long"),
    cases=(
        _wkv("tiny", 2, 3, 3, STATE),
        _wkv("plain", 2, 33, 67),
        _wkv("state", 1, 65, 20, STATE),
        _wkv("packed", 1, 70, 9, PACKED, N=5),
        _wkv("long", 1, 300, 5),
        _wkv("step", 3, 1, 40, STATE),
        _wkv("nosteps", 2, 0, 4, STATE),
        _wkv("nobatch", 0, 5, 4),
        _wkv("nochannels", 2, 5, 0, STATE),
    ),
    benchmarks=(
        Benchmark(_wkv("model", 1, 2048, 1024), (F32, BF16), BOTH, "compute"),
        Benchmark(_wkv("batch", 8, 512, 1024), (F32,), BOTH, "compute"),
        Benchmark(_wkv("step", 8, 1, 1024, STATE), (F32,), FORWARD),
    ),
)

SPECS = (RWKV4,)
