"""OpSpec of attention to blocks of keys that a learned router selects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BOTH, F32
from omniattn.testing.specs.attention.attention import GRADIENT_FACTOR, attention_inputs

ROUTER = ("router_q", "router_k")


def _routed(
    label: str,
    B: int,
    Tq: int,
    Tk: int,
    H: int,
    G: int,
    D: int,
    R: int,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    """Makes a case with R router heads, each with keys; no gradient without router tensors."""
    sizes = {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "G": G, "D": D, "R": R}
    trained = options.get("router_grad", "none") != "none"
    return Case(label, sizes, tensors, options, constant=() if trained else ROUTER)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = attention_inputs(case, random)
    b, tq, tk, heads = (case.sizes[n] for n in ("B", "Tq", "Tk", "R"))
    lists = -(-tq // case.options.get("query_block", 1))
    blocks = -(-tk // case.options["block_size"])
    made["router_q"] = random.normal(b, lists, heads, 5)
    made["router_k"] = random.normal(b, blocks, heads, 5)
    return made


def _flops(case: Case, pass_: Pass) -> float:
    """Counts the FLOPs of the selected keys. A list holds the query's own block and up to topk - 1
    earlier ones."""
    s, size = case.sizes, case.options["block_size"]
    position = torch.arange(s["Tq"]) + s["Tk"] - s["Tq"]
    keys = (position // size).clamp(max=case.options["topk"] - 1) * size + position % size + 1
    pairs = s["B"] * s["H"] * float(keys.sum())
    per_pair = {"forward": 4.0, "backward": 10.0, "forward+backward": 14.0}
    return pairs * s["D"] * per_pair[pass_]


_TIMED = (1, 2048, 2048, 8, 8, 64, 8)

ROUTED_BLOCK_ATTENTION = OpSpec(
    name="routed_block_attention",
    family="attention",
    cuda="emulated",
    paper="Gao et al. 2024, arXiv 2410.13276",
    inputs=_inputs,
    differentiable=("q", "k", "v", *ROUTER),
    flops=_flops,
    # Gradients of parts are rounded to the dtype before they are added.
    gradient_factor=2 * GRADIENT_FACTOR,
    second_order=True,
    special=("gate", "distill"),
    cases=(
        _routed("tiny", 1, 5, 5, 2, 1, 3, 2, block_size=2, topk=2, router_grad="gate"),
        _routed("plain", 2, 70, 70, 4, 2, 16, 4, block_size=16, topk=3),
        _routed("gate", 2, 70, 78, 4, 2, 16, 2, block_size=16, topk=3, router_grad="gate"),
        _routed(
            *("blocks", 1, 61, 61, 4, 2, 16, 4),
            block_size=16,
            topk=2,
            query_block=8,
            router_grad="gate",
            softcap=3.0,
        ),
        _routed(
            *("distill", 2, 50, 58, 4, 2, 16, 2),
            block_size=8,
            topk=3,
            query_block=4,
            router_grad="distill",
            scale=0.4,
        ),
        _routed(
            *("dropout", 1, 40, 40, 4, 1, 16, 1, ("seed",)),
            block_size=8,
            topk=3,
            router_grad="gate",
            dropout_p=0.3,
        ),
        _routed("decode", 1, 1, 75, 4, 4, 16, 4, block_size=16, topk=3, scale=0.3),
        _routed("notokens", 1, 0, 0, 2, 2, 8, 1, block_size=8, topk=1, router_grad="distill"),
    ),
    benchmarks=(
        Benchmark(_routed("plain", *_TIMED, block_size=256, topk=3), (F32,), BOTH, "compute"),
        Benchmark(
            _routed("gate", *_TIMED, block_size=256, topk=3, query_block=64, router_grad="gate"),
            (F32,),
            BOTH,
            "compute",
        ),
    ),
)

SPECS = (ROUTED_BLOCK_ATTENTION,)

VARIANTS = (
    Variant(
        "learned block routing: untrained, trained by gates or distillation",
        ("routed_block_attention", "RoutedBlockAttention"),
        "Gao et al. 2024, arXiv 2410.13276",
    ),
)
