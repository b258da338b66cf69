"""OpSpec of Mamba-3."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as nnf

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, BOTH, F32, FORWARD, SWEEPS, boundaries, flat_state

STATE = ("theta", "h", "last_k", "last_v")
MIMO = ("mimo_v", "mimo_z", "mimo_out", "z")


def _case(
    label: str,
    B: int,
    T: int,
    H: int,
    P: int,
    N: int,
    tensors: tuple[str, ...] = (),
    **more: Any,
) -> Case:
    """Makes a case; A is the number of angles, R of inputs (0 without mimo_v), S of sequences."""
    counts = {name: more.pop(name) for name in ("G", "A", "R", "S") if name in more}
    return Case(label, {"B": B, "T": T, "H": H, "P": P, "N": N} | counts, tensors, more)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, p, n = (case.sizes[name] for name in "BTHPN")
    groups, pairs, rank = (case.sizes.get(*each) for each in (("G", 1), ("A", n // 2), ("R", 0)))
    many, factors = ((rank,), (h, rank, p)) if rank else ((), ())
    dt = nnf.softplus(random.normal(b, t, h) - 1)
    rates = 300.0 if case.label == "strong" else 1.0
    count = case.sizes.get("S", b)
    made = {
        "q": random.normal(b, t, *many, groups, n) / max(1, n) ** 0.5,
        "k": random.normal(b, t, *many, groups, n),
        "v": random.normal(b, t, h, p),
        "adt": -rates * dt * (random.normal(b, t, h).abs() + 0.1),
        "dt": dt,
        "trap": random.normal(b, t, h),
        "q_bias": random.normal(h, *many, n) / max(1, n) ** 0.5,
        "k_bias": random.normal(h, *many, n),
        "angles": random.normal(b, t, 1 if case.label == "shared" else h, pairs),
    }
    optional = {
        "D": (h,),
        "z": (b, t, h, p),
        **dict.fromkeys(MIMO[:3], factors),
        "theta": (count, h, pairs),
        "h": (count, h, p, n),
        "last_k": (count, *many, h, n),
        "last_v": (count, h, p),
    }
    for name in case.tensors:
        if name == "cu_seqlens":
            made[name] = boundaries(count, t, random)
        else:
            made[name] = random.normal(*optional[name])
    return made


def _flops(case: Case, pass_: Pass) -> float:
    s = case.sizes
    tokens = s["B"] * s["T"] * s.get("R", 1)
    return 4.0 * tokens * s["H"] * s["P"] * s["N"] * SWEEPS[pass_]


SPECS = (
    OpSpec(
        name="mamba3",
        family="state space",
        cuda="emulated",
        paper="Lahoti et al. 2026, arXiv 2603.15569",
        batch_invariant=False,
        inputs=_inputs,
        differentiable=(
            *("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias", "angles", "D", "z"),
            *("mimo_v", "mimo_z", "mimo_out", *STATE),
        ),
        flops=_flops,
        second_order=True,
        special=("packed", "several"),
        adapt=flat_state(*STATE),
        cases=(
            _case("tiny", 2, 3, 1, 3, 2, ("D", *STATE)),
            _case("shared", 2, 21, 4, 6, 8, ("z",), G=2, A=2),
            _case("packed", 1, 25, 2, 6, 8, ("cu_seqlens", *STATE), S=4),
            _case("several", 1, 20, 2, 6, 8, (*MIMO, "D", "cu_seqlens", *STATE), R=3, A=2, S=3),
            _case("halves", 1, 7, 2, 4, 6, ("mimo_v",), R=2, interleaved=False, A=2),
            _case("strong", 1, 33, 2, 6, 8),
            _case("nosteps", 2, 0, 2, 3, 4, STATE),
        ),
        benchmarks=(
            Benchmark(
                _case("shared", 1, 1024, 8, 64, 128, ("D", "z"), A=32), (F32, BF16), BOTH, "compute"
            ),
            Benchmark(_case("step", 8, 1, 8, 64, 128, ("D", "z", *STATE), A=32), (F32,), FORWARD),
        ),
    ),
)

VARIANTS = (
    Variant(
        "Mamba-3: trapezoidal steps, rotating states, several inputs",
        ("mamba3", "Mamba3"),
        "Lahoti et al. 2026, arXiv 2603.15569",
    ),
)
