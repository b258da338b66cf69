"""OpSpecs of delta rules with several keys for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn import reference
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, BOTH, F32, SWEEPS, boundaries, flat_state

STATE = ("initial_state",)
PACKED = ("initial_state", "cu_seqlens")


def _case(
    label: str,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    tensors: tuple[str, ...] = (),
    **more: Any,
) -> Case:
    """Makes a case; Hv is the number of value heads, N that of packed sequences, n that of keys."""
    counts = {name: more.pop(name) for name in ("N", "n") if name in more}
    sizes = {"B": B, "T": T, "H": H, "Hv": more.pop("Hv", H), "K": K, "V": V}
    return Case(label, sizes | counts, tensors, more)


def _given(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes the optional tensors of a case."""
    b, t, h, k, v = (case.sizes[name] for name in ("B", "T", "Hv", "K", "V"))
    n, made = case.sizes.get("N", b), {}
    if "cu_seqlens" in case.tensors:
        made["cu_seqlens"] = boundaries(n, t, random)
    if "initial_state" in case.tensors:
        made["initial_state"] = random.normal(n, h, k, v)
    return made


def _decays(case: Case, random: Random, *size: int) -> Tensor:
    """Makes logarithms of decays, so low in the case "strong" that many decays are 0."""
    strength = 100 if case.label == "strong" else 1
    return strength * nnf.logsigmoid(3 + 2 * random.normal(*size))


def _product(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, hv, k, v, n = (case.sizes[name] for name in ("B", "T", "H", "Hv", "K", "V", "n"))
    width = (k,) if case.label == "channels" else ()
    decays = {} if "g" in case.options else {"g": _decays(case, random, b, t, hv, *width)}
    return {
        "q": random.normal(b, t, h, k),
        "k": random.normal(b, t, n, h, k),
        "v": random.normal(b, t, n, hv, v),
        "beta": random.normal(b, t, n, hv).sigmoid(),
        **decays,
        **_given(case, random),
    }


def _two_keys(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes rows of length 1, so that erasing does not enlarge states, and decays."""
    b, t, h, hv, k, v = (case.sizes[name] for name in ("B", "T", "H", "Hv", "K", "V"))
    rows = (nnf.normalize(random.normal(b, t, h, k), dim=-1) for _ in range(2))
    width = () if case.label == "heads" else (k,)
    return {
        "q": next(rows),
        "k": next(rows),
        "v": random.normal(b, t, hv, v),
        "g": _decays(case, random, b, t, hv, *width),
        **_given(case, random),
    }


def _comba(case: Case, random: Random) -> dict[str, Tensor]:
    made = _two_keys(case, random)
    shared = random.normal(*made["v"].shape[:3]).sigmoid()
    near = made["k"] + random.normal(*made["k"].shape) / 8
    return made | {"p": nnf.normalize(near, dim=-1), "beta": shared}


def _gates(case: Case, random: Random) -> dict[str, Tensor]:
    made = _two_keys(case, random)
    b, t, h, hv, k = (case.sizes[name] for name in ("B", "T", "H", "Hv", "K"))
    erased = random.normal(b, t, h if case.label == "heads" else hv, k).sigmoid()
    return made | {"b": erased, "w": random.normal(*made["v"].shape).sigmoid()}


def _preconditioned(case: Case, random: Random) -> dict[str, Tensor]:
    made = _two_keys(case, random)
    tokens, heads = made["q"].shape[:3], made["v"].shape[:3]
    state = made.pop("initial_state", None)
    if state is not None:
        squares = random.normal(state.shape[0], tokens[2], state.shape[2]).square()
        made |= {"S": state, "A": squares}
    return made | {
        "beta": random.normal(*heads).sigmoid(),
        "g_atk": _decays(case, random, *tokens),
        "beta_atk": random.normal(*tokens).sigmoid(),
        "log_atk_scale": random.normal(tokens[2]) - 2,
    }


def _oja(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes values of length 1."""
    b, t, h, hv, k, v = (case.sizes[name] for name in ("B", "T", "H", "Hv", "K", "V"))
    decays = {} if "gv" in case.options else {"gv": _decays(case, random, b, t, hv, v)}
    return {
        "q": random.normal(b, t, h, k),
        "k": random.normal(b, t, h, k),
        "v": nnf.normalize(random.normal(b, t, hv, v), dim=-1),
        "beta": random.normal(b, t, hv).sigmoid(),
        **decays,
        **_given(case, random),
    }


def _eager(name: str) -> Callable[..., Any]:
    """Returns the definition with queries and keys normalised in their own dtype."""
    rule = getattr(reference, name)

    def run(*, l2norm: bool = False, **given: Any) -> Any:
        if l2norm:
            for row in {"q", "k", "p"} & given.keys():
                t = given[row]
                given[row] = t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)
        return rule(**given)

    return run


def _spec(
    name: str,
    paper: str,
    inputs: Callable[[Case, Random], dict[str, Tensor]],
    differentiable: tuple[str, ...],
    products: int,
    cases: tuple[Case, ...],
    timed: tuple[Case, ...],
    adapt: Callable[[Callable[..., Any]], Callable[..., Any]] = OpSpec.adapt,
) -> OpSpec:
    """Makes an OpSpec; a token costs `products` products of a vector with a state."""

    def flops(case: Case, pass_: Pass) -> float:
        s = case.sizes
        tokens = s["B"] * s["T"] * s.get("n", 1)
        return 2.0 * products * tokens * s["Hv"] * s["K"] * s["V"] * SWEEPS[pass_]

    return OpSpec(
        name=name,
        family="delta variant",
        cuda="emulated",
        paper=paper,
        inputs=inputs,
        differentiable=differentiable,
        flops=flops,
        second_order=True,
        special=("packed",),
        cases=cases,
        eager=adapt(_eager(name)),
        benchmarks=tuple(Benchmark(case, (F32, BF16), BOTH, "compute") for case in timed),
        adapt=adapt,
    )


SPECS = (
    _spec(
        "gated_delta_product",
        "Siems et al. 2025, arXiv 2502.10297",
        _product,
        ("q", "k", "v", "g", "beta", "initial_state"),
        3,
        (
            _case("tiny", 2, 3, 1, 3, 2, STATE, n=2, l2norm=True),
            _case("grouped", 2, 21, 2, 8, 6, STATE, Hv=4, n=3, l2norm=True),
            _case("packed", 1, 40, 2, 8, 6, PACKED, N=4, n=2, l2norm=True),
            _case("strong", 1, 40, 2, 8, 6, n=2, l2norm=True),
            _case("channels", 1, 20, 2, 8, 6, n=2, l2norm=True, scale=0.7),
            _case("no decay", 1, 20, 1, 8, 6, n=2, l2norm=True, g=None),
            _case("nosteps", 2, 0, 2, 4, 3, STATE, n=2, l2norm=True),
        ),
        (_case("head64", 1, 1024, 8, 64, 64, n=2, l2norm=True),),
    ),
    _spec(
        "comba",
        "Hu et al. 2025, arXiv 2506.02475",
        _comba,
        ("q", "k", "v", "p", "g", "beta", "initial_state"),
        4,
        (
            _case("tiny", 2, 3, 1, 3, 2, STATE),
            _case("heads", 2, 33, 2, 8, 6, STATE, Hv=4, l2norm=True),
            _case("packed", 1, 40, 2, 8, 6, PACKED, N=4, erase_decayed=True),
            _case("strong", 1, 40, 2, 8, 6),
            _case("nosteps", 2, 0, 2, 4, 3, STATE),
        ),
        (_case("head64", 1, 1024, 8, 64, 64),),
    ),
    _spec(
        "gated_delta_rule_2",
        "Hatamizadeh et al. 2026, arXiv 2605.22791",
        _gates,
        ("q", "k", "v", "g", "b", "w", "initial_state"),
        4,
        (
            _case("tiny", 2, 3, 1, 3, 2, STATE),
            _case("heads", 2, 33, 2, 8, 6, STATE, Hv=4, l2norm=True),
            _case("packed", 1, 40, 2, 8, 6, PACKED, N=4, scale=0.7),
            _case("strong", 1, 40, 2, 8, 6, Hv=4),
            _case("nosteps", 2, 0, 2, 4, 3, STATE),
        ),
        (_case("head64", 1, 1024, 8, 64, 64),),
    ),
    _spec(
        "preconditioned_delta_rule",
        "Tumma, Loo, Rus 2026, arXiv 2604.21100",
        _preconditioned,
        (*("q", "k", "v", "g", "beta", "g_atk", "beta_atk", "log_atk_scale"), "S", "A"),
        4,
        (
            _case("tiny", 2, 3, 1, 3, 2, STATE),
            _case("heads", 2, 33, 2, 8, 6, STATE, Hv=4, l2norm=True),
            _case("packed", 1, 40, 2, 8, 6, PACKED, N=4, scale=0.7, x=2.0),
            _case("strong", 1, 40, 2, 8, 6, eps=1e-3),
            _case("nosteps", 2, 0, 2, 4, 3, STATE),
        ),
        (_case("head64", 1, 1024, 8, 64, 64),),
        adapt=flat_state("S", "A"),
    ),
    _spec(
        "gated_oja_rule",
        "Oja 1982, doi 10.1007/BF00275687",
        _oja,
        ("q", "k", "v", "gv", "beta", "initial_state"),
        4,
        (
            _case("tiny", 2, 3, 1, 3, 2, STATE),
            _case("grouped", 2, 33, 2, 8, 6, STATE, Hv=4, scale=0.7),
            _case("packed", 1, 40, 2, 8, 6, PACKED, N=4),
            _case("strong", 1, 40, 2, 8, 6),
            _case("no decay", 1, 20, 1, 8, 6, gv=None),
            _case("nosteps", 2, 0, 2, 4, 3, STATE),
        ),
        (_case("head64", 1, 1024, 8, 64, 64),),
    ),
)

VARIANTS = (
    Variant(
        "gated Oja rule: keys are corrected by what their values read",
        ("gated_oja_rule",),
        "Oja 1982, doi 10.1007/BF00275687",
    ),
    Variant(
        "MoM: gated delta rule with several memories",
        ("gated_delta_rule", "MixtureOfMemories"),
        "Du et al. 2025, arXiv 2502.13685",
    ),
    Variant(
        "gated delta product: several updates for each token",
        ("gated_delta_product", "GatedDeltaProduct"),
        "Siems et al. 2025, arXiv 2502.10297",
    ),
    Variant("Comba: another key erases", ("comba", "Comba"), "Hu et al. 2025, arXiv 2506.02475"),
    Variant(
        "Gated DeltaNet-2: gates of erased and written channels",
        ("gated_delta_rule_2", "GatedDeltaNet2"),
        "Hatamizadeh et al. 2026, arXiv 2605.22791",
    ),
    Variant(
        "preconditioned Gated DeltaNet and KDA: writes scaled by mean squares of keys",
        ("preconditioned_delta_rule", "PrecondGatedDeltaNet", "PrecondKDA"),
        "Tumma, Loo, Rus 2026, arXiv 2604.21100",
    ),
)
