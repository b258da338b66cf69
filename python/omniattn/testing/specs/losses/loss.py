"""OpSpecs of losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
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


def _targets(case: Case, random: Random) -> dict[str, Tensor]:
    made = {"target": _target(case, random)}
    if "class_weight" in case.tensors:
        made["class_weight"] = random.uniform(case.sizes["V"])
    return made


def _loss_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    logits = random.normal(case.sizes["M"], case.sizes["V"]) * 3
    return {"logits": logits} | _targets(case, random)


def _fused_loss(
    label: str, M: int, V: int, K: int, tensors: tuple[str, ...] = (), **options: Any
) -> Case:
    return Case(label, {"M": M, "V": V, "K": K}, tensors, options)


def _linear(case: Case, random: Random) -> dict[str, Tensor]:
    m, v, k = (case.sizes[s] for s in "MVK")
    made = {"x": random.normal(m, k), "weight": random.normal(v, k) / max(k, 1) ** 0.5}
    if "bias" in case.tensors:
        made["bias"] = random.normal(v)
    return made


def _fused_loss_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    return _linear(case, random) | _targets(case, random)


def _jsd_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = {n: random.normal(case.sizes["M"], case.sizes["V"]) * 2 for n in ("student", "teacher")}
    if case.options.get("log_probs"):
        made = {name: t.double().log_softmax(-1).to(t) for name, t in made.items()}
    if "impossible" in case.tensors:  # classes with teacher probability 0
        made["teacher"][:, ::3] = -float("inf")
    if "ignored" in case.tensors:
        made["target"] = _target(case, random)
    return made


def _fused_jsd(
    label: str, M: int, V: int, K: int, J: int, tensors: tuple[str, ...] = (), **options: Any
) -> Case:
    return Case(label, {"M": M, "V": V, "K": K, "J": J}, tensors, options)


def _fused_jsd_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, v, j = (case.sizes[s] for s in "MVJ")
    made = _linear(case, random)
    made["teacher_x"] = 3 * random.normal(m, j)
    made["teacher_weight"] = random.normal(v, j) / max(j, 1) ** 0.5
    if "bias" in case.tensors:
        made["teacher_bias"] = random.normal(v)
    if "ignored" in case.tensors:
        made["target"] = _target(case, random)
    return made


def _fused_jsd_flops(case: Case, pass_: Pass) -> float:
    """Counts the FLOPs of a fused loss plus the product for the teacher's logits."""
    m, v, j = (case.sizes[s] for s in "MVJ")
    return gemm_flops(case, pass_) + (2.0 * m * v * j if "forward" in pass_ else 0.0)


OPTIONS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("ignored", ("ignored",), {}),
    ("ignore7", ("ignored",), {"ignore_index": 7, "reduction": "sum"}),
    ("smooth", ("ignored",), {"label_smoothing": 0.1}),
    ("zloss", ("ignored",), {"z_loss": 1e-2, "reduction": "none"}),
    ("weighted", ("ignored", "class_weight"), {"z_loss": 1e-3}),
    ("warm", ("ignored",), {"temperature": 2.5}),
    (
        "everything",
        ("ignored", "class_weight"),
        {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 3.0, "temperature": 0.7},
    ),
    ("nothing", ("all ignored",), {}),
)

CROSS_ENTROPY = OpSpec(
    name="cross_entropy",
    family="loss",
    cuda="emulated",
    paper="Milakov and Gimelshein 2018, arXiv 1805.02867",
    inputs=_loss_inputs,
    differentiable=("logits",),
    second_order=True,
    flops=lambda case, pass_: 4.0 * case.sizes["M"] * case.sizes["V"] * (1 + ("+" in pass_)),
    special=("everything",),
    cases=(
        _loss("tiny", 3, 5, label_smoothing=0.1, z_loss=1e-2, softcap=2.0),
        *(_loss("plain", m, v) for m, v in [(4, 1), (5, 63), (64, 64), (7, 65), (9, 5003)]),
        *(_loss(label, 33, 100, tensors, **kw) for label, tensors, kw in OPTIONS),
        _loss("softcap", 7, 5003, softcap=4.0),
        _loss("smooth", 7, 5003, ("class_weight",), label_smoothing=0.1),
        _loss("empty", 0, 8),
    ),
    benchmarks=(
        Benchmark(_loss("plain", 1024, 32000), (F32, BF16), TRAINING),
        Benchmark(
            _loss("weighted", 1024, 32000, ("class_weight",), label_smoothing=0.1), (F32,), TRAINING
        ),
        Benchmark(_loss("zloss", 1024, 8192, z_loss=1e-4, softcap=30.0), (F32,), TRAINING),
    ),
)

LINEAR_CROSS_ENTROPY = OpSpec(
    name="linear_cross_entropy",
    family="loss",
    cuda="emulated",
    paper="Wijmans et al. 2024, arXiv 2411.09009",
    inputs=_fused_loss_inputs,
    differentiable=("x", "weight", "bias"),
    flops=gemm_flops,
    special=("everything",),
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

#: gradient_factor if the gradients of the logits are rounded, as on CUDA.
ROUNDED_LOGITS = 4.0

LINEAR_LOG_PROB = OpSpec(
    name="linear_log_prob",
    family="loss",
    cuda="emulated",
    paper="Rafailov et al. 2023, arXiv 2305.18290",
    inputs=_fused_loss_inputs,
    differentiable=("x", "weight", "bias"),
    gradient_factor=ROUNDED_LOGITS,
    flops=gemm_flops,
    second_order=True,
    cases=(
        _fused_loss("tiny", 3, 5, 4, ("bias",), softcap=2.0, temperature=0.7),
        _fused_loss("plain", 65, 100, 33, ("bias",)),
        _fused_loss("ignored", 33, 100, 24, ("ignored", "bias"), temperature=2.5),
        _fused_loss("empty", 0, 8, 4, ("bias",)),
    ),
    special=("ignored",),
    benchmarks=(
        Benchmark(_fused_loss("plain", 1024, 8192, 512), (F32, BF16), TRAINING, "compute"),
    ),
)

#: Size of the terms P (ln P - ln M) and Q (ln Q - ln M), whose sum is a small divergence.
DIVERGENCE_TERMS = 0.25

JSD = OpSpec(
    name="jsd",
    family="loss",
    terms=DIVERGENCE_TERMS,
    cuda="emulated",
    paper="Agarwal et al. 2023, arXiv 2306.13649",
    inputs=_jsd_inputs,
    differentiable=("student",),
    second_order=True,
    flops=lambda case, pass_: 16.0 * case.sizes["M"] * case.sizes["V"] * (1 + ("+" in pass_)),
    cases=(
        _loss("tiny", 3, 5, beta=0.3, temperature=2.0),
        *(_loss("plain", m, v) for m, v in [(4, 1), (5, 63), (64, 64), (7, 65), (9, 5003)]),
        _loss("forward", 33, 100, ("ignored",), beta=0.0),
        _loss("reverse", 33, 100, ("ignored",), beta=1.0, temperature=3.0),
        _loss("sum", 33, 100, ("ignored",), beta=0.9, reduction="sum"),
        _loss("none", 33, 100, ("ignored",), beta=0.1, reduction="none"),
        *(_loss("logprobs", 33, 100, beta=beta, log_probs=True) for beta in (0.0, 0.5, 1.0)),
        *(_loss("impossible", 7, 65, ("impossible",), beta=beta) for beta in (0.0, 0.5)),
        _loss("empty", 0, 8),
    ),
    special=("forward", "reverse", "logprobs"),
    benchmarks=(
        Benchmark(_loss("plain", 1024, 32000), (F32, BF16), TRAINING),
        Benchmark(_loss("forward", 1024, 32000, beta=0.0), (F32,), TRAINING),
    ),
)

LINEAR_JSD = OpSpec(
    name="linear_jsd",
    family="loss",
    terms=DIVERGENCE_TERMS,
    cuda="emulated",
    paper="Agarwal et al. 2023, arXiv 2306.13649",
    inputs=_fused_jsd_inputs,
    differentiable=("x", "weight", "bias"),
    gradient_factor=ROUNDED_LOGITS,
    flops=_fused_jsd_flops,
    cases=(
        _fused_jsd("tiny", 3, 5, 4, 2, ("bias",), beta=0.3, temperature=2.0),
        _fused_jsd("plain", 65, 100, 33, 40, ("bias",)),
        _fused_jsd("forward", 33, 100, 24, 24, ("bias", "ignored"), beta=0.0),
        _fused_jsd("reverse", 33, 100, 24, 24, ("bias", "ignored"), beta=1.0, reduction="sum"),
        _fused_jsd("none", 33, 100, 24, 24, ("bias", "ignored"), reduction="none"),
        _fused_jsd("empty", 0, 8, 4, 4, ("bias",)),
    ),
    special=("none",),
    benchmarks=(
        Benchmark(_fused_jsd("plain", 1024, 8192, 512, 512), (F32, BF16), TRAINING, "compute"),
    ),
)

SPECS = (CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, LINEAR_LOG_PROB, JSD, LINEAR_JSD)

VARIANTS = (
    Variant(
        "cross entropy: label smoothing, class weights, z-loss, softcap, temperature",
        ("cross_entropy", "linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss"),
        "Wijmans et al. 2024, arXiv 2411.09009",
    ),
    Variant(
        "distillation: forward and reverse KL, generalised Jensen-Shannon divergence",
        ("jsd", "linear_jsd", "LigerFusedLinearJSD", "LigerFusedLinearJSDLoss"),
        "Agarwal et al. 2023, arXiv 2306.13649",
    ),
    Variant(
        "direct preference optimisation: sigmoid, conservative, robust, hinge, IPO, EXO, NCA, BCO,"
        " SPPO, APO, DiscoPOP",
        ("dpo_loss", "LigerFusedLinearDPOLoss"),
        "Rafailov et al. 2023, arXiv 2305.18290",
    ),
    Variant(
        "reference-free preference optimisation: CPO, SimPO, ORPO",
        ("cpo_loss", "simpo_loss", "orpo_loss", "LigerFusedLinearSimPOLoss"),
        "Meng et al. 2024, arXiv 2405.14734",
    ),
    Variant(
        "unpaired preference optimisation: KTO",
        ("kto_loss", "LigerFusedLinearKTOLoss"),
        "Ethayarajh et al. 2024, arXiv 2402.01306",
    ),
    Variant(
        "group relative policy optimisation: GRPO, Dr. GRPO, DAPO, CISPO, GSPO, SAPO, LUSPO, VESPO",
        ("grpo_loss", "LigerFusedLinearGRPOLoss"),
        "Shao et al. 2024, arXiv 2402.03300",
    ),
)
