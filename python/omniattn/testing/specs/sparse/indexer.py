"""OpSpecs of the lightning indexer and of its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, F32, FORWARD, TRAINING

PAPER = "DeepSeek-AI 2025, arXiv 2512.02556"


def _case(
    label: str,
    B: int,
    Tq: int,
    Tk: int,
    H: int,
    D: int,
    topk: int,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    if "w" not in tensors:
        options["w"] = None
    sizes = {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "D": D}
    return Case(label, sizes, tensors, {"topk": topk, "return_scores": True, **options})


def _small(random: Random, *shape: int) -> Tensor:
    """Returns small integers, so that scores are exact and many are equal."""
    return (random.integers(5, *shape) - 2).to(random.dtype)


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, tq, tk, h, d = (case.sizes[k] for k in ("B", "Tq", "Tk", "H", "D"))
    made = {"q": _small(random, b, tq, h, d), "k": _small(random, b, tk, d)}
    if "w" in case.tensors:
        made["w"] = _small(random, b, tq, h)
    if "padding" in case.tensors:
        made["key_padding"] = random.uniform(b, tk) < 0.8
    return made


def _pairs(case: Case) -> float:
    s = case.sizes
    if not case.options.get("causal", True):
        return float(s["B"] * s["Tq"] * s["Tk"])
    ends = (torch.arange(s["Tq"]) + s["Tk"] - s["Tq"] + 1).clamp(min=0)
    return s["B"] * float(ends.sum())


def _flops(case: Case, pass_: Pass) -> float:
    return _pairs(case) * 2.0 * case.sizes["H"] * case.sizes["D"]


W = ("w",)
DSA_INDEXER = OpSpec(
    name="dsa_indexer",
    family="attention",
    cuda="emulated",
    paper=PAPER,
    inputs=_inputs,
    differentiable=(),
    flops=_flops,
    special=("ragged", "recent", "decode", "plain"),
    cases=(
        _case("tiny", 1, 4, 5, 2, 3, 2, W),
        _case("ragged", 2, 35, 100, 3, 20, 9, W),
        _case("one", 1, 1, 1, 1, 1, 1),
        _case("onehead", 2, 70, 70, 1, 16, 12),
        _case("recent", 2, 40, 70, 4, 16, 12, ("w", "padding"), tie="recent"),
        _case("plain", 1, 30, 65, 2, 8, 7, activation=None, causal=False),
        _case("byindex", 1, 20, 65, 2, 8, 7, W, sorted_by_index=True),
        _case("decode", 1, 1, 1100, 8, 16, 40, W),
        _case("windows", 2, 33, 17, 3, 8, 5, W, key_stride=4, past=37),
        _case("windowspad", 2, 9, 3, 2, 8, 2, ("w", "padding"), key_stride=3, past=2, tie="recent"),
        _case("windowstep", 1, 1, 20, 2, 8, 4, W, key_stride=4, past=81),
        _case("drops", 1, 3, 1500, 2, 5, 4, ("w", "padding"), causal=False),
        _case("all", 1, 9, 20, 2, 8, 33, W),
        _case("short", 1, 9, 4, 2, 8, 3, W),
        _case("none", 1, 3, 8, 2, 8, 0, W),
        _case("nokeys", 1, 3, 0, 2, 8, 2, W),
        _case("noheads", 1, 3, 5, 0, 8, 2),
        _case("noqueries", 1, 0, 5, 2, 8, 2, W),
        _case("indices", 1, 5, 30, 2, 8, 4, ("w", "ties"), return_scores=False),
    ),
    benchmarks=(
        # The last queries of 8k, a step at 32k, the single head, and windows of 4 tokens of 32k.
        Benchmark(
            _case("heads64", 1, 256, 8192, 64, 128, 2048, W, return_scores=False),
            (F32, BF16),
            FORWARD,
            "compute",
        ),
        Benchmark(
            _case("step", 1, 1, 32768, 64, 128, 2048, W, return_scores=False),
            (F32, BF16),
            FORWARD,
        ),
        Benchmark(
            _case("onehead", 1, 2048, 2048, 1, 64, 256, return_scores=False),
            (F32,),
            FORWARD,
            "compute",
        ),
        Benchmark(
            _case(
                *("windows", 1, 256, 8192, 16, 64, 512, W),
                return_scores=False,
                key_stride=4,
                past=32768 - 256,
            ),
            (F32,),
            FORWARD,
            "compute",
        ),
    ),
)


def _loss_case(
    label: str,
    B: int,
    Tq: int,
    Tk: int,
    HI: int,
    DI: int,
    H: int,
    G: int,
    D: int,
    n: int,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    """Makes a case with n keys per query in the sparse stage, or n = 0 for the dense stage."""
    if "w" not in tensors:
        options["w"] = None
    sizes = {"B": B, "Tq": Tq, "Tk": Tk, "HI": HI, "DI": DI, "H": H, "G": G, "D": D, "n": n}
    return Case(label, sizes, tensors, options)


def _loss_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, tq, tk, hi, di = (case.sizes[k] for k in ("B", "Tq", "Tk", "HI", "DI"))
    h, g, d, n = (case.sizes[k] for k in ("H", "G", "D", "n"))
    made = {
        "q_idx": random.normal(b, tq, hi, di),
        "k_idx": random.normal(b, tk, di),
        "q": random.normal(b, tq, h, d),
        "k": random.normal(b, tk, g, d),
    }
    if "w" in case.tensors:
        made["w"] = random.normal(b, tq, hi) * (hi * di) ** -0.5
    if "padding" in case.tensors:
        made["key_padding"] = random.uniform(b, tk) < 0.8
    if n > 0:
        order = random.uniform(b, tq, tk).argsort(-1)[..., :n]
        made["indices"] = order.masked_fill(random.uniform(*order.shape) < 0.1, -1)
    if "lse" in case.tensors:
        made["lse"] = _lse(case, made)
    return made


def _lse(case: Case, made: dict[str, Tensor]) -> Tensor:
    """Returns the attention's lse."""
    options = {"causal": case.options.get("causal", True), "return_lse": True}
    q, k, lists = made["q"], made["k"], made.get("indices")
    if lists is None:
        return reference.attention(q, k, k, scale=case.options.get("scale"), **options)[1]
    lists = lists[:, None]
    return reference.selected_attention(q, k, k, lists, block_size=1, **options)[1]


def _loss_flops(case: Case, pass_: Pass) -> float:
    """Counts the products of indexer and attention; the backward repeats the indexer's twice."""
    s = case.sizes
    pairs = s["B"] * s["Tq"] * s["n"] if s["n"] else _pairs(case)
    own, target = 2.0 * s["HI"] * s["DI"], 2.0 * s["H"] * s["D"]
    per_pair = {"forward": own + target, "backward": 2 * own, "forward+backward": 3 * own + target}
    return pairs * per_pair[pass_]


BOTH = ("w", "lse")
DSA_INDEXER_LOSS = OpSpec(
    name="dsa_indexer_loss",
    family="attention",
    cuda="emulated",
    paper=PAPER,
    inputs=_loss_inputs,
    differentiable=("q_idx", "k_idx", "w"),
    flops=_loss_flops,
    second_order=True,
    special=("sparse", "latents"),
    cases=(
        _loss_case("tiny", 1, 3, 4, 2, 3, 2, 1, 3, 0, BOTH),
        _loss_case("groups", 2, 33, 40, 3, 8, 4, 2, 16, 0, (*BOTH, "padding")),
        _loss_case("sparse", 2, 33, 40, 3, 8, 4, 2, 16, 9, BOTH),
        _loss_case("latents", 1, 20, 20, 4, 8, 12, 1, 24, 6, W, scale=0.3),
        _loss_case("plain", 1, 20, 30, 1, 8, 2, 2, 8, 0, activation=None, causal=False),
        _loss_case("padded", 1, 20, 30, 2, 8, 2, 2, 8, 5, ("w", "padding")),
        _loss_case("short", 1, 9, 4, 2, 8, 2, 2, 8, 0, W),
        _loss_case("noqueries", 1, 0, 4, 2, 8, 2, 2, 8, 0, W),
    ),
    benchmarks=(
        Benchmark(
            _loss_case("dense", 1, 1024, 1024, 16, 64, 8, 8, 64, 0, BOTH),
            (F32,),
            TRAINING,
            "compute",
        ),
        Benchmark(
            _loss_case("sparse", 1, 256, 4096, 16, 64, 8, 8, 64, 512, BOTH),
            (F32,),
            TRAINING,
            "compute",
        ),
    ),
)

SPECS = (DSA_INDEXER, DSA_INDEXER_LOSS)

VARIANTS = (
    Variant(
        "lightning indexer of DeepSeek Sparse Attention, with its loss",
        ("dsa_indexer", "dsa_indexer_loss"),
        PAPER,
    ),
    Variant("single-head indexer without weights, ties to the latest key", ("dsa_indexer",), PAPER),
    Variant(
        "QSA of Qwen4: windows selected by their mean keys, and the tokens after the last window",
        ("dsa_indexer", "selected_attention"),
        "Qwen Team 2026, transformers 5.24",
    ),
)
