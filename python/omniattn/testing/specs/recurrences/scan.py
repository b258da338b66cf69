"""OpSpecs of scans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn.reference.precision import widen
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random
from omniattn.testing.specs._cases import BF16, BOTH, F32, FORWARD, SWEEPS, boundaries, flat_state
from omniattn.testing.specs.attention.attention import GRADIENT_FACTOR, GRADIENT_FACTORS

STATE = ("initial_state",)
PACKED = ("initial_state", "cu_seqlens")
ALL = ("D", "z", "delta_bias")
COMPLEX = ("A", "B", "C", "initial_state")
CONSTANT = ("constant_B", "constant_C", "D", "initial_state")


def _boundaries(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes cu_seqlens of N packed sequences, if the case has them."""
    if "cu_seqlens" not in case.tensors:
        return {}
    return {"cu_seqlens": boundaries(case.sizes["N"], case.sizes["T"], random)}


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


def _mlstm(
    label: str,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    tensors: tuple[str, ...] = (),
    *,
    N: int | None = None,
    **options: Any,
) -> Case:
    sizes = {"B": B, "T": T, "H": H, "K": K, "V": V}
    return Case(label, sizes if N is None else sizes | {"N": N}, tensors, options)


def _mlstm_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, k, v = (case.sizes[letter] for letter in "BTHKV")
    tensors = {
        "q": random.normal(b, t, h, k),
        "k": random.normal(b, t, h, k),
        "v": random.normal(b, t, h, v),
        "i": random.normal(b, t, h),
        "f": (-1 if case.options.get("forget_gate") == "exp" else 3) + random.normal(b, t, h),
    } | _boundaries(case, random)
    if "C" in case.tensors:
        n = case.sizes.get("N", b)
        tensors |= {"C": random.normal(n, h, k, v), "n": random.normal(n, h, k)}
        tensors["m"] = random.normal(n, h)
    return tensors


MATRIX = ("C", "n", "m")

MLSTM = OpSpec(
    name="mlstm",
    family="scan",
    cuda="emulated",
    paper="Beck et al. 2024, arXiv 2405.04517",
    batch_invariant=False,
    inputs=_mlstm_inputs,
    differentiable=("q", "k", "v", "i", "f", "C", "n", "m"),
    flops=_flops(4, "B", "T", "H", "K", "V"),
    # Differences of sums over K and V: a step's effect through decays - that through its factor.
    gradient_factors={"i": 6.0, "f": 6.0},
    second_order=True,
    special=("packed", "exp"),
    adapt=flat_state(*MATRIX),
    cases=(
        _mlstm("tiny", 2, 3, 1, 3, 2, MATRIX),
        _mlstm("plain", 2, 70, 2, 16, 20),
        _mlstm("packed", 1, 70, 2, 9, 7, (*MATRIX, "cu_seqlens"), N=5),
        _mlstm("exp", 1, 40, 2, 8, 8, forget_gate="exp", scale=0.5, eps=1e-3),
        _mlstm("step", 3, 1, 2, 32, 24, MATRIX),
        _mlstm("nosteps", 2, 0, 2, 4, 3, MATRIX),
        _mlstm("nobatch", 0, 5, 2, 4, 3),
        _mlstm("novalues", 2, 5, 2, 4, 0),
    ),
    benchmarks=(
        Benchmark(_mlstm("model", 1, 2048, 4, 128, 128), (F32, BF16), BOTH, "compute"),
        Benchmark(_mlstm("step", 8, 1, 4, 128, 128, MATRIX), (F32,), FORWARD),
    ),
)


def _slstm(
    label: str,
    B: int,
    T: int,
    H: int,
    D: int,
    tensors: tuple[str, ...] = (),
    *,
    N: int | None = None,
    **options: Any,
) -> Case:
    sizes = {"B": B, "T": T, "H": H, "D": D}
    return Case(label, sizes if N is None else sizes | {"N": N}, tensors, options)


def _slstm_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, d = (case.sizes[letter] for letter in "BTHD")
    x = random.normal(b, t, 4, h, d)
    x[:, :, 1] += 2
    tensors = {"x": x, "r": random.normal(4, h, d, d) / max(1, d) ** 0.5}
    tensors |= _boundaries(case, random)
    if "initial_state" in case.tensors:
        hidden, c, n, m = random.normal(4, case.sizes.get("N", b), h, d)
        tensors["initial_state"] = torch.stack((hidden, c, n.abs() + 1, m), 1)
    return tensors


SLSTM = OpSpec(
    name="slstm",
    family="scan",
    cuda="emulated",
    paper="Beck et al. 2024, arXiv 2405.04517",
    inputs=_slstm_inputs,
    differentiable=("x", "r", "initial_state"),
    flops=_flops(8, "B", "T", "H", "D", "D"),
    second_order=True,
    special=("packed", "exp", "group"),
    cases=(
        _slstm("tiny", 2, 3, 1, 3, STATE),
        _slstm("plain", 2, 20, 2, 17),
        _slstm("group", 11, 5, 2, 8, STATE),
        _slstm("packed", 1, 60, 2, 9, PACKED, N=5),
        _slstm("exp", 1, 25, 2, 8, forget_gate="exp"),
        _slstm("wide", 1, 6, 1, 70, STATE),
        _slstm("step", 3, 1, 2, 24, STATE),
        _slstm("nosteps", 2, 0, 2, 4, STATE),
        _slstm("nobatch", 0, 5, 2, 4),
        _slstm("nowidth", 2, 5, 2, 0),
    ),
    benchmarks=(
        Benchmark(_slstm("model", 1, 2048, 4, 64), (F32, BF16), BOTH, "compute"),
        Benchmark(_slstm("batch", 8, 512, 4, 64), (F32,), BOTH, "compute"),
        Benchmark(_slstm("step", 8, 1, 4, 64, STATE), (F32,), FORWARD),
    ),
)


def _selective(
    label: str,
    B: int,
    T: int,
    D: int,
    N: int,
    tensors: tuple[str, ...] = ALL,
    *,
    delta: float = 0.0,
    decay: float = 1.0,
    G: int | None = None,
    sequences: int | None = None,
    softplus: bool = True,
    imaginary: tuple[str, ...] = (),
) -> Case:
    """Makes a case; `delta` is added to the steps, `decay` multiplies A, `imaginary` names complex
    tensors."""
    tensors = (*tensors, *(f"{name}_imag" for name in imaginary))
    options = {"delta_softplus": True} if softplus else {}
    sizes = {"B": B, "T": T, "D": D, "N": N}
    sizes |= {} if G is None else {"G": G}
    sizes |= {} if sequences is None else {"S": sequences}
    return _SelectiveCase(label, sizes, tensors, options, delta, decay)


@dataclass(frozen=True)
class _SelectiveCase(Case):
    delta: float = 0.0
    decay: float = 1.0


def _selective_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    assert isinstance(case, _SelectiveCase)
    b, t, d, n = (case.sizes[letter] for letter in "BTDN")
    varying = (b, t, n) if "G" not in case.sizes else (b, t, case.sizes["G"], n)

    def weights(name: str) -> Tensor:
        return random.normal(*((d, n) if f"constant_{name}" in case.tensors else varying))

    delta = random.normal(b, t, d)
    tensors = {
        "u": random.normal(b, t, d),
        "delta": delta + case.delta if case.options else delta.abs() + 0.1,
        "A": -(random.normal(d, n) / 2).exp() * case.decay,
        "B": weights("B"),
        "C": weights("C"),
    }
    others = {"D": (d,), "z": (b, t, d), "delta_bias": (d,)}
    others["initial_state"] = (case.sizes.get("S", b), d, n)
    tensors |= {
        name: random.normal(*shape) for name, shape in others.items() if name in case.tensors
    }
    for name in ("A", "B", "C", "initial_state"):
        if f"{name}_imag" in case.tensors and name in tensors:
            tensors[f"{name}_imag"] = random.normal(*tensors[name].shape) * case.decay
    if "cu_seqlens" in case.tensors:
        tensors["cu_seqlens"] = boundaries(case.sizes["S"], t, random)
    return tensors


def _of_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of complex tensors to take real and imaginary parts separately."""

    @functools.wraps(function)
    def run(
        *args: Any,
        A_imag: Tensor | None = None,
        B_imag: Tensor | None = None,
        C_imag: Tensor | None = None,
        initial_state_imag: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor]:
        parts = {"A": A_imag, "B": B_imag, "C": C_imag, "initial_state": initial_state_imag}
        for name, part in parts.items():
            if part is not None:
                if given.get(name) is None:
                    raise ValueError(f"{name}_imag must come with {name}, got None")
                given[name] = torch.complex(widen(given[name]), widen(part))
        y, state = function(*args, **given)
        if state.is_complex():  # view_as_real refuses some strides of an empty gradient
            state = torch.stack((state.real, state.imag), -1)
        return y, state

    return run


SELECTIVE_SCAN = OpSpec(
    name="selective_scan",
    family="scan",
    cuda="emulated",
    paper="Gu and Dao 2023, arXiv 2312.00752",
    inputs=_selective_inputs,
    differentiable=(
        *("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"),
        *("A_imag", "B_imag", "C_imag", "initial_state_imag"),
    ),
    flops=_flops(9, "B", "T", "D", "N"),
    second_order=True,
    special=("group", "packed", "constant", "complex"),
    adapt=_of_parts,
    cases=(
        _selective("tiny", 2, 3, 3, 2, (*ALL, *STATE)),
        _selective("plain", 2, 37, 35, 16),
        _selective("bare", 2, 9, 20, 5, (), softplus=False),
        _selective("group", 1, 35, 42, 7, (*ALL, *STATE), G=3),
        _selective("blocks", 1, 5, 150, 4, (*ALL, *STATE)),
        _selective("packed", 1, 70, 9, 4, (*ALL, *PACKED), sequences=5),
        _selective("constant", 2, 12, 19, 5, CONSTANT, softplus=False),
        _selective("input", 2, 12, 19, 9, ("constant_B", "z"), G=1),
        _selective("strong", 1, 40, 17, 4, (*ALL, *STATE), delta=20.0, decay=1e4),
        _selective("weak", 1, 70, 17, 4, (*ALL, *STATE), delta=-12.0),
        _selective("wide", 1, 9, 5, 70, (*ALL, *STATE)),
        _selective("long", 1, 200, 5, 16),
        _selective("complex", 2, 37, 20, 5, (*ALL, *STATE), imaginary=COMPLEX),
        _selective("turning", 2, 36, 18, 9, ("D", "z"), imaginary=("A",)),
        _selective("turned", 1, 40, 9, 4, (*ALL, *PACKED), sequences=4, imaginary=COMPLEX),
        _selective("parts", 1, 34, 12, 3, CONSTANT, imaginary=COMPLEX, softplus=False),
        _selective("grouped", 1, 9, 150, 2, G=2, imaginary=("A", "C")),
        _selective("fast", 1, 40, 17, 4, (*ALL, *STATE), delta=5.0, decay=30.0, imaginary=COMPLEX),
        _selective("step", 3, 1, 40, 16, (*ALL, *STATE)),
        _selective("nosteps", 2, 0, 4, 3, (*ALL, *STATE)),
        _selective("nobatch", 0, 5, 4, 3),
        _selective("nochannels", 2, 5, 0, 3),
        _selective("nostates", 2, 5, 3, 0),
    ),
    benchmarks=(
        Benchmark(_selective("model", 1, 1024, 1536, 16), (F32, BF16), BOTH, "compute"),
        Benchmark(_selective("batch", 4, 512, 1536, 16), (F32,), BOTH, "compute"),
        Benchmark(_selective("step", 8, 1, 1536, 16, (*ALL, *STATE)), (F32,), FORWARD),
    ),
)


def _longhorn_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    tensors = _selective_inputs(case, random)
    del tensors["A"]
    return tensors


LONGHORN_SCAN = OpSpec(
    name="longhorn_scan",
    family="scan",
    cuda="emulated",
    paper="Liu et al. 2024, arXiv 2407.14207",
    inputs=_longhorn_inputs,
    differentiable=("u", "delta", "B", "C", "D", "z", "delta_bias", "initial_state"),
    flops=_flops(9, "B", "T", "D", "N"),
    second_order=True,
    special=("group", "packed"),
    cases=(
        _selective("tiny", 2, 3, 3, 2, (*ALL, *STATE), softplus=False),
        _selective("plain", 2, 37, 35, 16, softplus=False),
        _selective("bare", 2, 9, 20, 5, (), softplus=False),
        _selective("group", 1, 35, 42, 7, (*ALL, *STATE), G=3, softplus=False),
        _selective("blocks", 1, 5, 150, 4, (*ALL, *STATE), softplus=False),
        _selective("packed", 1, 70, 9, 4, (*ALL, *PACKED), sequences=5, softplus=False),
        _selective("wide", 1, 9, 5, 70, (*ALL, *STATE), softplus=False),
        _selective("step", 3, 1, 40, 16, (*ALL, *STATE), softplus=False),
        _selective("nosteps", 2, 0, 4, 3, (*ALL, *STATE), softplus=False),
        _selective("nobatch", 0, 5, 4, 3, softplus=False),
        _selective("nochannels", 2, 5, 0, 3, softplus=False),
        _selective("nostates", 2, 5, 3, 0, softplus=False),
    ),
    benchmarks=(
        Benchmark(
            _selective("model", 1, 1024, 1536, 16, softplus=False), (F32, BF16), BOTH, "compute"
        ),
        Benchmark(
            _selective("step", 8, 1, 1536, 16, (*ALL, *STATE), softplus=False), (F32,), FORWARD
        ),
    ),
)


def _rwkv(
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
) -> Case:
    sizes = {"B": B, "T": T, "H": H, "Hv": Hv or H, "K": K, "V": V}
    return Case(label, sizes if N is None else sizes | {"N": N}, tensors)


def _rwkv_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes decays per head, or per channel if the case has them."""
    b, t, h, hv, k, v = (case.sizes[name] for name in ("B", "T", "H", "Hv", "K", "V"))
    width = (v,) if "channels" in case.label else ()
    tensors = {
        "r": random.normal(b, t, h, k),
        "k": random.normal(b, t, h, k) / max(1, k) ** 0.5,
        "v": random.normal(b, t, hv, v),
        "w": random.normal(hv, *width).exp() / 4,
    } | _boundaries(case, random)
    if "initial_state" in case.tensors:
        s, n, top = random.normal(3, case.sizes.get("N", b), hv, v)
        tensors["initial_state"] = torch.stack((s, n.abs() + 1, top), 1)
    return tensors


_BENCHED = _rwkv("head64", 1, 1024, 8, 64, 64)

RWKV_QUADRATIC = OpSpec(
    name="rwkv_quadratic",
    family="scan",
    cuda="emulated",
    paper="this package",
    inputs=_rwkv_inputs,
    differentiable=("r", "k", "v", "w"),
    flops=_flops(2, "B", "T", "T", "Hv", "K"),
    gradient_factor=GRADIENT_FACTOR,
    gradient_factors={"w": GRADIENT_FACTORS["alibi_slopes"]},
    second_order=True,
    special=("packed", "channels"),
    cases=(
        _rwkv("tiny", 2, 3, 1, 3, 2),
        _rwkv("plain", 2, 70, 2, 16, 20, Hv=4),
        _rwkv("packed", 1, 70, 2, 9, 7, ("cu_seqlens",), N=5),
        _rwkv("channels", 2, 35, 2, 8, 5, Hv=4),
        _rwkv("packed channels", 1, 40, 2, 8, 3, ("cu_seqlens",), N=3),
        _rwkv("nosteps", 2, 0, 2, 4, 3),
        _rwkv("nobatch", 0, 5, 2, 4, 3),
        _rwkv("novalues", 2, 5, 2, 4, 0),
    ),
    benchmarks=(Benchmark(_BENCHED, (F32, BF16), BOTH, "compute"),),
)

RWKV_RECURRENT = OpSpec(
    name="rwkv_recurrent",
    family="scan",
    cuda="emulated",
    paper="this package",
    inputs=_rwkv_inputs,
    differentiable=("r", "k", "v", "w", "initial_state"),
    flops=_flops(20, "B", "T", "Hv", "V"),
    second_order=True,
    special=("packed", "channels"),
    cases=(
        _rwkv("tiny", 2, 3, 1, 3, 2, STATE),
        _rwkv("plain", 2, 70, 2, 16, 20, Hv=4),
        _rwkv("packed", 1, 70, 2, 9, 7, PACKED, N=5),
        _rwkv("channels", 2, 35, 2, 8, 5, STATE, Hv=4),
        _rwkv("step", 3, 1, 2, 32, 24, STATE),
        _rwkv("nosteps", 2, 0, 2, 4, 3, STATE),
        _rwkv("nobatch", 0, 5, 2, 4, 3),
        _rwkv("novalues", 2, 5, 2, 4, 0),
    ),
    benchmarks=(Benchmark(_BENCHED, (F32, BF16), BOTH, "compute"),),
)

SPECS = (RWKV4, RWKV_QUADRATIC, RWKV_RECURRENT, MLSTM, SLSTM, SELECTIVE_SCAN, LONGHORN_SCAN)
