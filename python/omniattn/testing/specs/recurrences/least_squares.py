"""OpSpecs of linear attention whose queries solve least-squares problems."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as nnf

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BOTH, F32, FORWARD, boundaries, flat_state

STATE = ("initial_state",)
#: Optional tensors of Gated KalmaNet.
GATED = ("g", "gk", "alpha")


def _case(
    label: str, B: int, T: int, H: int, K: int, V: int, tensors: tuple[str, ...] = (), **more: Any
) -> Case:
    """Makes a case; N is the number of packed sequences."""
    counts = {"N": more.pop("N")} if "N" in more else {}
    return Case(label, {"B": B, "T": T, "H": H, "K": K, "V": V} | counts, tensors, more)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes keys of length 1, as systems with large ones are ill-conditioned."""
    b, t, h, k, v = (case.sizes[name] for name in ("B", "T", "H", "K", "V"))
    n = case.sizes.get("N", b)
    strength = 100 if case.label == "strong" else 1
    made = {
        "q": random.normal(b, t, h, k),
        "k": nnf.normalize(random.normal(b, t, h, k), dim=-1),
        "v": random.normal(b, t, h, v),
        "g": strength * nnf.logsigmoid(3 + 2 * random.normal(b, t, h)),
        "beta": random.normal(b, t, h).sigmoid(),
        "lamb": 0.25 + nnf.softplus(random.normal(h, k)),
    }
    if "cu_seqlens" in case.tensors:
        made["cu_seqlens"] = boundaries(n, t, random)
    if "initial_state" in case.tensors:
        keys = nnf.normalize(random.normal(n, h, 3, k), dim=-1)
        made |= {"kk": keys.mT @ keys, "kv": random.normal(n, h, k, v)}
    return made


def _kalman(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes keys of lengths from 0.5 to 1, since gradients grow with the inverse square."""
    made = _inputs(case, random)
    del made["lamb"]
    beta = (1 + made.pop("beta")) / 2
    made |= {"k": beta[..., None] * made["k"], "v": beta[..., None] * made["v"]}
    made |= {"gk": made["g"].roll(1, 1), "alpha": random.normal(*beta.shape).sigmoid()}
    return {name: t for name, t in made.items() if name not in GATED or name in case.tensors}


def _symmetric(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of a state (H, G) to take both by name; H is made symmetric."""
    flat = flat_state("kk", "kv")(function)

    @functools.wraps(flat)
    def run(*args: Any, kk: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = flat(
            *args, kk=None if kk is None else (kk + kk.mT) / 2, **options
        )
        return found

    return run


def _flops(case: Case, pass_: Pass) -> float:
    """Counts two products with a state for each of 30 steps, and those of linear attention.

    The backward takes as many steps."""
    s = case.sizes
    tokens = 4.0 * s["B"] * s["T"] * s["H"] * s["K"]
    passes = {"forward": 1, "backward": 1, "forward+backward": 2}[pass_]
    return tokens * passes * (30 * s["K"] + s["V"])


SPECS = (
    OpSpec(
        name="mesa_net",
        family="MesaNet",
        cuda="emulated",
        paper="von Oswald et al. 2025, arXiv 2506.05233",
        inputs=_inputs,
        differentiable=("q", "k", "v", "g", "beta", "lamb", "kk", "kv"),
        flops=_flops,
        second_order=True,
        special=("packed",),
        adapt=_symmetric,
        cases=(
            _case("tiny", 2, 3, 1, 3, 2, STATE),
            _case("unit", 2, 33, 2, 8, 6, STATE, l2norm=True),
            _case("packed", 1, 40, 2, 8, 6, ("initial_state", "cu_seqlens"), N=4),
            _case("whole", 1, 128, 2, 8, 6, l2norm=True),
            _case("strong", 1, 40, 2, 8, 6),
            _case("step", 2, 1, 2, 8, 6, STATE),
            _case("nosteps", 2, 0, 2, 4, 3, STATE),
        ),
        benchmarks=(
            Benchmark(_case("head64", 1, 1024, 8, 64, 64, l2norm=True), (F32,), BOTH, "compute"),
            Benchmark(_case("step", 8, 1, 8, 64, 64, STATE), (F32,), FORWARD),
        ),
    ),
    OpSpec(
        name="gated_kalmanet",
        family="MesaNet",
        cuda="emulated",
        paper="Peng et al. 2025, arXiv 2511.21016",
        inputs=_kalman,
        differentiable=("q", "k", "v", "g", "gk", "alpha", "kk", "kv"),
        flops=_flops,
        second_order=True,
        special=("packed",),
        adapt=_symmetric,
        cases=(
            _case("tiny", 2, 3, 1, 3, 2, GATED + STATE),
            _case("undecayed", 2, 33, 2, 8, 6, scale=1.0, ridge_ratio=0.1),
            _case("packed", 1, 40, 2, 8, 6, (*GATED, "initial_state", "cu_seqlens"), N=4),
            _case("whole", 1, 128, 2, 8, 6, GATED, max_iterations=60),
            _case("strong", 1, 40, 2, 8, 6, GATED),
            _case("step", 2, 1, 2, 8, 6, GATED + STATE),
            _case("nosteps", 2, 0, 2, 4, 3, GATED + STATE),
        ),
        benchmarks=(
            Benchmark(_case("head64", 1, 1024, 8, 64, 64, GATED), (F32,), BOTH, "compute"),
            Benchmark(_case("step", 8, 1, 8, 64, 64, GATED + STATE), (F32,), FORWARD),
        ),
    ),
)

VARIANTS = (
    Variant(
        "MesaNet: least squares over past tokens by conjugate gradients",
        ("mesa_net", "MesaNet"),
        "von Oswald et al. 2025, arXiv 2506.05233",
    ),
    Variant(
        "Gated KalmaNet: ridge regression on past tokens, relative to the norm of their keys",
        ("gated_kalmanet", "GatedKalmaNet"),
        "Peng et al. 2025, arXiv 2511.21016",
    ),
)
