"""OpSpecs of attention to selected blocks of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, BOTH, F32, FORWARD
from omniattn.testing.specs.attention.attention import (
    GRADIENT_FACTOR,
    GRADIENT_FACTORS,
    attention_inputs,
)


def _selected_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    """Makes lists of distinct blocks in random order, some padded with -1.

    "past" is for causal calls: blocks up to the query's own, which comes first.
    """
    b, tq, tk, g = (case.sizes[k] for k in ("B", "Tq", "Tk", "G"))
    others = tuple(t for t in case.tensors if t in ("sinks", "seed"))
    made = attention_inputs(replace(case, tensors=others), random)
    size, n = case.options["block_size"], case.sizes["n"]
    queries = -(-tq // case.options.get("query_block", 1))
    heads = 1 if "shared" in case.tensors else case.sizes["H"] if "each head" in case.tensors else g
    blocks = -(-tk // size)
    order = random.uniform(1 if "shared" in case.tensors else b, heads, queries, blocks)
    if "past" in case.tensors:
        own = ((torch.arange(queries) + tk - tq) // size)[:, None]
        block = torch.arange(blocks)
        order = order.masked_fill(block > own, -1).masked_fill(block == own, 2)
    scores, index = order.sort(-1, descending=True)
    index = index.masked_fill(scores < 0, -1)[..., :n]
    if "padded" in case.tensors:
        index = index.masked_fill(random.uniform(*index.shape) < 0.3, -1)
        index[:, :, :1] = -1
    return made | {"indices": index.to(torch.int32 if "int32" in case.tensors else torch.int64)}


def _selected(
    label: str,
    B: int,
    Tq: int,
    Tk: int,
    H: int,
    G: int,
    D: int,
    Dv: int,
    n: int,
    block_size: int,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    sizes = {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "G": G, "D": D, "Dv": Dv, "n": n}
    return Case(label, sizes, tensors, {"block_size": block_size, **options})


def _selected_flops(case: Case, pass_: Pass) -> float:
    """Counts attention's FLOPs on the selected pairs; lists of "past" blocks hold their query's."""
    s, size = case.sizes, case.options["block_size"]
    position = torch.arange(s["Tq"]) + s["Tk"] - s["Tq"]
    most = torch.full_like(position, s["n"] * size)
    if "past" in case.tensors:
        most = (position // size).clamp(max=s["n"] - 1) * size + position % size + 1
    pairs = s["B"] * s["H"] * float(most.sum())
    forward, backward = 2.0 * (s["D"] + s["Dv"]), 2.0 * (3 * s["D"] + 2 * s["Dv"])
    return pairs * {"forward": forward, "backward": backward}.get(pass_, forward + backward)


SELECTED_ATTENTION = OpSpec(
    name="selected_attention",
    family="attention",
    cuda="emulated",
    paper="Yuan et al. 2025, arXiv 2502.11089",
    inputs=_selected_inputs,
    differentiable=("q", "k", "v", "sinks"),
    flops=_selected_flops,
    gradient_factor=GRADIENT_FACTOR,
    gradient_factors=GRADIENT_FACTORS,
    second_order=True,
    special=("tokens", "padded", "ragged", "sinks", "dropout", "eachhead", "queryblocks"),
    cases=(
        _selected("tiny", 2, 4, 5, 2, 1, 3, 2, 2, 2, return_lse=True, causal=True),
        _selected("blocks", 1, 70, 300, 8, 2, 32, 32, 4, 32, causal=True, return_lse=True),
        _selected("one", 1, 1, 1, 1, 1, 1, 1, 1, 1),
        _selected("past", 1, 100, 100, 4, 1, 24, 40, 3, 16, ("past",), causal=True),
        _selected("tokens", 2, 20, 150, 16, 1, 24, 16, 40, 1, ("int32",), return_lse=True),
        _selected("latents", 1, 3, 300, 112, 1, 40, 24, 140, 1, ("past",), causal=True),
        _selected("padded", 2, 33, 200, 6, 2, 16, 16, 5, 20, ("padded",), return_lse=True),
        _selected("ragged", 1, 40, 203, 4, 2, 16, 16, 3, 48, causal=True, return_lse=True),
        _selected("odd", 1, 40, 100, 4, 2, 16, 16, 3, 17, ("past",), causal=True),
        _selected("long", 1, 60, 600, 2, 1, 16, 16, 2, 250, causal=True),
        _selected("whole", 1, 30, 90, 2, 1, 16, 16, 2, 64, ("shared",)),
        _selected("emptyrows", 1, 60, 40, 2, 2, 16, 16, 2, 16, causal=True, return_lse=True),
        _selected("eachhead", 2, 40, 80, 6, 2, 16, 16, 3, 16, ("each head", "int32"), causal=True),
        _selected("queryblocks", 1, 75, 90, 4, 2, 16, 16, 3, 16, query_block=32, causal=True),
        _selected("manyqueries", 1, 150, 200, 4, 2, 16, 16, 2, 32, ("shared",), query_block=128),
        _selected("softcap", 1, 40, 100, 4, 2, 16, 16, 3, 16, softcap=3.0, scale=0.4),
        _selected("sinks", 2, 40, 100, 4, 2, 16, 16, 3, 16, ("sinks",), causal=True),
        _selected("sinks+", 1, 20, 60, 4, 1, 16, 16, 9, 3, ("sinks", "padded"), return_lse=True),
        _selected("dropout", 2, 33, 90, 4, 2, 16, 16, 3, 16, ("seed",), dropout_p=0.3),
        _selected("dropouttokens", 1, 9, 50, 4, 1, 16, 16, 20, 1, ("seed",), dropout_p=0.4),
        _selected("nolists", 1, 3, 40, 2, 1, 8, 8, 0, 16, return_lse=True),
        _selected("nokeys", 1, 3, 0, 2, 1, 8, 8, 0, 16, return_lse=True),
        _selected("noqueries", 1, 0, 40, 2, 1, 8, 8, 2, 16, return_lse=True),
        _selected("nobatch", 0, 4, 40, 2, 1, 8, 8, 2, 16),
    ),
    benchmarks=(
        # NSA: 16 queries a group, 16 blocks of 64; MLA in its absorbed form with 2048 tokens of 8k.
        Benchmark(
            _selected("nsa", 1, 256, 4096, 16, 1, 128, 128, 16, 64, ("past",), causal=True),
            (F32,),
            BOTH,
            "compute",
        ),
        Benchmark(
            _selected("nsa", 1, 256, 4096, 16, 1, 128, 128, 16, 64, ("past",), causal=True),
            (BF16,),
            FORWARD,
            "compute",
        ),
        Benchmark(
            _selected("tokens", 1, 4, 8192, 128, 1, 576, 512, 2048, 1, ("past",), causal=True),
            (F32,),
            BOTH,
            "compute",
        ),
        Benchmark(
            _selected("moba", 1, 512, 4096, 8, 8, 128, 128, 3, 512, ("past",), causal=True),
            (F32,),
            BOTH,
            "compute",
        ),
    ),
)


def _sparse(label: str, B: int, Tq: int, Tk: int, H: int, G: int, D: int, **options: Any) -> Case:
    sizes = {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "G": G, "D": D}
    return Case(label, sizes, (), options)


def _moba_flops(case: Case, pass_: Pass) -> float:
    s, size = case.sizes, case.options["block_size"]
    position = torch.arange(s["Tq"]) + s["Tk"] - s["Tq"]
    keys = (position // size).clamp(max=case.options["topk"] - 1) * size + position % size + 1
    pairs = s["B"] * s["H"] * float(keys.sum())
    per_pair = {"forward": 4.0, "backward": 10.0, "forward+backward": 14.0}
    return pairs * s["D"] * per_pair[pass_]


MOBA_ATTENTION = OpSpec(
    name="moba_attention",
    family="attention",
    cuda="emulated",
    paper="Lu et al. 2025, arXiv 2502.13189",
    inputs=attention_inputs,
    differentiable=("q", "k", "v"),
    flops=_moba_flops,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    cases=(
        _sparse("tiny", 1, 5, 5, 2, 1, 3, block_size=2, topk=2),
        _sparse("groups", 2, 70, 70, 4, 2, 16, block_size=16, topk=3),
        _sparse("decode", 1, 2, 75, 4, 4, 16, block_size=16, topk=3, scale=0.3),
        _sparse("all", 1, 20, 20, 2, 2, 8, block_size=6, topk=9),
        _sparse("own", 1, 30, 30, 2, 2, 8, block_size=8, topk=1),
        _sparse("softcap", 1, 40, 40, 4, 2, 16, block_size=8, topk=2, softcap=3.0, scale=0.4),
        replace(
            _sparse("dropout", 2, 40, 40, 4, 2, 16, block_size=8, topk=3, dropout_p=0.3),
            tensors=("seed",),
        ),
        _sparse("notokens", 1, 0, 0, 2, 2, 8, block_size=8, topk=1),
    ),
    benchmarks=(
        Benchmark(
            _sparse("causal", 1, 2048, 2048, 8, 8, 64, block_size=256, topk=3),
            (F32,),
            BOTH,
            "compute",
        ),
    ),
)


def _nsa_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, tq, tk, h, g, d = (case.sizes[k] for k in ("B", "Tq", "Tk", "H", "G", "D"))
    size, stride = (case.options.get(f"compress_{n}", m) for n, m in (("size", 32), ("stride", 16)))
    windows = max(0, (tk - size) // stride + 1)
    made = attention_inputs(case, random)
    made |= {name: random.normal(b, windows, g, d) for name in ("k_compressed", "v_compressed")}
    made["gates"] = random.uniform(b, tq, h, 3).to(random.dtype)
    if case.label == "separate":
        made |= {name: random.normal(b, tk, g, d) for name in ("k_window", "v_window")}
    return made


def _nsa_flops(case: Case, pass_: Pass) -> float:
    """Counts FLOPs as for MoBA, plus the compressed keys and the window."""
    s, o = case.sizes, case.options
    position = torch.arange(s["Tq"]) + s["Tk"] - s["Tq"]
    size = o.get("block_size", 64)
    keys = (position // size).clamp(max=o.get("topk", 16) - 1) * size + position % size + 1
    keys = keys + (position + 1).clamp(max=o.get("window", 512))
    keys = keys + (position + 1 - o.get("compress_size", 32)).clamp(min=0) // o.get(
        "compress_stride", 16
    )
    per_pair = {"forward": 4.0, "backward": 10.0, "forward+backward": 14.0}
    return s["B"] * s["H"] * float(keys.sum()) * s["D"] * per_pair[pass_]


_SMALL = {"compress_size": 4, "compress_stride": 2, "block_size": 8, "topk": 4, "window": 9}

NSA_ATTENTION = OpSpec(
    name="nsa_attention",
    family="attention",
    cuda="emulated",
    paper="Yuan et al. 2025, arXiv 2502.11089",
    inputs=_nsa_inputs,
    differentiable=(
        *("q", "k", "v", "k_compressed", "v_compressed", "gates", "k_window", "v_window"),
    ),
    flops=_nsa_flops,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    cases=(
        _sparse("tiny", 1, 9, 9, 2, 1, 3, **_SMALL | {"block_size": 2, "window": 3}),
        _sparse("groups", 2, 70, 70, 8, 2, 16, **_SMALL),
        _sparse("separate", 1, 60, 60, 4, 1, 16, **_SMALL, scale=0.3),
        _sparse("decode", 1, 2, 75, 4, 1, 16, **_SMALL),
        _sparse("short", 1, 3, 3, 2, 1, 8, **_SMALL),
        _sparse("defaults", 1, 40, 200, 4, 1, 8),
        _sparse("softcap", 2, 50, 50, 4, 2, 8, **_SMALL, softcap=3.0),
        replace(
            _sparse("dropout", 2, 50, 50, 4, 2, 8, **_SMALL, dropout_p=0.3),
            tensors=("seed",),
        ),
        _sparse("notokens", 1, 0, 0, 2, 1, 8, **_SMALL),
    ),
    benchmarks=(Benchmark(_sparse("causal", 1, 2048, 2048, 16, 1, 64), (F32,), BOTH, "compute"),),
)

SPECS = (SELECTED_ATTENTION, MOBA_ATTENTION, NSA_ATTENTION)

VARIANTS = (
    Variant(
        "attention to selected key blocks or keys",
        ("selected_attention",),
        "Yuan et al. 2025, arXiv 2502.11089",
    ),
    Variant(
        "native sparse attention (NSA): compression, selection, sliding window",
        ("nsa_attention", "NSA", "PooledKeys"),
        "Yuan et al. 2025, arXiv 2502.11089",
    ),
    Variant(
        "mixture of block attention (MoBA)",
        ("moba_attention", "MoBA"),
        "Lu et al. 2025, arXiv 2502.13189",
    ),
)
