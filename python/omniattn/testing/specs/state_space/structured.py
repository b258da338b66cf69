"""OpSpecs of structured state-space models; complex numbers are (real, imaginary) pairs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BOTH, F32, SWEEPS


def _flops(per_term: int) -> Callable[[Case, Pass], float]:
    def flops(case: Case, pass_: Pass) -> float:
        s = case.sizes
        return float(per_term * s["H"] * s["N"] * s["L"] * SWEEPS[pass_])

    return flops


def _sizes(H: int, N: int, L: int) -> dict[str, int]:
    return {"H": H, "N": N, "L": L}


def _powers(label: str, H: int, N: int, L: int) -> Case:
    return Case(label, _sizes(H, N, L), options={"length": L})


def _terms(random: Random, case: Case) -> tuple[Tensor, Tensor]:
    """Makes coefficients, and numbers in the left half-plane."""
    shape = (case.sizes["H"], case.sizes["N"])
    decay = -0.5 * random.normal(*shape).exp()
    return random.normal(*shape, 2), torch.stack((decay, 3 * random.normal(*shape)), -1)


def _power_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    c, x = _terms(random, case)
    step = 0.3 if case.sizes["L"] < 1000 else 0.01
    return {"c": c, "x": step * x}


VANDERMONDE = OpSpec(
    name="vandermonde",
    family="structured",
    cuda="emulated",
    paper="Gu et al. 2022, arXiv 2206.11893",
    inputs=_power_inputs,
    differentiable=("c", "x"),
    flops=_flops(4),
    dtypes=(torch.float64, torch.float32),
    second_order=True,
    special=("block", "long"),
    cases=(
        _powers("tiny", 2, 3, 4),
        _powers("plain", 3, 5, 200),
        _powers("block", 2, 4, 64),
        _powers("odd", 1, 17, 327),
        _powers("long", 2, 3, 4500),
        _powers("one", 2, 3, 1),
        _powers("nosteps", 2, 3, 0),
        _powers("noterms", 2, 0, 5),
        _powers("norows", 0, 3, 5),
    ),
    benchmarks=(Benchmark(_powers("s4d", 512, 32, 4096), (F32,), BOTH, "compute"),),
)


def _poles(label: str, H: int, N: int, L: int) -> Case:
    return Case(label, _sizes(H, N, L))


def _pole_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes z on the imaginary axis, where the bilinear transform maps the unit circle."""
    v, w = _terms(random, case)
    length = case.sizes["L"]
    angles = (torch.arange(length, dtype=torch.float64) - length / 2) * (math.pi / (length + 1))
    z = torch.stack((torch.zeros_like(angles), angles.tan()), -1)
    return {"v": v, "z": z.to(v), "w": w}


CAUCHY = OpSpec(
    name="cauchy",
    family="structured",
    cuda="emulated",
    paper="Gu, Goel and Re 2021, arXiv 2111.00396",
    inputs=_pole_inputs,
    differentiable=("v", "w"),
    flops=_flops(20),
    dtypes=(torch.float64, torch.float32),
    second_order=True,
    special=("long",),
    cases=(
        _poles("tiny", 2, 3, 4),
        _poles("plain", 3, 5, 131),
        _poles("odd", 1, 17, 33),
        _poles("long", 2, 3, 2049),
        _poles("one", 2, 3, 1),
        _poles("nopoints", 2, 3, 0),
        _poles("noterms", 2, 0, 5),
        _poles("norows", 0, 3, 5),
    ),
    benchmarks=(Benchmark(_poles("s4", 512, 32, 2049), (F32,), BOTH, "compute"),),
)

SPECS = (VANDERMONDE, CAUCHY)

VARIANTS = (
    Variant(
        "linear time-invariant SSM (MIMO): recurrence, one-step delay",
        ("ssm_recurrence", "ssm_kernel"),
        "Gu et al. 2021, arXiv 2110.13985",
    ),
    Variant(
        "linear time-invariant SSM: FFT convolution, per channel or MIMO",
        ("fft_conv", "ssm_kernel"),
        "Gu et al. 2021, arXiv 2110.13985",
    ),
    Variant(
        "discretisation: zero-order hold, bilinear, Euler, Mamba's",
        ("discretize",),
        "Gu, Goel and Re 2021, arXiv 2111.00396",
    ),
    Variant(
        "HiPPO-LegS and its NPLR form",
        ("hippo_legs", "nplr", "ssm_init"),
        "Gu et al. 2020, arXiv 2008.07669",
    ),
    Variant(
        "HiPPO-LegT, LagT and FouT, NPLR of rank two",
        ("hippo", "nplr", "S4"),
        "Gu et al. 2022, arXiv 2206.12037",
    ),
    Variant(
        "S4 (DPLR): convolution and recurrence",
        ("s4", "s4_kernel", "S4"),
        "Gu, Goel and Re 2021, arXiv 2111.00396",
    ),
    Variant(
        "S4D (Lin, Inv, Real, LegS): convolution and recurrence",
        ("s4d", "s4d_kernel", "S4D"),
        "Gu et al. 2022, arXiv 2206.11893",
    ),
)
