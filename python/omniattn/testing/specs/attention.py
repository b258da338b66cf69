"""OpSpecs of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.functional import masks
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random
from omniattn.testing.specs._cases import BF16, BOTH, EACH, F16, F32, FORWARD, TRAINING

# The backward of flash attention takes rowsum(dO * O) from O as it was rounded to the dtype.
GRADIENT_FACTOR = 4.0
GRADIENT_FACTORS = {
    # That error is a row's, and a slope's gradient adds it up times the distances of all keys.
    "alibi_slopes": 20.0,
    # On tensor cores O also has the error of P as it was rounded to the dtype before it met V.
    "sinks": 8.0,
}


def _qkv(
    label: str,
    B: int,
    Tq: int,
    Tk: int,
    H: int,
    G: int,
    D: int,
    Dv: int | None = None,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    sizes = {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "G": G, "D": D}
    if Dv is not None:
        sizes["Dv"] = Dv
    return Case(label, sizes, tensors, options)


def _attention_tensors(case: Case, random: Random) -> dict[str, Tensor]:
    b, tq, tk, h = (case.sizes[k] for k in ("B", "Tq", "Tk", "H"))
    makers: dict[str, Callable[[], dict[str, Tensor]]] = {
        "bias": lambda: {"bias": random.normal(1, h, tq, tk)},
        "bias per batch": lambda: {"bias": random.normal(b, h, tq, tk)},
        "ends": lambda: {"bias": _ends_of_the_range(random, b, h, tq, tk)},
        "bias per key": lambda: {"bias": random.normal(b, 1, 1, tk)},
        "mask": lambda: {"mask": _mask_with_empty_row(random, b, tq, tk)},
        "padding": lambda: {"mask": torch.arange(tk) < random.integers(tk + 1, b, 1, 1, 1)},
        "alibi": lambda: {"alibi_slopes": random.normal(h) / 8},
        "alibi per batch": lambda: {"alibi_slopes": random.normal(b, h) / 8},
        "sinks": lambda: {"sinks": random.normal(h)},
        "sinks at the ends": lambda: {"sinks": _ends(random, h)},
        "head scale": lambda: {"head_scale": random.normal(h)},
        "seed": lambda: {"seed": torch.tensor([1234, 5])},
        "block table": lambda: {
            "block_table": random.integers(b * case.sizes["N"], b, case.sizes["N"])
        },
    }
    made: dict[str, Tensor] = {}
    for name in case.tensors:
        made |= makers[name]()
    return made


def _attention_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, tq, tk, h, g, d = (case.sizes[k] for k in ("B", "Tq", "Tk", "H", "G", "D"))
    pages = b * case.sizes.get("N", 1)
    made = {
        "q": random.normal(b, tq, h, d),
        "k": random.normal(pages, tk, g, d),
        "v": random.normal(pages, tk, g, case.sizes.get("Dv", d)),
    }
    return made | _attention_tensors(case, random)


def _ends(random: Random, count: int) -> Tensor:
    """Numbers at both ends of the range of the dtype and not far from them, in turn."""
    top = torch.finfo(random.dtype).max
    values = torch.tensor([-top, top, -0.3 * top, 0.3 * top, -math.inf], dtype=random.dtype)
    return values[torch.arange(count) % len(values)]


def _ends_of_the_range(random: Random, *shape: int) -> Tensor:
    """A bias whose rows, in turn, have such a number on all keys, on some, or on some with -inf on
    all others."""
    bias = random.normal(*shape)
    rows = math.prod(shape[:-1])
    end = _ends(random, rows).view(*shape[:-1], 1)
    where = (torch.arange(rows) // 5 % 3).view(*shape[:-1], 1)
    some = random.uniform(*shape) < 0.5
    bias = torch.where((where == 0) | some, end, bias)
    return bias.masked_fill((where == 2) & ~some, -math.inf)


def _mask_with_empty_row(random: Random, b: int, tq: int, tk: int) -> Tensor:
    mask = random.uniform(b, 1, tq, tk) < 0.7
    mask[:, :, :1] = False
    return mask


def _attention_flops(case: Case, pass_: Pass) -> float:
    """2 FLOP per visible (query, key) and feature, 2 GEMMs forward, 5 backward."""
    s = case.sizes
    causal = case.options.get("causal", False) or case.options.get("is_causal", False)
    left, right = case.options.get("window_size", (-1, -1))
    mask = masks.SlidingWindow(left, 0 if causal else right) & case.options.get(
        "mask", masks.All(())
    )
    pairs = mask.count(s["Tq"], s["Tk"], batch=s["B"], heads=s["H"])
    d, dv = s["D"], s.get("Dv", s["D"])
    forward, backward = 2.0 * (d + dv), 2.0 * (3 * d + 2 * dv)
    per_pair = {"forward": forward, "backward": backward, "forward+backward": forward + backward}
    return pairs * per_pair[pass_]


#: Masks of indices, each with its cases; ids of documents are in order, then not.
PATTERNS: dict[str, masks.Mask] = {
    "prefix": masks.PrefixLM(torch.tensor([0, 70])),
    "chunked": masks.Chunked(48),
    "packed": masks.Documents(torch.arange(160).expand(2, 160) // 70) & masks.Causal(),
    "documents": masks.Documents(torch.arange(320).view(2, 160) % 3),
    "dilated": masks.Dilated(3, 20),
    "strided": masks.Strided(40, 9),
    "stridedheads": masks.Strided(40, 9, split_heads=True),
    "fixed": masks.Fixed(50, 3),
    "everykth": masks.EveryKth(30),
    "neighbours": masks.Neighbourhood(41) & masks.KeyLengths(torch.tensor([160, 90])),
    "dilatedneighbours": masks.Neighbourhood(9, 7),
    "predicate": masks.from_predicate(
        lambda b, h, q, k: (k * (h + 1) <= q) | (q // 64 == 1), 160, 160, heads=4
    ),
}


def _sdpa_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = _attention_inputs(case, random)
    names = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask"}
    heads_first = {n: t.transpose(1, 2).contiguous() for n, t in made.items() if n in "qkv"}
    return {names[n]: heads_first.get(n, t) for n, t in made.items()}


ATTENTION = OpSpec(
    name="attention",
    family="attention",
    cuda="emulated",
    paper="Dao 2023, arXiv 2307.08691",
    inputs=_attention_inputs,
    differentiable=("q", "k", "v", "bias", "alibi_slopes", "sinks", "head_scale"),
    flops=_attention_flops,
    gradient_factor=GRADIENT_FACTOR,
    gradient_factors=GRADIENT_FACTORS,
    second_order=True,
    cases=(
        _qkv("tiny", 1, 3, 4, 2, 1, 3, 2, ("bias",), causal=True, return_lse=True),
        _qkv("plain", 2, 64, 64, 2, 2, 64),
        _qkv("one", 1, 1, 1, 1, 1, 1, 1),
        _qkv("oneof8", 1, 1, 1, 1, 1, 8),
        _qkv("offtile", 2, 63, 100, 4, 2, 40, return_lse=True),
        _qkv("tile+1", 1, 65, 129, 2, 1, 65),
        _qkv("blocks", 1, 300, 520, 2, 1, 128, causal=True, return_lse=True),
        _qkv("causal", 2, 100, 100, 4, 2, 64, causal=True),
        _qkv("cached", 1, 7, 200, 4, 1, 32, causal=True),
        _qkv("emptyrows", 1, 100, 63, 2, 2, 32, causal=True, return_lse=True),
        _qkv("window", 1, 200, 200, 2, 1, 32, causal=True, window_size=(17, 0)),
        _qkv("band", 2, 150, 170, 2, 2, 16, window_size=(9, 5)),
        _qkv("DnotDv", 1, 65, 65, 2, 2, 24, 40, causal=True),
        _qkv("wide", 1, 40, 70, 2, 1, 136, 256, causal=True),
        _qkv("widest", 1, 20, 33, 1, 1, 264),
        _qkv("decode", 2, 1, 1000, 8, 2, 64, return_lse=True),
        _qkv("latents", 2, 3, 300, 24, 1, 24, 16, ("sinks",), causal=True, return_lse=True),
        _qkv("scale+softcap", 1, 64, 80, 2, 2, 32, scale=0.3, softcap=4.0),
        _qkv("mask", 2, 63, 65, 2, 1, 32, None, ("mask",), return_lse=True),
        _qkv("padding", 3, 64, 100, 2, 2, 32, None, ("padding",), causal=True),
        _qkv("bias", 2, 65, 65, 2, 2, 32, None, ("bias",), causal=True),
        _qkv("biasbatch", 2, 33, 70, 4, 2, 16, None, ("bias per batch", "mask")),
        _qkv("biaskey", 2, 33, 70, 2, 2, 16, None, ("bias per key",), softcap=3.0),
        _qkv("dropout", 2, 65, 100, 2, 1, 32, None, ("seed",), causal=True, dropout_p=0.3),
        _qkv("alibi", 2, 130, 150, 4, 2, 16, None, ("alibi",), causal=True),
        _qkv("alibibatch", 2, 70, 70, 4, 2, 16, None, ("alibi per batch", "bias")),
        _qkv("sinks", 2, 100, 100, 4, 2, 16, None, ("sinks",), causal=True, return_lse=True),
        _qkv("sinks+", 1, 70, 63, 2, 1, 16, None, ("sinks", "mask"), causal=True),
        _qkv("headscale", 2, 100, 100, 4, 2, 16, None, ("head scale",), softcap=3.0),
        _qkv("terms", 2, 9, 150, 4, 2, 16, None, ("alibi", "sinks", "head scale"), causal=True),
        _qkv("sigmoid", 2, 100, 130, 4, 2, 16, None, ("bias", "alibi"), normaliser="sigmoid"),
        _qkv("relu2", 2, 100, 130, 4, 2, 16, None, ("bias",), normaliser="relu2", scale=0.1),
        _qkv("relu2decode", 2, 3, 300, 4, 2, 16, None, ("mask",), normaliser="relu2"),
        _qkv("ends", 2, 60, 70, 4, 2, 16, None, ("ends",), causal=True, return_lse=True),
        _qkv("endsdecode", 2, 3, 300, 6, 2, 16, None, ("ends",), return_lse=True),
        _qkv("endswide", 1, 65, 70, 2, 2, 136, None, ("ends", "mask")),
        _qkv("endsoneach", 2, 33, 70, 2, 2, 16, None, ("ends",), normaliser="sigmoid"),
        _qkv(
            *("endsinks", 1, 70, 63, 5, 1, 16, None, ("ends", "sinks at the ends", "mask")),
            return_lse=True,
        ),
        _qkv("onlyendsinks", 2, 9, 20, 5, 1, 16, None, ("sinks at the ends",), causal=True),
        _qkv("onlysinks", 2, 5, 0, 2, 1, 8, None, ("sinks",), return_lse=True),
        *(_qkv(name, 2, 160, 160, 4, 2, 16, mask=mask) for name, mask in PATTERNS.items()),
        _qkv("nokeys", 2, 5, 0, 2, 1, 8, return_lse=True),
        _qkv("noqueries", 2, 0, 5, 2, 1, 8, return_lse=True),
        _qkv("nobatch", 0, 5, 5, 2, 1, 8),
    ),
    benchmarks=(
        Benchmark(_qkv("full", 1, 1152, 1152, 8, 8, 128), (F32, F16), EACH, "compute"),
        Benchmark(_qkv("full", 1, 1152, 1152, 8, 8, 64), (F32,), EACH, "compute"),
        Benchmark(_qkv("full", 1, 1152, 1152, 8, 8, 64), (BF16,), FORWARD, "compute"),
        Benchmark(_qkv("full", 1, 1152, 1152, 8, 8, 128), (BF16,), ("backward",), "compute"),
        Benchmark(
            _qkv("causal", 1, 4096, 4096, 8, 8, 128, causal=True), (BF16,), FORWARD, "compute"
        ),
        Benchmark(_qkv("causal", 4, 384, 384, 8, 8, 64, causal=True), (F32,), EACH, "compute"),
        Benchmark(
            _qkv("window", 1, 4096, 4096, 8, 8, 64, causal=True, window_size=(255, 0)),
            (F32,),
            BOTH,
            "compute",
        ),
        Benchmark(
            _qkv("bias", 2, 512, 512, 8, 8, 64, None, ("bias",)), (F32,), TRAINING, "compute"
        ),
        Benchmark(_qkv("decode", 1, 1, 4096, 32, 8, 128), (BF16, F32), FORWARD),
    ),
)

SCALED_DOT_PRODUCT_ATTENTION = OpSpec(
    name="scaled_dot_product_attention",
    family="attention",
    cuda="emulated",
    paper="Dao 2023, arXiv 2307.08691",
    inputs=_sdpa_inputs,
    differentiable=("query", "key", "value", "attn_mask"),
    flops=_attention_flops,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    cases=(
        _qkv("tiny", 1, 3, 4, 2, 2, 3, 2, ("bias",)),
        _qkv("plain", 2, 65, 100, 2, 2, 32),
        _qkv("topleft", 1, 65, 100, 2, 2, 32, is_causal=True),
        _qkv("topleft+", 1, 100, 65, 2, 2, 32, is_causal=True),
        _qkv("ends", 1, 33, 50, 4, 4, 32, None, ("ends",)),
        _qkv("gqa", 1, 33, 50, 4, 2, 32, enable_gqa=True, scale=0.2),
        _qkv("bool", 2, 33, 50, 2, 2, 32, None, ("mask",)),
        _qkv("nokeys", 1, 3, 0, 2, 2, 4),
    ),
    benchmarks=(
        Benchmark(
            _qkv("topleft", 4, 384, 384, 8, 8, 64, is_causal=True), (F32, BF16), EACH, "compute"
        ),
    ),
)


def _weights_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, tq, h = (case.sizes[k] for k in ("B", "Tq", "H"))
    made = _attention_inputs(case, random)
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
    flops=lambda case, pass_: _attention_flops(case, "forward") / 2,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    cases=(
        _qkv("tiny", 1, 3, 4, 2, 1, 3, None, ("bias",), causal=True),
        _qkv("plain", 2, 65, 130, 4, 2, 32),
        _qkv("causal", 2, 100, 100, 4, 2, 40, causal=True, softcap=3.0),
        _qkv("sums", 2, 200, 300, 4, 2, 32, causal=True, column_sums=True),
        _qkv("mask", 2, 63, 65, 2, 1, 32, None, ("mask",), column_sums=True),
        _qkv("fixed", 1, 160, 160, 4, 2, 16, mask=masks.Fixed(50, 3)),
        _qkv("ends", 1, 33, 70, 4, 2, 16, None, ("ends",)),
        _qkv("nokeys", 1, 5, 0, 2, 1, 8),
    ),
    benchmarks=(
        Benchmark(
            _qkv("sums", 1, 4096, 4096, 4, 4, 64, causal=True, column_sums=True),
            (F32,),
            FORWARD,
            "compute",
        ),
    ),
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
    """B sequences of up to Tq queries and Tk keys; the longest has them all."""
    longest = {"max_seqlen_q": Tq, "max_seqlen_k": Tk}
    return _qkv(label, B, Tq, Tk, H, G, D, None, tensors, **longest, **options)


def _lengths(case: Case, random: Random) -> tuple[Tensor, Tensor]:
    """Lengths (B,) of queries and keys, the same where Tq = Tk."""
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
    return made | _attention_tensors(case, random)


def _sequence_flops(case: Case, pass_: Pass) -> float:
    queries, keys = _lengths(case, Random(case.name, F32))
    sizes = zip(queries.tolist(), keys.tolist(), strict=True)
    each = ({**case.sizes, "B": 1, "Tq": tq, "Tk": tk} for tq, tk in sizes)
    return sum(_attention_flops(replace(case, sizes=s), pass_) for s in each)


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
        _packed("bias", 3, 60, 110, 4, 2, 16, ("bias per batch", "mask"), softcap=3.0),
        _packed("ends", 3, 40, 70, 4, 2, 16, ("ends",), return_lse=True),
        _packed("dropout", 3, 70, 70, 2, 2, 16, ("seed",), causal=True, dropout_p=0.3),
        _packed("strided", 4, 150, 150, 4, 2, 16, mask=masks.Strided(40, 9)),
        _packed("prefix", 2, 150, 150, 2, 2, 16, mask=masks.PrefixLM(torch.tensor([0, 70]))),
        _packed("relu2", 3, 60, 60, 2, 2, 16, normaliser="relu2", scale=0.05),
    ),
    benchmarks=(
        Benchmark(
            _packed("mixed", 8, 1024, 1024, 8, 8, 64, causal=True), (F32, BF16), EACH, "compute"
        ),
    ),
)


def _cached_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    _, keys = _lengths(case, random)
    made = _attention_inputs(case, random)
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
    """B sequences of up to `pages` pages of `size` tokens, some of them shared."""
    case = _qkv(label, B, Tq, size, H, G, D, None, ("block table", *tensors), **options)
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
    cases=(
        _qkv("tiny", 2, 2, 4, 2, 1, 3, causal=True, return_lse=True),
        _qkv("decode", 4, 1, 700, 4, 2, 32, causal=True, return_lse=True),
        _qkv("chunk", 3, 60, 200, 4, 2, 32, causal=True),
        _qkv("window", 3, 3, 300, 4, 2, 16, causal=True, window_size=(50, 0)),
        _qkv("terms", 3, 2, 100, 4, 2, 16, None, ("alibi", "sinks"), causal=True),
        _qkv("full", 2, 5, 5, 2, 2, 8, causal=True),
        _qkv("ends", 3, 2, 100, 4, 2, 16, None, ("ends",), return_lse=True),
        _paged("pages", 3, 1, 5, 16, 4, 2, 32, causal=True, return_lse=True),
        _paged("oddpages", 4, 3, 90, 7, 4, 2, 16, ("sinks",), causal=True),
        _paged("pagesoftokens", 2, 2, 40, 1, 4, 2, 16, ("alibi",), window_size=(20, 0)),
        _paged("chunkofpages", 3, 60, 5, 40, 4, 2, 16, causal=True),
    ),
    benchmarks=(
        Benchmark(_qkv("decode", 4, 1, 4096, 32, 8, 128, causal=True), (F32, BF16), FORWARD),
        Benchmark(_paged("pages", 4, 1, 64, 64, 32, 8, 128, causal=True), (F32, BF16), FORWARD),
    ),
)


SELECT_ATTENTION = OpSpec(
    name="select_attention",
    family="attention",
    cuda="emulated",
    paper="straight through: Bengio et al. 2013, arXiv 1308.3432",
    inputs=_attention_inputs,
    differentiable=("q", "k", "v"),
    flops=lambda case, pass_: _attention_flops(case, pass_) / 2,
    gradient_factor=GRADIENT_FACTOR,
    second_order=True,
    cases=(
        # One key each, for which straight-through gradients are the true ones.
        _qkv("tiny", 1, 3, 4, 2, 1, 3, 2, causal=True, window_size=(0, 0)),
        _qkv("plain", 2, 65, 130, 4, 2, 32),
        _qkv("dot", 2, 100, 300, 4, 2, 16, energy="dot", causal=True, tau=0.5),
        _qkv("theta", 2, 70, 70, 2, 2, 8, theta=1.0, scale=0.5),
        _qkv("mask", 2, 63, 65, 2, 1, 32, None, ("mask",), tau=3.0),
        _qkv("one", 2, 1, 40, 4, 1, 16),
        _qkv("nokeys", 1, 5, 0, 2, 1, 8),
    ),
    benchmarks=(
        Benchmark(_qkv("causal", 1, 1024, 1024, 8, 8, 64, causal=True), (F32,), FORWARD, "compute"),
    ),
)

SPECS = (
    ATTENTION,
    SCALED_DOT_PRODUCT_ATTENTION,
    ATTENTION_VARLEN,
    ATTENTION_CACHED,
    ATTENTION_WEIGHTS,
    SELECT_ATTENTION,
)
