"""OpSpecs of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.functional import masks, scores
from omniattn.testing.spec import Benchmark, Case, OpSpec, Random, Variant
from omniattn.testing.specs._cases import BF16, BOTH, EACH, F16, F32, FORWARD, TRAINING
from omniattn.testing.specs.attention._attention_cases import attention_flops as attention_flops
from omniattn.testing.specs.attention._attention_cases import attention_inputs as attention_inputs
from omniattn.testing.specs.attention._attention_cases import attention_tensors as attention_tensors
from omniattn.testing.specs.attention._attention_cases import qkv as qkv
from omniattn.testing.specs.attention._patterns import LOCAL_AND_FIRST, LONG_OPTIONS, pattern_cases
from omniattn.testing.specs.attention._score_mods import alibi, gate, softcap, t5, tiles

# The backward of flash attention takes rowsum(dO * O) from O after rounding to the dtype.
GRADIENT_FACTOR = 4.0
GRADIENT_FACTORS = {
    # The gradient of a slope sums that error of the whole row times the distances of all keys.
    "alibi_slopes": 20.0,
    # On tensor cores O also has the error of P, which is rounded to the dtype before the product
    # with V.
    "sinks": 8.0,
}

#: Rows of distances for 4 heads of 16; the first and last also apply to greater distances.
_ROWS = torch.randn(2, 90, 4, 16, generator=torch.Generator().manual_seed(0))
DISTANCES: dict[str, Any] = {
    "relative_keys": scores.DistanceRows(_ROWS[0], 80),
    "relative_queries": scores.DistanceRows(_ROWS[1], -40),
}
#: Rows for 8 heads of 64, with distances clipped as by Shaw et al.
_CLIPPED = scores.DistanceRows(
    torch.randn(129, 8, 64, generator=torch.Generator().manual_seed(0)), 64
)


def _sdpa_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = attention_inputs(case, random)
    names = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask"}
    heads_first = {n: t.transpose(1, 2).contiguous() for n, t in made.items() if n in "qkv"}
    return {names[n]: heads_first.get(n, t) for n, t in made.items()}


def _eager(
    *args: Any, sinks: Tensor | None = None, return_lse: bool = False, **options: Any
) -> Any:
    """Computes reference.attention; sinks of queries join rounded outputs by their lse."""
    if sinks is None or sinks.dim() == 1:
        return reference.attention(*args, sinks=sinks, return_lse=return_lse, **options)
    out, lse = reference.attention(*args, return_lse=True, **options)
    out, lse = reference.merge_attention([out], [lse], sinks=sinks)
    return (out, lse) if return_lse else out


ATTENTION = OpSpec(
    name="attention",
    family="attention",
    cuda="emulated",
    paper="Dao 2023, arXiv 2307.08691",
    eager=_eager,
    inputs=attention_inputs,
    differentiable=("q", "k", "v", "bias", "alibi_slopes", "sinks", "head_scale"),
    flops=attention_flops,
    gradient_factor=GRADIENT_FACTOR,
    gradient_factors=GRADIENT_FACTORS,
    second_order=True,
    special=(
        *("offtile", "emptyrows", "window", "DnotDv", "decode", "mask", "bias", "dropout"),
        *("predicate", "alibi", "sinks", "headscale", "sigmoid", "relu2"),
        *("ends", "endsdecode", "endsoneach", "endsinks"),
    ),
    cases=(
        qkv("tiny", 1, 3, 4, 2, 1, 3, 2, ("bias",), causal=True, return_lse=True),
        qkv("plain", 2, 64, 64, 2, 2, 64),
        qkv("one", 1, 1, 1, 1, 1, 1, 1),
        qkv("oneof8", 1, 1, 1, 1, 1, 8),
        qkv("offtile", 2, 63, 100, 4, 2, 40, return_lse=True),
        qkv("tile+1", 1, 65, 129, 2, 1, 65),
        qkv("blocks", 1, 300, 520, 2, 1, 128, causal=True, return_lse=True),
        qkv("causal", 2, 100, 100, 4, 2, 64, causal=True),
        qkv("cached", 1, 7, 200, 4, 1, 32, causal=True),
        qkv("emptyrows", 1, 100, 63, 2, 2, 32, causal=True, return_lse=True),
        qkv("window", 1, 200, 200, 2, 1, 32, causal=True, window_size=(17, 0)),
        qkv("band", 2, 150, 170, 2, 2, 16, window_size=(9, 5)),
        qkv("DnotDv", 1, 65, 65, 2, 2, 24, 40, causal=True),
        qkv("wide", 1, 40, 70, 2, 1, 136, 256, causal=True),
        qkv("widest", 1, 20, 33, 1, 1, 264),
        qkv("wideplain", 1, 64, 64, 2, 1, 192, 160),
        qkv("decode", 2, 1, 1000, 8, 2, 64, return_lse=True),
        qkv("latents", 1, 3, 300, 24, 1, 24, 16, ("sinks",), causal=True, return_lse=True),
        qkv("scale+softcap", 1, 64, 80, 2, 2, 32, scale=0.3, softcap=4.0),
        qkv("mask", 2, 63, 65, 2, 1, 32, None, ("mask",), return_lse=True),
        qkv("padding", 3, 64, 100, 2, 2, 32, None, ("padding",), causal=True),
        qkv("bias", 2, 65, 65, 2, 2, 32, None, ("bias",), causal=True),
        qkv("biasbatch", 2, 33, 70, 4, 2, 16, None, ("bias per batch", "mask")),
        qkv("biaskey", 2, 33, 70, 2, 2, 16, None, ("bias per key",), softcap=3.0),
        qkv("dropout", 2, 65, 100, 2, 1, 32, None, ("seed",), causal=True, dropout_p=0.3),
        qkv("alibi", 2, 130, 150, 4, 2, 16, None, ("alibi",), causal=True),
        qkv("alibibatch", 2, 70, 70, 4, 2, 16, None, ("alibi per batch", "bias")),
        qkv("sinks", 2, 100, 100, 4, 2, 16, None, ("sinks",), causal=True, return_lse=True),
        qkv("sinks+", 1, 70, 63, 2, 1, 16, None, ("sinks", "mask"), causal=True),
        qkv(
            *("querysinks", 2, 33, 70, 4, 2, 16, None, ("sinks of queries", "mask")),
            causal=True,
            return_lse=True,
        ),
        qkv("onlyquerysinks", 2, 5, 0, 2, 1, 8, None, ("sinks of queries",), return_lse=True),
        qkv("headscale", 2, 100, 100, 4, 2, 16, None, ("head scale",), softcap=3.0),
        qkv("terms", 2, 9, 150, 4, 2, 16, None, ("alibi", "sinks", "head scale"), causal=True),
        qkv("sigmoid", 2, 100, 130, 4, 2, 16, None, ("bias", "alibi"), normalizer="sigmoid"),
        qkv("relu2", 2, 100, 130, 4, 2, 16, None, ("bias",), normalizer="relu2", scale=0.1),
        qkv("relu2decode", 2, 3, 300, 4, 2, 16, None, ("mask",), normalizer="relu2"),
        qkv("distances", 2, 100, 130, 4, 2, 16, causal=True, return_lse=True, **DISTANCES),
        qkv("distancesfew", 1, 3, 9, 4, 2, 16, None, ("mask",), softcap=3.0, **DISTANCES),
        qkv("modgate", 2, 100, 130, 4, 2, 16, score_mod=gate, return_lse=True),
        qkv("modtiles", 2, 70, 130, 4, 2, 16, None, ("bias", "mask"), score_mod=tiles),
        qkv("moddecode", 2, 2, 300, 4, 2, 16, score_mod=t5),
        qkv("ends", 2, 60, 70, 4, 2, 16, None, ("ends",), causal=True, return_lse=True),
        qkv("endsdecode", 2, 3, 300, 6, 2, 16, None, ("ends",), return_lse=True),
        qkv("endswide", 1, 65, 70, 2, 2, 136, None, ("ends", "mask")),
        qkv("endsoneach", 2, 33, 70, 2, 2, 16, None, ("ends",), normalizer="sigmoid"),
        qkv(
            *("endsinks", 1, 70, 63, 5, 1, 16, None, ("ends", "sinks at the ends", "mask")),
            return_lse=True,
        ),
        qkv("onlyendsinks", 2, 9, 20, 5, 1, 16, None, ("sinks at the ends",), causal=True),
        qkv("onlysinks", 2, 5, 0, 2, 1, 8, None, ("sinks",), return_lse=True),
        *pattern_cases(),
        qkv("nokeys", 2, 5, 0, 2, 1, 8, return_lse=True),
        qkv("noqueries", 2, 0, 5, 2, 1, 8, return_lse=True),
        qkv("nobatch", 0, 5, 5, 2, 1, 8),
    ),
    benchmarks=(
        Benchmark(qkv("full", 1, 1152, 1152, 8, 8, 128), (F32, F16), EACH, "compute"),
        Benchmark(qkv("full", 1, 1152, 1152, 8, 8, 64), (F32,), EACH, "compute"),
        Benchmark(qkv("full", 1, 1152, 1152, 8, 8, 64), (BF16,), FORWARD, "compute"),
        Benchmark(qkv("full", 1, 1152, 1152, 8, 8, 128), (BF16,), ("backward",), "compute"),
        Benchmark(
            qkv("causal", 1, 4096, 4096, 8, 8, 128, causal=True), (BF16,), FORWARD, "compute"
        ),
        Benchmark(qkv("causal", 4, 384, 384, 8, 8, 64, causal=True), (F32,), EACH, "compute"),
        Benchmark(
            qkv("window", 1, 4096, 4096, 8, 8, 64, causal=True, window_size=(255, 0)),
            (F32,),
            BOTH,
            "compute",
        ),
        Benchmark(qkv("bias", 2, 512, 512, 8, 8, 64, None, ("bias",)), (F32,), TRAINING, "compute"),
        Benchmark(qkv("decode", 1, 1, 4096, 32, 8, 128), (BF16, F32), FORWARD),
        # A score_mod and the equivalent option.
        *(
            Benchmark(
                qkv(name, 1, 1024, 1024, 8, 8, 64, None, tensors, **options),
                (F32,),
                BOTH,
                "compute",
            )
            for name, tensors, options in (
                ("softcap", (), {"softcap": 20.0}),
                ("modsoftcap", (), {"score_mod": softcap}),
                ("alibi", ("alibi",), {}),
                ("modalibi", (), {"score_mod": alibi}),
                ("modt5", (), {"score_mod": t5}),
                ("modgate", (), {"score_mod": gate}),
            )
        ),
        *(
            Benchmark(
                qkv(name, 1, 1024, 1024, 8, 8, 64, None, tensors, **options),
                (F32,),
                TRAINING,
                "compute",
            )
            for name, tensors, options in LONG_OPTIONS
        ),
        *(
            Benchmark(case, (F32,), TRAINING, "compute")
            for case in (
                qkv("multiquery", 1, 1024, 1024, 8, 1, 64),
                qkv("grouped", 1, 1024, 1024, 8, 2, 64),
                qkv("cross", 1, 1024, 256, 8, 8, 64),
                qkv("distances", 1, 1024, 1024, 8, 8, 64, relative_keys=_CLIPPED),
                qkv("predicate", 8, 320, 320, 8, 8, 64, mask=LOCAL_AND_FIRST),
                qkv("padding", 4, 512, 512, 8, 8, 64, None, ("padding",)),
            )
        ),
    ),
)

SCALED_DOT_PRODUCT_ATTENTION = OpSpec(
    name="scaled_dot_product_attention",
    family="attention",
    cuda="emulated",
    paper="Dao 2023, arXiv 2307.08691",
    inputs=_sdpa_inputs,
    differentiable=("query", "key", "value", "attn_mask"),
    flops=attention_flops,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    special=("gqa", "bool"),
    cases=(
        qkv("tiny", 1, 3, 4, 2, 2, 3, 2, ("bias",)),
        qkv("plain", 2, 65, 100, 2, 2, 32),
        qkv("topleft", 1, 65, 100, 2, 2, 32, is_causal=True),
        qkv("topleft+", 1, 100, 65, 2, 2, 32, is_causal=True),
        qkv("ends", 1, 33, 50, 4, 4, 32, None, ("ends",)),
        qkv("gqa", 1, 33, 50, 4, 2, 32, enable_gqa=True, scale=0.2),
        qkv("bool", 2, 33, 50, 2, 2, 32, None, ("mask",)),
        qkv("nokeys", 1, 3, 0, 2, 2, 4),
    ),
    benchmarks=(
        Benchmark(
            qkv("topleft", 4, 384, 384, 8, 8, 64, is_causal=True), (F32, BF16), EACH, "compute"
        ),
    ),
)


def _weights_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, tq, h = (case.sizes[k] for k in ("B", "Tq", "H"))
    made = attention_inputs(case, random)
    v = made.pop("v")
    if "ends" in case.tensors:
        options: dict[str, Any] = {**made, "v": v, "return_lse": True}
        _, lse = reference.attention(**options)
        return made | {"lse": lse}
    wide = torch.float64 if random.dtype == torch.float64 else torch.float32
    return made | {"lse": random.normal(b, h, tq).to(wide) + 4}


ATTENTION_WEIGHTS = OpSpec(
    name="attention_weights",
    family="attention",
    cuda="emulated",
    paper="Dao 2023, arXiv 2307.08691",
    inputs=_weights_inputs,
    differentiable=("q", "k", "lse", "bias"),
    flops=lambda case, pass_: attention_flops(case, "forward") / 2,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    special=("few", "decode"),
    cases=(
        qkv("tiny", 1, 3, 4, 2, 1, 3, None, ("bias",), causal=True),
        qkv("plain", 2, 65, 130, 4, 2, 32),
        qkv("causal", 2, 100, 100, 4, 2, 40, causal=True, softcap=3.0),
        qkv("sums", 2, 200, 300, 4, 2, 32, causal=True, column_sums=True),
        qkv("mask", 2, 63, 65, 2, 1, 32, None, ("mask",), column_sums=True),
        qkv("decode", 2, 1, 700, 8, 2, 40, causal=True, column_sums=True),
        qkv("few", 2, 3, 300, 4, 2, 33, None, ("mask", "bias"), softcap=2.0),
        qkv("fewsums", 1, 4, 70, 4, 1, 16, causal=True, column_sums=True),
        qkv("groups", 2, 70, 131, 6, 2, 24, causal=True, group_sums=True),
        qkv("groupsums", 1, 33, 70, 4, 2, 16, None, ("mask",), column_sums=True, group_sums=True),
        qkv("fewgroups", 2, 3, 140, 4, 2, 33, causal=True, group_sums=True),
        qkv("fewboth", 2, 2, 70, 6, 2, 16, causal=True, column_sums=True, group_sums=True),
        qkv("fixed", 1, 160, 160, 4, 2, 16, mask=masks.Fixed(50, 3)),
        qkv("ends", 1, 33, 70, 4, 2, 16, None, ("ends",)),
        qkv("distances", 2, 3, 70, 4, 2, 16, **DISTANCES),
        qkv("nokeys", 1, 5, 0, 2, 1, 8),
    ),
    benchmarks=(
        Benchmark(
            qkv("sums", 1, 4096, 4096, 4, 4, 64, causal=True, column_sums=True),
            (F32,),
            FORWARD,
            "compute",
        ),
        Benchmark(qkv("decode", 1, 1, 8192, 32, 8, 128, column_sums=True), (F32, BF16), FORWARD),
    ),
)


SELECT_ATTENTION = OpSpec(
    name="select_attention",
    family="attention",
    cuda="emulated",
    paper="straight through: Bengio et al. 2013, arXiv 1308.3432",
    inputs=attention_inputs,
    differentiable=("q", "k", "v"),
    flops=lambda case, pass_: attention_flops(case, pass_) / 2,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    special=("mask",),
    cases=(
        # With one visible key, straight-through gradients are exact.
        qkv("tiny", 1, 3, 4, 2, 1, 3, 2, causal=True, window_size=(0, 0)),
        qkv("plain", 2, 65, 130, 4, 2, 32),
        qkv("dot", 2, 100, 300, 4, 2, 16, energy="dot", causal=True, tau=0.5),
        qkv("theta", 2, 70, 70, 2, 2, 8, theta=1.0, scale=0.5),
        qkv("mask", 2, 63, 65, 2, 1, 32, None, ("mask",), tau=3.0),
        qkv("one", 2, 1, 40, 4, 1, 16),
        qkv("nokeys", 1, 5, 0, 2, 1, 8),
    ),
    benchmarks=(
        Benchmark(qkv("causal", 1, 1024, 1024, 8, 8, 64, causal=True), (F32,), FORWARD, "compute"),
    ),
)


SPECS = (
    ATTENTION,
    SCALED_DOT_PRODUCT_ATTENTION,
    ATTENTION_WEIGHTS,
    SELECT_ATTENTION,
)

VARIANTS = (
    Variant(
        "multi-head, multi-query and grouped-query attention, self and cross",
        ("attention", "Attention", "MultiheadAttention"),
        "Vaswani et al. 2017, arXiv 1706.03762",
    ),
    Variant(
        "causal, prefix-LM and chunked masks",
        ("Causal", "PrefixLM", "Chunked"),
        "Raffel et al. 2019, arXiv 1910.10683",
    ),
    Variant(
        "sliding-window and neighborhood attention",
        ("SlidingWindow", "sliding_window", "Neighborhood"),
        "Hassani et al. 2022, arXiv 2204.07143",
    ),
    Variant(
        "dilated, strided, fixed and every-k-th-key patterns",
        ("Dilated", "Strided", "Fixed", "EveryKth"),
        "Child et al. 2019, arXiv 1904.10509",
    ),
    Variant(
        "block-sparse attention: mask or compressed rows, any block size",
        ("Blocks", "BlockSparseAttention"),
        "Child et al. 2019, arXiv 1904.10509",
    ),
    Variant("block-sparse masks from a predicate", ("from_predicate", "Blocks"), "this package"),
    Variant(
        "split-KV attention, merged by log-sum-exp",
        ("merge_attention",),
        "Dao et al. 2022, arXiv 2205.14135",
    ),
    Variant(
        "logit softcapping, attention sinks, per-head scale",
        ("attention", "Attention"),
        "OpenAI 2025, arXiv 2508.10925",
    ),
    Variant(
        "sigmoid and squared ReLU attention",
        ("attention", "Attention"),
        "Ramapuram et al. 2024, arXiv 2409.04431",
    ),
    Variant(
        "relative position embeddings of keys and queries",
        ("DistanceRows", "attention"),
        "Shaw et al. 2018, arXiv 1803.02155",
    ),
    Variant(
        "hard attention: one selected key per query",
        ("select_attention", "SelectAttention"),
        "this package",
    ),
    Variant(
        "T5 relative bias", ("T5Bias", "T5RelativeBias"), "Raffel et al. 2019, arXiv 1910.10683"
    ),
    Variant(
        "Swin Transformer: shifted windows, patch merging",
        ("WindowBias", "WindowAttention", "SwinBlock", "PatchMerging"),
        "Liu et al. 2021, arXiv 2103.14030",
    ),
    Variant(
        "ALiBi", ("alibi_slopes", "alibi_bias", "ALiBi"), "Press et al. 2021, arXiv 2108.12409"
    ),
)
