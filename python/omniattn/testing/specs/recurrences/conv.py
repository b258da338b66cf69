"""OpSpecs of convolutions."""

from __future__ import annotations

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
        _conv("vectors", 2, 70, 40, 4),
        _conv("vectors of two", 2, 37, 16, 2, activation=None),
        _conv("pointwise", 2, 5, 48, 1),
        _conv("short", 3, 2, 65, 4),
        _conv("decode", 4, 1, 96, 4),
        _conv("long", 1, 3000, 19, 4, final=False),
        _conv("packed", 1, 70, 33, 4, PACKED, N=5),
        _conv("packed vectors", 1, 90, 24, 4, PACKED, N=7),
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
    label: str,
    sizes: tuple[int, int, int, int, int],
    tensors: tuple[str, ...] = ("initial_state",),
    activation: str | None = "silu",
    residual: bool = False,
    final: bool = True,
    N: int | None = None,
) -> Case:
    options = {"activation": activation, "residual": residual, "return_final_state": final}
    named = dict(zip("BTDHK", sizes, strict=True)) | ({} if N is None else {"N": N})
    return Case(label, named, tensors, options)


def _dynamic_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, d, h, k = (case.sizes[letter] for letter in "BTDHK")
    n = case.sizes.get("N", b)
    tensors = {"x": random.normal(b, t, d), "taps": random.normal(b, t, h, k)}
    if "initial_state" in case.tensors:
        tensors["initial_state"] = random.normal(n, d, k - 1)
    if "cu_seqlens" in case.tensors:
        tensors["cu_seqlens"] = boundaries(n, t, random)
    return tensors


DYNAMIC_CONV1D = OpSpec(
    name="dynamic_conv1d",
    family="conv",
    cuda="emulated",
    paper="Wu et al. 2019, arXiv 1901.10430",
    inputs=_dynamic_inputs,
    differentiable=("x", "taps", "initial_state"),
    flops=_flops,
    second_order=True,
    special=("state", "narrow", "short", "packed"),
    cases=(
        _dynamic("tiny", (2, 3, 4, 2, 3)),
        _dynamic("heads", (2, 37, 96, 3, 4), (), None, final=False),
        _dynamic("state", (2, 37, 66, 2, 5), residual=True),
        _dynamic("one head", (1, 18, 100, 1, 4), (), residual=True),
        _dynamic("narrow", (2, 23, 90, 18, 4)),
        _dynamic("channels", (2, 21, 70, 70, 4), residual=True),
        _dynamic("many", (1, 12, 34, 2, 9), activation=None),
        _dynamic("pointwise", (2, 5, 48, 3, 1)),
        _dynamic("short", (3, 2, 65, 5, 4)),
        _dynamic("decode", (4, 1, 96, 4, 4)),
        _dynamic("long", (1, 1500, 38, 2, 4), final=False),
        _dynamic("packed", (1, 70, 33, 3, 4), ("initial_state", "cu_seqlens"), None, True, N=5),
        _dynamic("packed wide", (1, 60, 64, 2, 4), ("initial_state", "cu_seqlens"), N=7),
        _dynamic("packed bare", (1, 50, 66, 66, 2), ("cu_seqlens",), final=False, N=9),
        _dynamic("nosteps", (2, 0, 8, 2, 4)),
        _dynamic("nobatch", (0, 5, 8, 2, 4)),
        _dynamic("nochannels", (2, 5, 0, 2, 4)),
    ),
    benchmarks=(
        Benchmark(_dynamic("heads", (1, 1024, 1024, 16, 4), (), None, final=False), (F32,), BOTH),
    ),
)

SPECS = (CAUSAL_CONV1D, DYNAMIC_CONV1D)

VARIANTS = (
    Variant(
        "causal depthwise convolution with SiLU",
        ("causal_conv1d", "ShortConvolution"),
        "Gu and Dao 2023, arXiv 2312.00752",
    ),
    Variant(
        "dynamic convolution: causal filters of each token",
        ("dynamic_conv1d",),
        "Wu et al. 2019, arXiv 1901.10430",
    ),
)
