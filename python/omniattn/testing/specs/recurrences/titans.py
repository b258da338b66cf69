"""OpSpecs of the memories of Titans and ATLAS."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BOTH, F32, FORWARD, SWEEPS, boundaries, flat_state

STATE = ("M", "S", "N0")
PAST = ("keys", "values")
NORM = ("w", "b")
GATES = ("theta", "alpha", "eta")


def _case(
    label: str, B: int, T: int, H: int, K: int, V: int, tensors: tuple[str, ...] = (), **more: Any
) -> Case:
    """Makes a case; N is the number of packed sequences, C that of the losses of a token."""
    counts = {name: more.pop(name) for name in "NC" if name in more}
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


def _mlp_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes states in all cases, whose P numbers are those of an MLP."""
    made = _inputs(case, random)
    b, h = case.sizes["B"], case.sizes["H"]
    n = case.sizes.get("N", b)
    widths = (case.sizes["K"], *case.options["hidden"], case.sizes["V"])
    size = sum(rows * columns for rows, columns in itertools.pairwise(widths))
    made |= {name: random.normal(n, h, size) / 2 for name in STATE}
    if "position" in case.tensors:
        made["position"] = random.integers(9, n)
    return made


def _atlas_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, k, v = (case.sizes[name] for name in "BTHKV")
    window = case.sizes["C"]
    made = _inputs(case, random)
    theta = made.pop("theta")
    made["gamma"] = random.normal(b, t, h, window).sigmoid() / 8
    if "theta" in case.tensors:
        made["theta"] = theta
    if "keys" in case.tensors:
        n = case.sizes.get("N", b)
        made["keys"] = nnf.normalize(random.normal(n, window - 1, h, k), dim=-1)
        made["values"] = random.normal(n, window - 1, h, v)
    return made


def _mlp_flops(case: Case, pass_: Pass) -> float:
    """Counts seven products with the matrices, and those of tokens in mini-batches."""
    s, size = case.sizes, case.options.get("mini_batch_size", 16)
    widths = (s["K"], *case.options["hidden"], s["V"])
    each = sum(
        7 * rows * columns + size * (rows + columns) for rows, columns in itertools.pairwise(widths)
    )
    return 2.0 * s["B"] * s["T"] * s["H"] * each * SWEEPS[pass_]


def _flops(case: Case, pass_: Pass) -> float:
    """Counts five products with states, and those of tokens in mini-batches."""
    s = case.sizes
    size = case.options.get("mini_batch_size", 16)
    tokens = s["B"] * s["T"] * s["H"]
    return 2.0 * tokens * (5 * s["K"] * s["V"] + size * (s["K"] + s["V"])) * SWEEPS[pass_]


def _atlas_flops(case: Case, pass_: Pass) -> float:
    """As `_flops`, and for orthogonal matrices two powers and a product in each step."""
    s = case.sizes
    steps = case.options.get("newton_schulz_steps", 0)
    tokens, each = s["B"] * s["T"] * s["H"], min(s["K"], s["V"])
    powers = steps * each * (2 * s["K"] * s["V"] + each * each)
    return _flops(case, pass_) + 2.0 * tokens * powers * SWEEPS[pass_]


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
    OpSpec(
        name="titans_mlp",
        family="test-time training",
        cuda="emulated",
        paper="Behrouz et al. 2025, arXiv 2501.00663",
        inputs=_mlp_inputs,
        differentiable=("q", "k", "v", *GATES, *STATE),
        flops=_mlp_flops,
        second_order=True,
        special=("packed",),
        adapt=flat_state(*STATE),
        cases=(
            _case("tiny", 2, 3, 1, 3, 2, ("alpha", "eta"), hidden=[2], mini_batch_size=2),
            _case("deep", 2, 33, 2, 6, 5, ("alpha", "eta"), hidden=[7, 4], scale=0.5),
            _case(
                "packed",
                1,
                30,
                2,
                6,
                4,
                ("alpha", "eta", "position", "cu_seqlens"),
                N=4,
                hidden=[5],
                mini_batch_size=4,
            ),
            _case("linear", 2, 20, 2, 6, 4, ("alpha", "eta"), hidden=[]),
            _case("each", 1, 9, 2, 6, 4, ("eta",), hidden=[5], mini_batch_size=1),
            _case(
                "step", 2, 1, 2, 6, 4, ("alpha", "eta", "position"), hidden=[5], mini_batch_size=4
            ),
            _case("nosteps", 2, 0, 2, 4, 3, ("alpha",), hidden=[5]),
        ),
        benchmarks=(
            Benchmark(
                _case("head32", 1, 512, 4, 32, 32, ("alpha", "eta"), hidden=[64]),
                (F32,),
                BOTH,
                "compute",
            ),
            Benchmark(
                _case("step", 8, 1, 8, 64, 64, ("alpha", "eta", "position"), hidden=[128]),
                (F32,),
                FORWARD,
            ),
        ),
    ),
    OpSpec(
        name="atlas_linear",
        family="test-time training",
        cuda="emulated",
        paper="Behrouz et al. 2025, arXiv 2505.23735",
        inputs=_atlas_inputs,
        differentiable=("q", "k", "v", "gamma", "theta", "alpha", "eta", *STATE, *PAST),
        flops=_atlas_flops,
        second_order=True,
        special=("packed",),
        adapt=flat_state(*STATE, *PAST),
        cases=(
            _case("tiny", 2, 3, 1, 4, 3, (*GATES, *STATE, *PAST), C=2, mini_batch_size=2),
            _case("plain", 2, 32, 2, 8, 6, GATES, C=4),
            _case(
                "muon",
                2,
                11,
                2,
                6,
                4,
                (*GATES, *STATE, *PAST),
                C=3,
                newton_schulz_steps=3,
                mini_batch_size=4,
            ),
            _case(
                "packed",
                1,
                30,
                2,
                8,
                6,
                ("alpha", "eta", "cu_seqlens", *STATE, *PAST),
                N=4,
                C=6,
                mini_batch_size=4,
            ),
            _case("each", 1, 9, 2, 8, 6, ("eta",), C=3, mini_batch_size=1),
            _case("one", 1, 33, 2, 8, 6, GATES, C=1),
            _case("step", 2, 1, 2, 8, 6, (*GATES, *STATE, *PAST), C=5, mini_batch_size=4),
            _case("nosteps", 2, 0, 2, 4, 3, ("alpha", *STATE, *PAST), C=3),
        ),
        benchmarks=(
            Benchmark(_case("head64", 1, 2048, 8, 64, 64, GATES, C=8), (F32,), BOTH, "compute"),
            Benchmark(
                _case("muon", 1, 256, 4, 32, 32, GATES, C=8, newton_schulz_steps=5),
                (F32,),
                BOTH,
                "compute",
            ),
            Benchmark(
                _case("step", 8, 1, 8, 64, 64, (*GATES, *STATE, *PAST), C=8), (F32,), FORWARD
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
    Variant(
        "Titans: an MLP as memory, learned by descent with momentum and forgetting",
        ("titans_mlp", "TitansMLP"),
        "Behrouz et al. 2025, arXiv 2501.00663",
    ),
    Variant(
        "ATLAS: a linear memory that learns from windows of tokens, its steps orthogonal or not",
        ("atlas_linear", "AtlasLinear"),
        "Behrouz et al. 2025, arXiv 2505.23735",
    ),
)
