"""OpSpecs of losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Random
from omniattn.testing.specs._cases import BF16, F32, TRAINING, gemm_flops


def _target(case: Case, random: Random) -> Tensor:
    target = random.integers(case.sizes["V"], case.sizes["M"])
    if "ignored" in case.tensors:
        target[::3] = case.options.get("ignore_index", -100)
    if "all ignored" in case.tensors:
        target[:] = -100
    return target


def _loss(label: str, M: int, V: int, tensors: tuple[str, ...] = (), **options: Any) -> Case:
    return Case(label, {"M": M, "V": V}, tensors, options)


def _loss_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    logits = random.normal(case.sizes["M"], case.sizes["V"]) * 3
    return {"logits": logits, "target": _target(case, random)}


def _fused_loss(
    label: str, M: int, V: int, K: int, tensors: tuple[str, ...] = (), **options: Any
) -> Case:
    return Case(label, {"M": M, "V": V, "K": K}, tensors, options)


def _fused_loss_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, v, k = (case.sizes[s] for s in "MVK")
    made = {"x": random.normal(m, k), "weight": random.normal(v, k) / max(k, 1) ** 0.5}
    if "bias" in case.tensors:
        made["bias"] = random.normal(v)
    return made | {"target": _target(case, random)}


OPTIONS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("ignored", ("ignored",), {}),
    ("ignore7", ("ignored",), {"ignore_index": 7, "reduction": "sum"}),
    ("smooth", ("ignored",), {"label_smoothing": 0.1}),
    ("zloss", ("ignored",), {"z_loss": 1e-2, "reduction": "none"}),
    ("everything", ("ignored",), {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 3.0}),
    ("nothing", ("all ignored",), {}),
)

CROSS_ENTROPY = OpSpec(
    name="cross_entropy",
    family="loss",
    cuda="emulated",
    paper="Milakov and Gimelshein 2018, arXiv 1805.02867",
    inputs=_loss_inputs,
    differentiable=("logits",),
    flops=lambda case, pass_: 4.0 * case.sizes["M"] * case.sizes["V"] * (1 + ("+" in pass_)),
    cases=(
        _loss("tiny", 3, 5, label_smoothing=0.1, z_loss=1e-2, softcap=2.0),
        *(_loss("plain", m, v) for m, v in [(4, 1), (5, 63), (64, 64), (7, 65), (9, 5003)]),
        *(_loss(label, 33, 100, tensors, **kw) for label, tensors, kw in OPTIONS),
        _loss("softcap", 7, 5003, softcap=4.0),
        _loss("empty", 0, 8),
    ),
    benchmarks=(Benchmark(_loss("plain", 1024, 32000), (F32, BF16), TRAINING),),
)

LINEAR_CROSS_ENTROPY = OpSpec(
    name="linear_cross_entropy",
    family="loss",
    cuda="emulated",
    paper="Wijmans et al. 2024, arXiv 2411.09009",
    inputs=_fused_loss_inputs,
    differentiable=("x", "weight", "bias"),
    flops=gemm_flops,
    cases=(
        _fused_loss("tiny", 3, 5, 4, ("bias",), label_smoothing=0.1, z_loss=1e-2, softcap=2.0),
        _fused_loss("plain", 65, 100, 33),
        _fused_loss("plain", 7, 3001, 64, ("bias",)),
        *(
            _fused_loss(label, 33, 100, 24, (*tensors, "bias"), **kw)
            for label, tensors, kw in OPTIONS
        ),
        _fused_loss("empty", 0, 8, 4),
    ),
    benchmarks=(
        Benchmark(_fused_loss("plain", 1024, 8192, 512), (F32, BF16), TRAINING, "compute"),
    ),
)

SPECS = (CROSS_ENTROPY, LINEAR_CROSS_ENTROPY)
