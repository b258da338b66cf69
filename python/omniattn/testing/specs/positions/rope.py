"""OpSpecs of rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, F32, FORWARD, TRAINING


def _heads(
    label: str,
    B: int,
    T: int,
    H: int,
    G: int,
    D: int,
    R: int | None = None,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    sizes = {"B": B, "T": T, "H": H, "G": G, "D": D}
    if R is not None:
        sizes["R"] = R
    return Case(label, sizes, tensors, options)


def _rotary_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, t, h, g, d = (case.sizes[k] for k in ("B", "T", "H", "G", "D"))
    position = torch.arange(100 if "long tables" in case.tensors else t)
    if "tables per batch" in case.tensors:
        position = position + random.integers(1000, b, 1)
    theta = reference.rope_frequencies(case.sizes.get("R", d))
    table_dtype = torch.float64 if random.dtype == torch.float64 else torch.float32
    cos, sin = reference.rotary_tables(theta, position, table_dtype)
    made = {"q": random.normal(b, t, h, d), "k": random.normal(b, t, g, d), "cos": cos, "sin": sin}
    if "positions" in case.tensors:
        made["positions"] = random.integers(t, b, t)
    if "short positions" in case.tensors:
        made["positions"] = random.integers(t, t).to(torch.int16)
    return made


def _qk_norm_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = _rotary_inputs(case, random)
    if "weights" in case.tensors:
        made |= {name: random.normal(case.sizes["D"]) for name in ("q_weight", "k_weight")}
    return made


def _rotary_flops(case: Case, pass_: Pass) -> float:
    s = case.sizes
    one = 3.0 * s["B"] * s["T"] * (s["H"] + s["G"]) * s.get("R", s["D"])
    return 2 * one if pass_ == "forward+backward" else one


APPLY_ROTARY = OpSpec(
    name="apply_rotary",
    family="rope",
    cuda="emulated",
    paper="Su et al. 2021, arXiv 2104.09864",
    inputs=_rotary_inputs,
    differentiable=("q", "k"),
    flops=_rotary_flops,
    second_order=True,
    special=("interleaved", "partial", "start", "inplace"),
    cases=(
        _heads("tiny", 1, 2, 2, 1, 6, 4),
        _heads("half", 2, 63, 4, 2, 64),
        _heads("interleaved", 2, 65, 4, 2, 64, interleaved=True),
        _heads("partial", 2, 33, 3, 1, 40, 10),
        _heads("partialpairs", 2, 33, 3, 1, 40, 10, interleaved=True),
        _heads("offtile", 1, 5, 2, 2, 130),
        _heads("batchtables", 3, 20, 2, 1, 32, None, ("tables per batch",)),
        _heads("positions", 2, 30, 2, 1, 32, None, ("positions",)),
        _heads("start", 2, 33, 3, 1, 40, 10, ("short positions",), rotary_start=17),
        _heads("inverse", 2, 9, 2, 1, 48, 32, rotary_start=16, interleaved=True, inverse=True),
        _heads("offset", 2, 1, 2, 1, 32, None, ("long tables",), positions=77),
        _heads("inplace", 2, 33, 4, 2, 48, 32, inplace=True),
        _heads("inplacepositions", 2, 9, 2, 1, 32, None, ("positions",), inplace=True),
        _heads("decode", 2, 1, 8, 2, 128),
        _heads("empty", 2, 0, 4, 2, 64),
    ),
    benchmarks=(
        Benchmark(_heads("half", 1, 2048, 16, 16, 128), (F32, BF16), FORWARD),
        Benchmark(_heads("half", 1, 2048, 16, 16, 128), (F32,), ("backward",)),
        Benchmark(
            _heads("interleaved", 1, 2048, 16, 4, 128, interleaved=True), (F32, BF16), FORWARD
        ),
        Benchmark(_heads("partial", 1, 2048, 16, 4, 256, 64), (F32,), FORWARD),
    ),
)


WEIGHTS = ("weights",)

QK_NORM_ROTARY = OpSpec(
    name="qk_norm_rotary",
    family="rope",
    cuda="emulated",
    paper="Henry et al. 2020, arXiv 2010.04245",
    inputs=_qk_norm_inputs,
    differentiable=("q", "k", "q_weight", "k_weight"),
    flops=_rotary_flops,
    second_order=True,
    special=("partialpairs", "partial"),
    cases=(
        _heads("tiny", 1, 2, 2, 1, 6, 4, WEIGHTS),
        _heads("half", 2, 63, 4, 2, 64, None, WEIGHTS),
        _heads("interleaved", 2, 65, 4, 2, 64, None, WEIGHTS, interleaved=True),
        _heads("partial", 2, 33, 3, 1, 40, 10, WEIGHTS, rotary_start=17, offset=1.0),
        _heads("partialpairs", 2, 33, 3, 1, 41, 10, WEIGHTS, interleaved=True),
        _heads("bare", 1, 5, 2, 2, 130, eps=1e-3),
        _heads("llama", 2, 9, 2, 1, 41, 30, WEIGHTS, rotary_start=3, casting="llama"),
        _heads("positions", 2, 30, 2, 1, 32, None, ("positions", *WEIGHTS)),
        _heads("offset", 2, 1, 2, 1, 32, None, ("long tables", *WEIGHTS), positions=77),
        _heads("empty", 2, 0, 4, 2, 64, None, WEIGHTS),
    ),
    benchmarks=(
        Benchmark(_heads("half", 1, 2048, 16, 4, 128, None, WEIGHTS), (F32, BF16), TRAINING),
    ),
)


SPECS = (APPLY_ROTARY, QK_NORM_ROTARY)

VARIANTS = (
    Variant(
        "RoPE: half-split, interleaved, partial",
        ("apply_rotary", "RotaryEmbedding"),
        "Su et al. 2021, arXiv 2104.09864",
    ),
    Variant(
        "RoPE with linear scaling",
        ("rope_frequencies", "LinearScaling"),
        "Chen et al. 2023, arXiv 2306.15595",
    ),
    Variant(
        "RoPE with NTK and dynamic NTK scaling",
        ("rope_frequencies", "NTKScaling", "DynamicNTKScaling"),
        "Peng et al. 2023, arXiv 2309.00071",
    ),
    Variant(
        "RoPE with YaRN scaling",
        ("rope_frequencies", "YarnScaling"),
        "Peng et al. 2023, arXiv 2309.00071",
    ),
    Variant(
        "RoPE with Llama 3 scaling",
        ("rope_frequencies", "Llama3Scaling"),
        "Llama Team 2024, arXiv 2407.21783",
    ),
    Variant(
        "RoPE with LongRoPE scaling",
        ("rope_frequencies", "LongRopeScaling"),
        "Ding et al. 2024, arXiv 2402.13753",
    ),
    Variant(
        "M-RoPE, contiguous or interleaved sections",
        ("rotary_tables", "mrope_axes", "RotaryEmbedding"),
        "Wang et al. 2024, arXiv 2409.12191",
    ),
    Variant(
        "2-D RoPE",
        ("axial_frequencies", "grid_positions", "RotaryEmbedding"),
        "Fang et al. 2023, arXiv 2303.11331",
    ),
    Variant("QK-norm fused with RoPE", ("qk_norm_rotary",), "Henry et al. 2020, arXiv 2010.04245"),
)
