"""OpSpecs of convolutions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, BOTH, F32, FORWARD, SWEEPS, boundaries

ALL = ("bias", "initial_state")
PACKED = (*ALL, "cu_seqlens")


def _conv(
    label: str,
    B: int,
    T: int,
    D: int,
    K: int,
    tensors: tuple[str, ...] = ALL,
    activation: str | None = "silu",
    final: bool = True,
    N: int | None = None,
) -> Case:
    options = {"activation": activation, "return_final_state": final}
    sizes = {"B": B, "T": T, "D": D, "K": K} | ({} if N is None else {"N": N})
    return Case(label, sizes, tensors, options)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, d, k = (case.sizes[letter] for letter in "BTDK")
    n = case.sizes.get("N", b)
    shapes = {"x": (b, t, d), "weight": (d, k), "bias": (d,), "initial_state": (n, d, k - 1)}
    names = ("x", "weight", *(name for name in case.tensors if name in shapes))
    tensors = {name: random.normal(*shapes[name]) for name in names}
    if "cu_seqlens" in case.tensors:
        tensors["cu_seqlens"] = boundaries(n, t, random)
    return tensors


def _flops(case: Case, pass_: Pass) -> float:
    s = case.sizes
    return 2.0 * s["B"] * s["T"] * s["D"] * s["K"] * SWEEPS[pass_]


CAUSAL_CONV1D = OpSpec(
    name="causal_conv1d",
    family="conv",
    cuda="emulated",
    paper="Gu and Dao 2023, arXiv 2312.00752",
    inputs=_inputs,
    differentiable=("x", "weight", "bias", "initial_state"),
    flops=_flops,
    second_order=True,
    special=("state", "many", "short", "pointwise", "packed"),
    cases=(
        _conv("tiny", 2, 3, 3, 3),
        _conv("mamba", 2, 65, 100, 4, ("bias",), final=False),
        _conv("bare", 3, 33, 17, 4, (), None, final=False),
        _conv("state", 2, 37, 130, 4),
        _conv("two", 2, 9, 33, 2, activation=None),
        _conv("three", 1, 10, 64, 3, ("bias",)),
        _conv("many", 2, 12, 31, 7),
        _conv("pointwise", 2, 5, 48, 1),
        _conv("short", 3, 2, 65, 4),
        _conv("decode", 4, 1, 96, 4),
        _conv("long", 1, 3000, 19, 4, final=False),
        _conv("packed", 1, 70, 33, 4, PACKED, N=5),
        _conv("packed many", 1, 41, 18, 6, PACKED, None, N=30),
        _conv("packed bare", 1, 50, 65, 2, ("cu_seqlens",), final=False, N=3),
        _conv("nosteps", 2, 0, 8, 4),
        _conv("nobatch", 0, 5, 8, 4),
        _conv("nochannels", 2, 5, 0, 4),
    ),
    benchmarks=(
        Benchmark(_conv("mamba", 1, 1024, 1536, 4, ("bias",), final=False), (F32, BF16), BOTH),
        Benchmark(_conv("mamba", 8, 1024, 1536, 4, ("bias",), final=False), (F32,), BOTH),
        Benchmark(_conv("decode", 8, 1, 1536, 4), (F32,), FORWARD),
    ),
)


def _dynamic(
    label: str, B: int, T: int, D: int, H: int, K: int, tensors: tuple[str, ...] = (), **more: Any
) -> Case:
    counts = {"N": more.pop("N")} if "N" in more else {}
    sizes = {"B": B, "T": T, "D": D, "H": H, "K": K} | counts
    return Case(label, sizes, tensors, {"return_final_state": True} | more)


def _dynamic_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, k = (case.sizes[letter] for letter in "BTHK")
    tensors = _inputs(case, random)
    del tensors["weight"]
    taps = random.normal(b, t, h, k)
    return {"x": tensors.pop("x"), "taps": taps, **tensors}


DYNAMIC_CONV1D = OpSpec(
    name="dynamic_conv1d",
    family="conv",
    cuda="emulated",
    paper="Wu et al. 2019, arXiv 1901.10430",
    inputs=_dynamic_inputs,
    differentiable=("x", "taps", "initial_state"),
    flops=_flops,
    second_order=True,
    special=("packed",),
    cases=(
        _dynamic("tiny", 2, 3, 4, 2, 3, ("initial_state",)),
        _dynamic("heads", 2, 21, 24, 3, 4, ("initial_state",), activation="silu", residual=True),
        _dynamic("channels", 1, 17, 9, 9, 5, return_final_state=False, residual=True),
        _dynamic("packed", 1, 40, 12, 4, 4, ("initial_state", "cu_seqlens"), N=5),
        _dynamic("pointwise", 2, 5, 8, 2, 1),
        _dynamic("short", 3, 2, 6, 3, 4, ("initial_state",)),
        _dynamic("step", 4, 1, 16, 4, 4, ("initial_state",)),
        _dynamic("nosteps", 2, 0, 8, 2, 4, ("initial_state",)),
    ),
    benchmarks=(
        Benchmark(_dynamic("heads16", 1, 1024, 1024, 16, 4), (F32, BF16), BOTH),
        Benchmark(_dynamic("channels", 1, 1024, 1024, 1024, 4), (F32,), BOTH),
    ),
)

SPECS = (CAUSAL_CONV1D, DYNAMIC_CONV1D)

VARIANTS = (
    Variant(
        "dynamic convolution: causal filters of each token",
        ("dynamic_conv1d",),
        "Wu et al. 2019, arXiv 1901.10430",
    ),
    Variant(
        "causal depthwise convolution with SiLU",
        ("causal_conv1d", "ShortConvolution"),
        "Gu and Dao 2023, arXiv 2312.00752",
    ),
)
