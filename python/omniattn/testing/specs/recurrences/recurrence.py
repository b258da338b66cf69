"""OpSpecs of recurrences with a matrix state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn import reference
from omniattn.functional.recurrences.linear_attention import feature_size
from omniattn.reference.recurrences.recurrence import SIGNED
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, BOTH, F32, FORWARD, SWEEPS, boundaries

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
    *,
    Hv: int | None = None,
    N: int | None = None,
    **options: Any,
) -> Case:
    """Makes a case; N is the number of packed sequences."""
    sizes = {"B": B, "T": T, "H": H, "Hv": Hv or H, "K": K, "V": V}
    return Case(label, sizes if N is None else sizes | {"N": N}, tensors, options)


def _gates(kind: str) -> Callable[[Case, Random], dict[str, Tensor]]:
    """Returns a maker of g per "head" or per "channel", in some cases of gv, and with "delta" of
    beta."""

    def made(case: Case, random: Random) -> dict[str, Tensor]:
        b, t, h, k = (case.sizes[name] for name in ("B", "T", "Hv", "K"))
        channels = "channel" in kind and "heads" not in case.label
        shapes = {"g": (b, t, h, k) if channels else (b, t, h)}
        shapes |= {"gv": (b, t, h, case.sizes["V"])} if "gv" in case.tensors else {}
        gates = {}
        decays = "head" in kind or "channel" in kind
        for name, shape in shapes.items():
            strength = 100 if "strong" in case.label else 1
            if decays and name not in case.options:
                gates[name] = strength * nnf.logsigmoid(3 + 2 * random.normal(*shape))
        if "delta" in kind:
            gates["beta"] = random.normal(b, t, h).sigmoid()
        return gates

    return made


def _bonus(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes w, constant over tokens for RWKV-5, and u."""
    b, t, h, k = (case.sizes[name] for name in ("B", "T", "Hv", "K"))
    shape = (h, k) if case.label == "constant" else (b, t, h, k)
    return {"w": -torch.exp(random.normal(*shape) - 1), "u": random.normal(h, k)}


def _low_rank(g: str) -> Callable[[Case, Random], dict[str, Tensor]]:
    """Returns a maker of a = -x and b = alpha x with unit rows x, and of the decays."""

    def made(case: Case, random: Random) -> dict[str, Tensor]:
        b, t, h, hv, k = (case.sizes[name] for name in ("B", "T", "H", "Hv", "K"))
        x = nnf.normalize(random.normal(b, t, h, k), dim=-1)
        shape = (b, t, hv) if case.label == "heads" else (b, t, hv, k)
        decay = -torch.exp(random.normal(*shape) - 2)
        return {"a": -x, "b": x * random.normal(b, t, h, k).sigmoid(), g: decay}

    return made


def _feature_gates(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes g and beta of gated linear attention, per feature or per head."""
    if not case.label.startswith("gated"):
        return {}
    b, t, h, hv, k = (case.sizes[name] for name in ("B", "T", "H", "Hv", "K"))
    width = () if case.label == "gated heads" else (k,)
    g = nnf.logsigmoid(3 + 2 * random.normal(b, t, hv, *width))
    return {"g": g, "beta": random.normal(b, t, h, *width).sigmoid()}


def _inputs(
    gates: Callable[[Case, Random], dict[str, Tensor]], q: str = "q"
) -> Callable[[Case, Random], dict[str, Tensor]]:
    def made(case: Case, random: Random) -> dict[str, Tensor]:
        b, t, h, hv, k, v = (case.sizes[name] for name in ("B", "T", "H", "Hv", "K", "V"))
        tensors = {
            q: random.normal(b, t, h, k),
            "k": random.normal(b, t, h, k) / max(1, k) ** 0.5,
            "v": random.normal(b, t, hv, v),
        } | gates(case, random)
        n = case.sizes.get("N", b)
        if "cu_seqlens" in case.tensors:
            tensors["cu_seqlens"] = boundaries(n, t, random)
        if "initial_state" in case.tensors:
            ones = case.options.get("feature_map") not in (None, *SIGNED)
            features = feature_size(case.options.get("feature_map", ""), k)
            if "normalize" in case.options:
                features, ones = k + 1, True
            tensors["initial_state"] = random.normal(n, hv, features, v + ones).abs()
        return tensors

    return made


def _ssd(
    label: str,
    B: int,
    T: int,
    H: int,
    P: int,
    N: int,
    tensors: tuple[str, ...] = (),
    *,
    G: int = 1,
    S: int | None = None,
    **options: Any,
) -> Case:
    """Makes a case; S is the number of packed sequences."""
    sizes = {"B": B, "T": T, "H": H, "P": P, "N": N, "G": G}
    return Case(label, sizes if S is None else sizes | {"S": S}, tensors, options)


def _ssd_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, p, n, groups = (case.sizes[name] for name in "BTHPNG")
    soft = "dt_softplus" in case.options
    dt = random.normal(b, t, h)
    tensors = {
        "x": random.normal(b, t, h, p),
        "dt": dt - 3 if soft else 0.1 * dt.abs(),
        "A": (-1 - 4 * random.normal(h).abs()) * (300 if case.label == "strong" else 1),
        "B": random.normal(b, t, groups, n),
        "C": random.normal(b, t, groups, n) / max(1, n) ** 0.5,
    }
    optional = {
        "D": lambda: random.normal(h),
        "z": lambda: random.normal(b, t, h, p),
        "dt_bias": lambda: random.normal(h),
        "initial_state": lambda: random.normal(case.sizes.get("S", b), h, p, n),
        "cu_seqlens": lambda: boundaries(case.sizes["S"], t, random),
    }
    return tensors | {name: optional[name]() for name in case.tensors}


def _flops(products: int) -> Callable[[Case, Pass], float]:
    """Counts products of tokens with the state, without those within a chunk."""

    def flops(case: Case, pass_: Pass) -> float:
        s = case.sizes
        return 2.0 * products * s["B"] * s["T"] * s["Hv"] * s["K"] * s["V"] * SWEEPS[pass_]

    return flops


def _eager(name: str) -> Callable[..., Any]:
    """Returns the definition with q and k normalised in their own dtype, as the kernels do."""
    rule = getattr(reference, name)

    def run(q: Tensor, k: Tensor, *args: Any, l2norm: bool = False, **options: Any) -> Any:
        if l2norm:
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        return rule(q, k, *args, **options)

    return run


def _spec(name: str, paper: str, kind: str, cases: tuple[Case, ...], **more: Any) -> OpSpec:
    decays = ("g",) if "head" in kind or "channel" in kind else ()
    betas = ("beta",) if "delta" in kind else ()
    given: dict[str, Any] = {
        "inputs": _inputs(_gates(kind)),
        "differentiable": ("q", "k", "v", *decays, *betas, "initial_state"),
        "flops": _flops(3 if "delta" in kind else 2),
        "eager": _eager(name) if betas else None,
    }
    wide = _case("wide", 1, 2048, 8, 128, 128)
    return OpSpec(
        name=name,
        family="recurrence",
        cuda="emulated",
        paper=paper,
        second_order=True,
        special=("packed", "grouped"),
        cases=cases,
        benchmarks=(
            Benchmark(_case("head64", 1, 2048, 8, 64, 64), (F32, BF16), BOTH, "compute"),
            Benchmark(wide, (F32,), BOTH, "compute"),
            Benchmark(_case("step", 8, 1, 8, 64, 64, STATE), (F32,), FORWARD),
        ),
        **(given | more),
    )


def _cases(**options: Any) -> tuple[Case, ...]:
    """Makes cases around the chunk sizes 16, 32 and 64, and with odd and empty sizes."""
    return (
        _case("tiny", 2, 3, 1, 3, 2, STATE, **options),
        _case("plain", 2, 70, 2, 16, 32, **options),
        _case("state", 1, 129, 2, 20, 12, STATE, **options),
        _case("grouped", 2, 33, 2, 16, 17, STATE, Hv=6, **options),
        _case("packed", 1, 150, 2, 9, 16, PACKED, N=5, **options),
        _case("strong", 1, 40, 2, 8, 6, **options),
        _case("wide keys", 1, 20, 1, 84, 20, **options),
        _case("step", 3, 1, 2, 32, 24, STATE, **options),
        _case("nosteps", 2, 0, 2, 4, 3, STATE, **options),
        _case("nobatch", 0, 5, 2, 4, 3, **options),
        _case("novalues", 2, 5, 2, 4, 0, STATE, **options),
    )


_ALL = ("D", "z", "dt_bias", "initial_state")
SSD = OpSpec(
    name="ssd",
    family="recurrence",
    cuda="emulated",
    paper="Dao and Gu 2024, arXiv 2405.21060",
    batch_invariant=False,
    inputs=_ssd_inputs,
    differentiable=("x", "dt", "A", "B", "C", *_ALL),
    flops=lambda case, pass_: 4.0 * math.prod(case.sizes[name] for name in "BTHPN") * SWEEPS[pass_],
    second_order=True,
    special=("packed", "groups"),
    cases=(
        _ssd("tiny", 2, 3, 1, 2, 3, ("D", *STATE)),
        _ssd("plain", 2, 70, 2, 32, 16),
        _ssd("all", 1, 129, 4, 12, 20, _ALL, G=2, dt_softplus=True),
        _ssd("groups", 2, 33, 6, 17, 16, ("D", *STATE), G=3),
        _ssd("limits", 2, 40, 2, 8, 8, ("dt_bias",), dt_softplus=True, dt_limit=(0.02, 0.2)),
        _ssd("packed", 1, 150, 2, 16, 9, ("D", "z", *PACKED), S=5),
        _ssd("strong", 1, 40, 2, 8, 6),
        _ssd("step", 3, 1, 2, 24, 32, _ALL, dt_softplus=True),
        _ssd("nosteps", 2, 0, 2, 3, 4, _ALL, dt_softplus=True),
        _ssd("nobatch", 0, 5, 2, 3, 4),
        _ssd("nowidth", 2, 5, 2, 0, 4, STATE),
    ),
    benchmarks=(
        Benchmark(_ssd("state64", 1, 2048, 8, 64, 64), (F32, BF16), BOTH, "compute"),
        Benchmark(_ssd("state128", 1, 2048, 8, 64, 128), (F32,), BOTH, "compute"),
        Benchmark(_ssd("step", 8, 1, 24, 64, 128, STATE), (F32,), FORWARD),
    ),
)


def _random_features(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes small q and k, so that signed features have no tiny denominators; states with M."""
    b, t, h, k, v = (case.sizes[name] for name in ("B", "T", "H", "K", "V"))
    rows, kind = 2 * k + 1, case.options.get("kind", "positive")
    tensors = {
        "q": random.normal(b, t, h, k) / 2,
        "k": random.normal(b, t, h, k) / 2,
        "v": random.normal(b, t, h, v),
        "weight": random.normal(rows, k),
    }
    n = case.sizes.get("N", b)
    if "cu_seqlens" in case.tensors:
        tensors["cu_seqlens"] = boundaries(n, t, random)
    if "S" in case.tensors:
        tensors["S"] = random.normal(n, h, rows, v + 1).abs() + 0.1
        tensors["M"] = random.normal(n, h, rows)
    assert kind == "positive" or "S" not in case.tensors
    return tensors


def _flat_pair(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of a state (S, M) to take S and M by name and return S e^M.

    M itself has no gradient.
    """

    @functools.wraps(function)
    def run(
        *args: Any, S: Tensor | None = None, M: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        if S is not None:
            options["initial_state"] = (S, M)
        o, (s, m) = function(*args, **options)
        return o, s * m.exp()[..., None]

    return run


_SUMS = ("S", "M")
RANDOM_FEATURES = OpSpec(
    name="random_feature_attention",
    family="recurrence",
    cuda="emulated",
    paper="Choromanski et al. 2020, arXiv 2009.14794",
    batch_invariant=False,
    inputs=_random_features,
    differentiable=("q", "k", "v", "weight", "S"),
    flops=_flops(4),
    second_order=True,
    special=("packed", "all"),
    adapt=_flat_pair,
    cases=(
        _case("tiny", 2, 3, 1, 3, 2, _SUMS),
        _case("plain", 2, 70, 2, 16, 20),
        _case("packed", 1, 70, 2, 8, 5, (*_SUMS, "cu_seqlens"), N=5),
        _case("all", 2, 40, 2, 8, 5, causal=False),
        _case("all packed", 1, 40, 2, 8, 5, ("cu_seqlens",), N=3, causal=False),
        _case("hyperbolic", 1, 40, 2, 8, 5, kind="hyperbolic", scale=0.5),
        _case("gaussian", 1, 40, 2, 8, 5, kind="gaussian", causal=False),
        _case("step", 3, 1, 2, 16, 8, _SUMS),
        _case("nosteps", 2, 0, 2, 4, 3),
        _case("nobatch", 0, 5, 2, 4, 3),
    ),
    benchmarks=(Benchmark(_case("head64", 1, 2048, 8, 64, 64), (F32, BF16), BOTH, "compute"),),
)

SPECS = (
    _spec(
        "gated_linear_attention",
        "Yang et al. 2023, arXiv 2312.06635",
        "channel",
        (
            *_cases(),
            _case("long", 1, 300, 1, 64, 64),
            _case("packed gv", 1, 70, 2, 9, 19, (*PACKED, "gv"), Hv=4, N=4),
            _case("heads gv", 2, 33, 2, 8, 21, (*STATE, "gv")),
            _case("only gv", 1, 40, 1, 20, 34, ("gv",), g=None),
            _case("strong gv", 1, 40, 2, 8, 6, ("gv",)),
            _case("step gv", 3, 1, 2, 8, 6, (*STATE, "gv")),
        ),
        differentiable=("q", "k", "v", "g", "gv", "initial_state"),
    ),
    _spec("delta_rule", "Yang et al. 2024, arXiv 2406.06484", "delta", _cases(l2norm=True)),
    _spec(
        "gated_delta_rule",
        "Yang et al. 2024, arXiv 2412.06464",
        "head delta",
        (*_cases(l2norm=True), _case("long", 1, 300, 1, 64, 64, l2norm=True)),
    ),
    _spec(
        "kimi_delta_attention",
        "Kimi Team 2025, arXiv 2510.26692",
        "channel delta",
        (*_cases(l2norm=True), _case("scaled", 1, 40, 2, 8, 8, l2norm=True, scale=0.7)),
    ),
    _spec(
        "dplr_delta_rule",
        "Peng et al. 2025, arXiv 2503.14456",
        "",
        (*_cases(), _case("heads", 2, 40, 2, 8, 8, Hv=4), _case("long", 1, 300, 1, 64, 64)),
        inputs=_inputs(_low_rank("g")),
        differentiable=("q", "k", "v", "a", "b", "g", "initial_state"),
        flops=_flops(4),
    ),
    _spec(
        "rwkv6",
        "Peng et al. 2024, arXiv 2404.05892",
        "",
        (*_cases(), _case("constant", 2, 40, 2, 8, 8, STATE), _case("long", 1, 300, 1, 64, 64)),
        inputs=_inputs(_bonus, "r"),
        differentiable=("r", "k", "v", "w", "u", "initial_state"),
    ),
    _spec(
        "rwkv7",
        "Peng et al. 2025, arXiv 2503.14456",
        "",
        _cases(),
        inputs=_inputs(_low_rank("w"), "r"),
        differentiable=("r", "w", "k", "v", "a", "b", "initial_state"),
        flops=_flops(4),
    ),
    _spec(
        "retention",
        "Sun et al. 2023, arXiv 2307.08621",
        "",
        (*_cases(), _case("normalised", 2, 40, 2, 8, 8, STATE, normalize=True)),
    ),
    _spec(
        "linear_attention",
        "Katharopoulos et al. 2020, arXiv 2006.16236",
        "",
        (
            *_cases(feature_map="elu1"),
            _case("identity", 1, 70, 2, 8, 8, STATE, feature_map="identity", scale=0.5),
            _case("exp", 1, 40, 2, 8, 8, feature_map="exp"),
            _case("softmax", 1, 40, 2, 8, 8, feature_map="softmax"),
            _case("taylor", 1, 40, 2, 4, 8, STATE, feature_map="taylor"),
            _case("square", 1, 40, 2, 4, 8, STATE, feature_map="square"),
            _case("gated", 2, 40, 2, 8, 8, STATE, Hv=4, feature_map="elu1"),
            _case("gated heads", 2, 20, 2, 8, 8, feature_map="elu1"),
            _case("all", 2, 40, 2, 8, 8, causal=False, Hv=4),
            _case("all packed", 1, 40, 2, 8, 8, ("cu_seqlens",), N=3, causal=False),
        ),
        inputs=_inputs(_feature_gates),
        differentiable=("q", "k", "v", "g", "beta", "initial_state"),
    ),
    RANDOM_FEATURES,
    SSD,
)

VARIANTS = (
    Variant(
        "linear attention with any feature map",
        ("linear_attention", "LinearAttention", "DeltaAttention"),
        "Katharopoulos et al. 2020, arXiv 2006.16236",
    ),
    Variant(
        "random features: FAVOR+ (positive, hyperbolic, orthogonal), trigonometric, unnormalised",
        (
            *("random_feature_attention", "random_features", "orthogonal_gaussian"),
            "Performer",
        ),
        "Choromanski et al. 2020, arXiv 2009.14794",
    ),
    Variant(
        "linear attention with decay: retention, GLA",
        ("gated_linear_attention", "retention", "GatedLinearAttention", "MultiScaleRetention"),
        "Yang et al. 2023, arXiv 2312.06635",
    ),
    Variant(
        "HGRN-2: keys are the forgotten shares", ("HGRN2",), "Qin et al. 2024, arXiv 2404.07904"
    ),
    Variant(
        "lightning attention: constant decays of heads and layers",
        ("LightningAttention",),
        "Qin et al. 2024, arXiv 2401.04658",
    ),
    Variant(
        "Based and ReBased: features of second order",
        ("linear_attention", "LinearAttention", "ReBased"),
        "Arora et al. 2024, arXiv 2402.18668",
    ),
    Variant(
        "state-space duality: Mamba-2",
        ("ssd", "Mamba2"),
        "Dao and Gu 2024, arXiv 2405.21060",
    ),
    Variant(
        "delta rules: DeltaNet, Gated DeltaNet, Kimi Delta Attention",
        ("delta_rule", "DeltaNet", "GatedDeltaNet", "KimiDeltaAttention"),
        "Yang et al. 2024, arXiv 2412.06464",
    ),
    Variant(
        "RWKV-4 to 7",
        ("rwkv4", "rwkv6", "rwkv7", "RWKV4TimeMix", "RWKV7TimeMix", "RWKVChannelMix"),
        "Peng et al. 2025, arXiv 2503.14456",
    ),
    Variant(
        "RWKV weighted means with exponent r . k: quadratic, recurrent",
        ("rwkv_quadratic", "rwkv_recurrent", "RWKVQuadratic", "RWKVRecurrent"),
        "this package",
    ),
    Variant(
        "xLSTM",
        ("mlstm", "slstm", "MLSTM", "SLSTM", "LargeMLSTM"),
        "Beck et al. 2024, arXiv 2405.04517",
    ),
    Variant(
        "Mamba",
        ("selective_scan", "Mamba"),
        "Gu and Dao 2023, arXiv 2312.00752",
    ),
    Variant(
        "Longhorn: decays of a regression's solution",
        ("longhorn_scan", "Longhorn"),
        "Liu et al. 2024, arXiv 2407.14207",
    ),
    Variant(
        "simplified selective SSM: no step sizes, one state for all channels",
        ("SimpleSelectiveSSM",),
        "Gu and Dao 2023, arXiv 2312.00752",
    ),
)
