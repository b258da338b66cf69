"""OpSpecs of memories of a few slots."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as nnf

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import (
    BF16,
    BOTH,
    F32,
    FORWARD,
    SWEEPS,
    boundaries,
    flat_state,
)

PAIR = ("keys", "values")
SUMS = (*PAIR, "n", "m")
FLOW = (*PAIR, "clock")


def _case(
    label: str,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    M: int,
    tensors: tuple[str, ...] = (),
    **more: Any,
) -> Case:
    """Makes a case; Hq is the number of heads of q, N that of packed sequences."""
    counts = {name: more.pop(name) for name in ("Hq", "N") if name in more}
    return Case(label, {"B": B, "T": T, "H": H, "K": K, "V": V, "M": M} | counts, tensors, more)


def _abc(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes inputs with logits of slots, which span a large range in the case "strong"."""
    b, t, h, k, v, m = (case.sizes[name] for name in ("B", "T", "H", "K", "V", "M"))
    n = case.sizes.get("N", b)
    made = {
        "q": random.normal(b, t, case.sizes.get("Hq", h), k),
        "k": random.normal(b, t, h, k),
        "v": random.normal(b, t, h, v),
        "s": random.normal(b, t, h, m) * (100 if case.label == "strong" else 1),
    }
    if "cu_seqlens" in case.tensors:
        made["cu_seqlens"] = boundaries(n, t, random)
    sizes = {"keys": (k, m), "values": (m, v), "n": (m,), "m": (m,)}
    made |= {
        name: random.normal(n, h, *size) for name, size in sizes.items() if name in case.tensors
    }
    return made | ({"n": 1 + made["n"].abs()} if "n" in made else {})


def _means(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps abc_attention to take its sums one by one, and to return what m does not change."""
    flat = flat_state(*SUMS)(function)

    @functools.wraps(flat)
    def run(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        o, keys, values, n, m = flat(*args, **options)
        return o, keys / n[..., None, :], values / n[..., None], n.log() + m

    return run


def _gsa(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes inputs; in the case "strong" many decays are 0."""
    made = _abc(case, random)
    g = nnf.logsigmoid(3 + 2 * random.normal(*made["s"].shape))
    g = g * (100 if case.label == "strong" else 1)
    return made | {"s": 1 - g.exp(), "g": g}


def _flow(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes M slots; in the case "strong" many decays are 0 and clocks go around many times."""
    b, t, h, k, v, m = (case.sizes[name] for name in ("B", "T", "H", "K", "V", "M"))
    n = case.sizes.get("N", b)
    strength = 100 if case.label == "strong" else 1
    made = {
        "q": random.normal(b, t, h, k),
        "k": random.normal(b, t, h, k),
        "v": random.normal(b, t, h, v),
        "g": strength * nnf.logsigmoid(3 + 2 * random.normal(b, t, h)),
        "delta": strength * random.normal(b, t, h).sigmoid(),
        "beta": random.normal(b, t, h).sigmoid(),
        "readout": random.normal(h, m, m),
    }
    if "cu_seqlens" in case.tensors:
        made["cu_seqlens"] = boundaries(n, t, random)
    if "keys" in case.tensors:
        made["keys"] = random.normal(n, h, k, m + 1)
        made["values"] = random.normal(n, h, m + 1, v)
        made["clock"] = random.normal(n, h)
    return made


def _turning(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps cyclic_flow_attention to take its state one by one and to return places on a circle."""
    flat = flat_state(*FLOW)(function)

    @functools.wraps(flat)
    def run(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        o, keys, values, clock = flat(*args, **options)
        angles = clock * (2 * math.pi / options["readout"].shape[-1])
        return o, keys, values, angles.cos(), angles.sin()

    return run


def _flow_flops(case: Case, pass_: Pass) -> float:
    """As `_flops`, and the products of the readout with logits and with weights."""
    s = case.sizes
    readout = 4.0 * s["B"] * s["T"] * s["H"] * s["M"] ** 2
    return _flops(case, pass_) + readout * SWEEPS[pass_]


def _flops(case: Case, pass_: Pass) -> float:
    """Counts a product of a token's vector with each of both states, and one that writes it."""
    s = case.sizes
    heads = s.get("Hq", s["H"])
    return 4.0 * s["B"] * s["T"] * heads * s["M"] * (s["K"] + s["V"]) * SWEEPS[pass_]


SPECS = (
    OpSpec(
        name="gated_slot_attention",
        family="slot attention",
        cuda="emulated",
        paper="Zhang et al. 2024, arXiv 2409.07146",
        inputs=_gsa,
        differentiable=("q", "k", "v", "s", "g", *PAIR),
        flops=_flops,
        second_order=True,
        special=("packed",),
        adapt=flat_state(*PAIR),
        cases=(
            _case("tiny", 2, 3, 1, 3, 2, 2, PAIR),
            _case("grouped", 2, 21, 2, 8, 6, 5, PAIR, Hq=4, scale=0.7),
            _case("packed", 1, 40, 2, 8, 6, 4, (*PAIR, "cu_seqlens"), N=4),
            _case("strong", 1, 40, 2, 8, 6, 4),
            _case("step", 2, 1, 2, 8, 6, 4, PAIR),
            _case("nosteps", 2, 0, 2, 4, 3, 2, PAIR),
        ),
        benchmarks=(
            Benchmark(_case("head64", 1, 2048, 8, 64, 64, 64), (F32, BF16), BOTH, "compute"),
            Benchmark(_case("step", 8, 1, 8, 64, 64, 64, PAIR), (F32,), FORWARD),
        ),
    ),
    OpSpec(
        name="abc_attention",
        family="slot attention",
        cuda="emulated",
        paper="Peng et al. 2021, arXiv 2110.02488",
        inputs=_abc,
        differentiable=("q", "k", "v", "s", *PAIR, "n"),
        flops=_flops,
        second_order=True,
        special=("packed",),
        adapt=_means,
        cases=(
            _case("tiny", 2, 3, 1, 3, 2, 2, SUMS),
            _case("grouped", 2, 21, 2, 8, 6, 5, Hq=4, scale=0.7),
            _case("packed", 1, 40, 2, 8, 6, 4, (*SUMS, "cu_seqlens"), N=4),
            _case("strong", 1, 40, 2, 8, 6, 4, SUMS),
            _case("step", 2, 1, 2, 8, 6, 4, SUMS),
            _case("nosteps", 2, 0, 2, 4, 3, 2, SUMS),
        ),
        benchmarks=(
            Benchmark(_case("head64", 1, 2048, 8, 64, 64, 64), (F32, BF16), BOTH, "compute"),
        ),
    ),
    OpSpec(
        name="cyclic_flow_attention",
        family="slot attention",
        cuda="emulated",
        paper="Chyxx/CyclicFlowAttention 2026, arXiv 2609.36259",
        inputs=_flow,
        differentiable=("q", "k", "v", "g", "delta", "beta", "readout", *FLOW),
        flops=_flow_flops,
        second_order=True,
        special=("packed",),
        adapt=_turning,
        cases=(
            _case("tiny", 2, 3, 1, 3, 2, 3, FLOW),
            _case("scaled", 2, 21, 2, 8, 6, 5, FLOW, scale=0.7),
            _case("packed", 1, 40, 2, 8, 6, 7, (*FLOW, "cu_seqlens"), N=4),
            _case("strong", 1, 40, 2, 8, 6, 5),
            _case("step", 2, 1, 2, 8, 6, 5, FLOW),
            _case("nosteps", 2, 0, 2, 4, 3, 3, FLOW),
        ),
        benchmarks=(
            Benchmark(_case("head64", 1, 2048, 8, 64, 64, 63), (F32,), BOTH, "compute"),
            Benchmark(_case("step", 8, 1, 8, 64, 64, 63, FLOW), (F32,), FORWARD),
        ),
    ),
)

VARIANTS = (
    Variant(
        "gated slot attention: softmax over slots that decay",
        ("gated_slot_attention", "GatedSlotAttention"),
        "Zhang et al. 2024, arXiv 2409.07146",
    ),
    Variant(
        "Raven: tokens are routed to slots",
        ("Raven",),
        "goombalab/raven 2026",
    ),
    Variant(
        "ABC: softmax over slots of weighted means",
        ("abc_attention", "ABCAttention"),
        "Peng et al. 2021, arXiv 2110.02488",
    ),
    Variant(
        "CyFA: slots of relative time, through which tokens flow with a learned clock",
        ("cyclic_flow_attention", "CyclicFlowAttention"),
        "Chyxx/CyclicFlowAttention 2026, arXiv 2609.36259",
    ),
)
