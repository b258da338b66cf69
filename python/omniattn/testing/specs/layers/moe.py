"""OpSpecs of mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.reference.layers.moe import experts_in_dtype
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, BOTH, F32, FORWARD, SWEEPS


def _experts(
    label: str,
    M: int,
    E: int,
    S: int,
    K: int,
    N: int,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    return Case(label, {"M": M, "E": E, "S": S, "K": K, "N": N}, tensors, options)


def _moe_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, e, s, k, n = (case.sizes[letter] for letter in "MESKN")
    columns = n if case.options.get("activation") in ("relu", "gelu", "silu") else 2 * n
    made = {
        "x": random.normal(m, k),
        "index": random.integers(e, m, s),
        "weights": random.uniform(m, s).to(random.dtype),
        "up": random.normal(e, columns, k) / max(k, 1) ** 0.5,
        "down": random.normal(e, k, n) / max(n, 1) ** 0.5,
    }
    if "one expert" in case.tensors:
        made["index"] = torch.full_like(made["index"], e - 1)
    if "dropped" in case.tensors:
        made["index"] = made["index"].masked_fill(random.uniform(m, s) < 0.3, -1)
    if "transposed" in case.tensors:
        made |= {name: made[name].mT.contiguous().mT for name in ("up", "down")}
    if "biases" in case.tensors:
        made |= {"up_bias": random.normal(e, columns), "down_bias": random.normal(e, k)}
    return made


def _moe_flops(case: Case, pass_: Pass) -> float:
    m, s, k, n = (case.sizes[letter] for letter in "MSKN")
    return 6.0 * m * s * k * n * SWEEPS[pass_]


GPT_OSS = {"activation": "clamped_swiglu", "interleaved": True}

MOE_EXPERTS = OpSpec(
    name="moe_experts",
    family="moe",
    cuda="emulated",
    paper="Shazeer et al. 2017, arXiv 1701.06538",
    inputs=_moe_inputs,
    differentiable=("x", "weights", "up", "down", "up_bias", "down_bias"),
    flops=_moe_flops,
    # Pre-activations are saved for the backward in the input dtype, as in eager; fp32 would take
    # twice the memory. On CUDA, h and the gradient of pre are also rounded, as operands of tensor
    # cores. Measured multiples of eager's error: at most 0.9 (CPU) and 1.3 (CUDA) in y, 2.3 and
    # 1.9 in gradients.
    eager=experts_in_dtype,
    second_order=True,
    special=("gptoss", "recompute"),
    cases=(
        _experts("tiny", 3, 2, 2, 3, 2, ("biases",)),
        _experts("mixtral", 100, 4, 2, 40, 72),
        _experts("gptoss", 60, 4, 2, 40, 136, ("transposed", "biases", "dropped"), **GPT_OSS),
        # Around the tiles of 128 rows and columns and 64 deep of the CUDA kernels.
        *(
            _experts("tile", m, 1, 1, k, n, activation="silu")
            for m, k, n in [(127, 56, 120), (128, 64, 128), (129, 72, 136)]
        ),
        _experts("many", 150, 33, 6, 24, 20, activation="geglu"),
        _experts("recompute", 90, 2, 2, 65, 130, ("biases",), recompute=True),
        _experts("one", 1, 5, 1, 300, 129, activation="gelu"),
        _experts("interleaved", 20, 3, 3, 17, 31, ("dropped",), interleaved=True),
        _experts("all", 40, 3, 3, 70, 33, ("transposed",), activation="silu"),
        _experts("oneexpert", 600, 2, 1, 24, 24, ("one expert", "transposed"), activation="relu"),
        _experts("reglu", 30, 2, 2, 16, 300, activation="reglu"),
        _experts("bilinear", 9, 2, 4, 16, 16, activation="bilinear"),
        _experts("tanh", 9, 2, 1, 16, 16, activation="geglu_tanh"),
        _experts("llama4", 30, 4, 1, 24, 40, ("transposed",), weigh_inputs=True),
        _experts("inputs", 30, 4, 3, 24, 40, ("dropped", "biases"), weigh_inputs=True),
        _experts("notokens", 0, 3, 2, 8, 8, ("biases",)),
        _experts("noslots", 3, 3, 0, 8, 8),
        _experts("nofeatures", 5, 3, 2, 8, 0, ("biases",)),
        _experts("nodim", 5, 3, 2, 0, 8, ("biases",)),
    ),
    benchmarks=(
        Benchmark(_experts("mixtral", 1024, 8, 2, 512, 1024), (F32, BF16), BOTH, "compute"),
        Benchmark(_experts("batch", 64, 8, 2, 512, 1024), (F32, BF16), FORWARD),
        Benchmark(_experts("decode", 4, 8, 2, 512, 1024), (F32, BF16), FORWARD),
        Benchmark(_experts("small", 2048, 64, 6, 256, 256), (F32, BF16), BOTH, "compute"),
    ),
)

SPECS = (MOE_EXPERTS,)

VARIANTS = (
    Variant(
        "mixture of experts: dropless or with capacity, expert parallelism",
        ("moe_experts", "drop_over_capacity", "MoE", "ExpertParallel"),
        "Shazeer et al. 2017, arXiv 1701.06538",
    ),
    Variant(
        "routers: softmax before or after top-k, Switch, group-limited",
        ("softmax_top_k", "top_k_softmax"),
        "Fedus et al. 2021, arXiv 2101.03961",
    ),
    Variant(
        "router: sigmoid with bias-based balancing",
        ("sigmoid_top_k", "update_router_bias"),
        "DeepSeek-AI 2024, arXiv 2412.19437",
    ),
    Variant("router: sigmoid scaling of expert inputs", ("llama4_top_k",), "Meta AI 2025, Llama 4"),
    Variant(
        "router: noisy top-k",
        ("noisy_top_k", "expert_importance", "cv_squared"),
        "Shazeer et al. 2017, arXiv 1701.06538",
    ),
    Variant("router: expert choice", ("expert_choice",), "Zhou et al. 2022, arXiv 2202.09368"),
    Variant(
        "router gradients: exact, straight-through, dense, default vectors",
        ("softmax_top_k", "default_vector_gradient", "update_default_vectors"),
        "Panda et al. 2025, arXiv 2504.12463",
    ),
    Variant(
        "router losses: load balancing, z-loss",
        ("load_balance_loss", "router_z_loss"),
        "Zoph et al. 2022, arXiv 2202.08906",
    ),
)
