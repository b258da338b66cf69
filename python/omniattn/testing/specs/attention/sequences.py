"""OpSpecs of attention with packed sequences and with caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from omniattn import functional, reference
from omniattn.functional import masks
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import BF16, EACH, F32, FORWARD
from omniattn.testing.specs.attention._score_mods import gate, tiles
from omniattn.testing.specs.attention.attention import (
    GRADIENT_FACTOR,
    GRADIENT_FACTORS,
    attention_flops,
    attention_inputs,
    attention_tensors,
    qkv,
)


def _packed(
    label: str,
    B: int,
    Tq: int,
    Tk: int,
    H: int,
    G: int,
    D: int,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    """Makes a case of B sequences; the longest has Tq queries and Tk keys."""
    longest = {"max_seqlen_q": Tq, "max_seqlen_k": Tk}
    return qkv(label, B, Tq, Tk, H, G, D, None, tensors, **longest, **options)


def _lengths(case: Case, random: Random) -> tuple[Tensor, Tensor]:
    """Returns lengths (B,) of queries and keys, equal if Tq = Tk."""
    b, tq, tk = (case.sizes[k] for k in ("B", "Tq", "Tk"))
    tk *= case.sizes.get("N", 1)
    longest_first = torch.arange(b) == 0
    queries = torch.where(longest_first, tq, random.integers(tq + 1, b))
    keys = torch.where(longest_first, tk, random.integers(tk + 1, b))
    return queries, queries if tq == tk else keys


def _boundaries(lengths: Tensor) -> Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def _varlen_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    h, g, d = (case.sizes[k] for k in ("H", "G", "D"))
    queries, keys = _lengths(case, random)
    nq, nk = int(queries.sum()), int(keys.sum())
    made = {
        "q": random.normal(nq, h, d),
        "k": random.normal(nk, g, d),
        "v": random.normal(nk, g, d),
        "cu_seqlens_q": _boundaries(queries),
        "cu_seqlens_k": _boundaries(keys),
    }
    made |= attention_tensors(case, random)
    if "sinks of queries" in case.tensors:
        made["sinks"] = random.normal(h, nq)
    return made


def _sequence_flops(case: Case, pass_: Pass) -> float:
    queries, keys = _lengths(case, Random(case.name, F32))
    sizes = zip(queries.tolist(), keys.tolist(), strict=True)
    each = ({**case.sizes, "B": 1, "Tq": tq, "Tk": tk} for tq, tk in sizes)
    return sum(attention_flops(replace(case, sizes=s), pass_) for s in each)


ATTENTION_VARLEN = OpSpec(
    name="attention_varlen",
    family="attention",
    cuda="emulated",
    paper="Dao 2023, arXiv 2307.08691",
    inputs=_varlen_inputs,
    differentiable=("q", "k", "v", "bias", "alibi_slopes", "sinks", "head_scale"),
    flops=_sequence_flops,
    gradient_factor=GRADIENT_FACTOR,
    gradient_factors=GRADIENT_FACTORS,
    second_order=True,
    cases=(
        _packed("tiny", 3, 3, 3, 2, 1, 3, ("bias",), causal=True, return_lse=True),
        _packed("self", 5, 130, 130, 4, 2, 32, causal=True, return_lse=True),
        _packed("cross", 5, 70, 200, 4, 2, 32, return_lse=True),
        _packed("short", 9, 20, 20, 4, 1, 16, window_size=(3, 2)),
        _packed("decode", 6, 1, 300, 4, 2, 32, causal=True),
        _packed("onekey", 3, 20, 1, 1, 1, 8),
        _packed("terms", 4, 120, 120, 4, 2, 16, ("alibi per batch", "sinks", "head scale")),
        _packed("querysinks", 3, 40, 60, 4, 2, 16, ("sinks of queries",), return_lse=True),
        _packed("bias", 3, 60, 110, 4, 2, 16, ("bias per batch", "mask"), softcap=3.0),
        _packed("ends", 3, 40, 70, 4, 2, 16, ("ends",), return_lse=True),
        _packed("dropout", 3, 70, 70, 2, 2, 16, ("seed",), causal=True, dropout_p=0.3),
        _packed("mod", 3, 60, 60, 4, 2, 16, score_mod=gate),
        _packed("strided", 4, 150, 150, 4, 2, 16, mask=masks.Strided(40, 9)),
        _packed("prefix", 2, 150, 150, 2, 2, 16, mask=masks.PrefixLM(torch.tensor([0, 70]))),
        _packed("relu2", 3, 60, 60, 2, 2, 16, normalizer="relu2", scale=0.05),
    ),
    benchmarks=(
        Benchmark(
            _packed("mixed", 8, 1024, 1024, 8, 8, 64, causal=True), (F32, BF16), EACH, "compute"
        ),
    ),
)


def _cached_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    _, keys = _lengths(case, random)
    made = attention_inputs(case, random)
    return made | {"cache_seqlens": keys.clamp(min=min(case.sizes["Tq"], case.sizes["Tk"]))}


def _paged(
    label: str,
    B: int,
    Tq: int,
    pages: int,
    size: int,
    H: int,
    G: int,
    D: int,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    """Makes a case of B sequences with up to `pages` pages of `size` tokens, some shared."""
    case = qkv(label, B, Tq, size, H, G, D, None, ("block table", *tensors), **options)
    return replace(case, sizes={**case.sizes, "N": pages})


ATTENTION_CACHED = OpSpec(
    name="attention_cached",
    family="attention",
    cuda="emulated",
    paper="Dao 2023, arXiv 2307.08691",
    inputs=_cached_inputs,
    differentiable=("q", "k", "v", "alibi_slopes", "sinks"),
    flops=_sequence_flops,
    gradient_factor=GRADIENT_FACTOR,
    gradient_factors=GRADIENT_FACTORS,
    second_order=True,
    special=("pages",),
    cases=(
        qkv("tiny", 2, 2, 4, 2, 1, 3, causal=True, return_lse=True),
        qkv("decode", 4, 1, 700, 4, 2, 32, causal=True, return_lse=True),
        qkv("chunk", 3, 60, 200, 4, 2, 32, causal=True),
        qkv("window", 3, 3, 300, 4, 2, 16, causal=True, window_size=(50, 0)),
        qkv("terms", 3, 2, 100, 4, 2, 16, None, ("alibi", "sinks"), causal=True),
        qkv("querysinks", 3, 2, 100, 4, 2, 16, None, ("sinks of queries",), causal=True),
        qkv("mod", 3, 6, 100, 4, 2, 16, score_mod=tiles, causal=True),
        qkv("full", 2, 5, 5, 2, 2, 8, causal=True),
        qkv("ends", 3, 2, 100, 4, 2, 16, None, ("ends",), return_lse=True),
        _paged("pages", 3, 1, 5, 16, 4, 2, 32, causal=True, return_lse=True),
        _paged("oddpages", 4, 3, 90, 7, 4, 2, 16, ("sinks",), causal=True),
        _paged("pagesoftokens", 2, 2, 40, 1, 4, 2, 16, ("alibi",), window_size=(20, 0)),
        _paged("chunkofpages", 3, 60, 5, 40, 4, 2, 16, causal=True),
    ),
    benchmarks=(
        Benchmark(qkv("decode", 4, 1, 4096, 32, 8, 128, causal=True), (F32, BF16), FORWARD),
        Benchmark(_paged("pages", 4, 1, 64, 64, 32, 8, 128, causal=True), (F32, BF16), FORWARD),
    ),
)


def _int8_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = _cached_inputs(case, random)
    order = ("q", "k", "v", "k_scale", "v_scale")
    for name in ("k", "v"):
        rows = made[name].clone()
        rows[:, :1] = 0  # a factor of 0
        rows[:, -1:, :, :1] *= 8  # a channel that is larger than the others
        made[name], made[f"{name}_scale"] = functional.quantize_int8(rows)
    return {name: made[name] for name in order} | made


def _rounded_rows(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor, *args: Any, **options: Any
) -> Any:
    """attention_int8 with rows of q's dtype, as calls with many queries make them."""
    k, v = ((t * s[..., None]).to(q.dtype) for t, s in ((k, k_scale), (v, v_scale)))
    return reference.attention_cached(q, k, v, *args, **options)


ATTENTION_INT8 = OpSpec(
    name="attention_int8",
    family="attention",
    cuda="emulated",
    paper="Zhao et al. 2023, arXiv 2310.19102",
    inputs=_int8_inputs,
    differentiable=(),
    eager=_rounded_rows,
    flops=_sequence_flops,
    special=("pages",),
    cases=(
        qkv("tiny", 2, 2, 4, 2, 1, 3, causal=True, return_lse=True),
        qkv("decode", 4, 1, 700, 4, 2, 32, causal=True, return_lse=True),
        qkv("chunk", 3, 60, 200, 4, 2, 32, causal=True, return_lse=True),
        qkv("shared", 2, 1, 300, 40, 1, 36, causal=True),
        qkv("window", 3, 3, 300, 4, 2, 16, causal=True, window_size=(50, 0)),
        qkv("terms", 3, 2, 100, 4, 2, 16, None, ("alibi", "sinks", "mask"), causal=True),
        qkv("bias", 3, 2, 100, 4, 2, 20, 12, ("bias", "head scale"), softcap=3.0),
        qkv("mod", 3, 6, 100, 4, 2, 16, score_mod=tiles, causal=True),
        qkv("relu2", 2, 1, 100, 4, 2, 16, normalizer="relu2", scale=0.05),
        qkv("nokeys", 2, 1, 0, 2, 2, 8, None, ("sinks",)),
        _paged("pages", 3, 1, 5, 16, 4, 2, 32, causal=True, return_lse=True),
        _paged("oddpages", 4, 3, 90, 7, 4, 2, 16, ("sinks",), causal=True),
        _paged("chunkofpages", 3, 60, 5, 40, 4, 2, 16, causal=True),
    ),
    benchmarks=(
        Benchmark(qkv("decode", 4, 1, 4096, 32, 8, 128, causal=True), (F32, BF16), FORWARD),
        Benchmark(_paged("pages", 4, 1, 64, 64, 32, 8, 128, causal=True), (F32, BF16), FORWARD),
    ),
)


SPECS = (ATTENTION_VARLEN, ATTENTION_CACHED, ATTENTION_INT8)

VARIANTS = (
    Variant(
        "packed and padded sequences",
        ("attention_varlen", "Documents", "KeyPadding", "KeyLengths"),
        "Dao 2023, arXiv 2307.08691",
    ),
    Variant(
        "KV caches: contiguous, rolling, paged, cross-attention",
        ("attention_cached", "KVCache", "RollingCache", "PagedCache", "CrossCache"),
        "Kwon et al. 2023, arXiv 2309.06180",
    ),
    Variant(
        "KV caches in int8, with a factor for each token and head",
        ("attention_int8", "quantize_int8"),
        "Zhao et al. 2023, arXiv 2310.19102",
    ),
    Variant(
        "KV cache eviction: threshold, H2O, StreamingLLM, SnapKV",
        ("EvictingCache", "Threshold", "H2O", "Streaming", "SnapKV", "Window"),
        "Zhang et al. 2023, arXiv 2306.14048",
    ),
)
