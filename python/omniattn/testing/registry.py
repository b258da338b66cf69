"""The OpSpecs: one row per op, with the cases that tests, benchmarks and `omniattn check` use.

Case sizes: B batch, Tq/Tk lengths, H query heads, G key/value heads, D/Dv head sizes, R rotary
size, M rows (tokens), N columns (features out), K features in, V vocabulary, E experts, S slots; of
paged attention N pages of Tk tokens for each sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.functional import masks
from omniattn.reference.moe import experts_in_dtype
from omniattn.testing import rivals
from omniattn.testing.spec import Benchmark, Case, OpSpec, Pass, Random

__all__ = ["registry"]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FORWARD: tuple[Pass, ...] = ("forward",)
EACH: tuple[Pass, ...] = ("forward", "backward")
TRAINING: tuple[Pass, ...] = ("forward+backward",)


@functools.cache
def registry() -> dict[str, OpSpec]:
    """All OpSpecs by name."""
    return {
        spec.name: spec
        for spec in (
            *_attention(),
            *_norms(),
            _rotary(),
            _qk_norm(),
            *_glus(),
            *_ffns(),
            *_gemms(),
            _moe(),
            _top_k(),
        )
    }


# The backward of flash attention takes rowsum(dO * O) from O as it was rounded to the dtype.
ATTENTION_GRADIENT_FACTOR = 4.0
# That error is a row's, and a slope's gradient adds it up times the distances of all keys.
SLOPES_GRADIENT_FACTOR = 20.0
# On tensor cores O also has the error of P as it was rounded to the dtype before it met V.
SINKS_GRADIENT_FACTOR = 8.0
ATTENTION_GRADIENT_FACTORS = {
    "alibi_slopes": SLOPES_GRADIENT_FACTOR,
    "sinks": SINKS_GRADIENT_FACTOR,
}

# attention ----------------------------------------------------------------------------------------


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
        "bias per key": lambda: {"bias": random.normal(b, 1, 1, tk)},
        "mask": lambda: {"mask": _mask_with_empty_row(random, b, tq, tk)},
        "padding": lambda: {"mask": torch.arange(tk) < random.integers(tk + 1, b, 1, 1, 1)},
        "alibi": lambda: {"alibi_slopes": random.normal(h) / 8},
        "alibi per batch": lambda: {"alibi_slopes": random.normal(b, h) / 8},
        "sinks": lambda: {"sinks": random.normal(h)},
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


def _attention() -> tuple[OpSpec, ...]:
    decode = _qkv("decode", 1, 1, 4096, 32, 8, 128)
    attention = OpSpec(
        name="attention",
        family="attention",
        cuda="emulated",
        paper="Dao 2023, arXiv 2307.08691",
        inputs=_attention_inputs,
        differentiable=("q", "k", "v", "bias", "alibi_slopes", "sinks", "head_scale"),
        flops=_attention_flops,
        gradient_factor=ATTENTION_GRADIENT_FACTOR,
        gradient_factors=ATTENTION_GRADIENT_FACTORS,
        second_order=True,
        rivals=rivals.ATTENTION,
        cases=(
            _qkv("tiny", 1, 3, 4, 2, 1, 3, 2, ("bias",), causal=True, return_lse=True),
            _qkv("plain", 2, 64, 64, 2, 2, 64),
            _qkv("one", 1, 1, 1, 1, 1, 1, 1),
            _qkv("offtile", 2, 63, 100, 4, 2, 40, return_lse=True),
            _qkv("tile+1", 1, 65, 129, 2, 1, 65),
            _qkv("blocks", 1, 300, 520, 2, 1, 128, causal=True, return_lse=True),
            _qkv("causal", 2, 100, 100, 4, 2, 64, causal=True),
            _qkv("cached", 1, 7, 200, 4, 1, 32, causal=True),
            _qkv("emptyrows", 1, 100, 63, 2, 2, 32, causal=True, return_lse=True),
            _qkv("window", 1, 200, 200, 2, 1, 32, causal=True, window_size=(17, 0)),
            _qkv("band", 2, 150, 170, 2, 2, 16, window_size=(9, 5)),
            _qkv("DnotDv", 1, 65, 65, 2, 2, 24, 40, causal=True),
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
                ("forward", "forward+backward"),
                "compute",
            ),
            Benchmark(
                _qkv("bias", 2, 512, 512, 8, 8, 64, None, ("bias",)), (F32,), TRAINING, "compute"
            ),
            Benchmark(decode, (BF16, F32), FORWARD),
        ),
    )
    sdpa = OpSpec(
        name="scaled_dot_product_attention",
        family="attention",
        cuda="emulated",
        paper="Dao 2023, arXiv 2307.08691",
        inputs=_sdpa_inputs,
        differentiable=("query", "key", "value", "attn_mask"),
        flops=_attention_flops,
        gradient_factor=ATTENTION_GRADIENT_FACTOR,
        second_order=True,
        rivals=rivals.SDPA,
        cases=(
            _qkv("tiny", 1, 3, 4, 2, 2, 3, 2, ("bias",)),
            _qkv("plain", 2, 65, 100, 2, 2, 32),
            _qkv("topleft", 1, 65, 100, 2, 2, 32, is_causal=True),
            _qkv("topleft+", 1, 100, 65, 2, 2, 32, is_causal=True),
            _qkv("gqa", 1, 33, 50, 4, 2, 32, enable_gqa=True, scale=0.2),
            _qkv("bool", 2, 33, 50, 2, 2, 32, None, ("mask",)),
            _qkv("nokeys", 1, 3, 0, 2, 2, 4),
        ),
    )
    return attention, sdpa, _varlen(), _cached(), _weights(), _select()


def _weights_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, tq, h = (case.sizes[k] for k in ("B", "Tq", "H"))
    made = _attention_inputs(case, random)
    del made["v"]
    wide = torch.float64 if random.dtype == torch.float64 else torch.float32
    return made | {"lse": random.normal(b, h, tq).to(wide) + 4}


def _weights() -> OpSpec:
    return OpSpec(
        name="attention_weights",
        family="attention",
        cuda="emulated",
        paper="Dao 2023, arXiv 2307.08691",
        inputs=_weights_inputs,
        differentiable=("q", "k", "lse", "bias"),
        flops=lambda case, pass_: _attention_flops(case, "forward") / 2,
        gradient_factor=ATTENTION_GRADIENT_FACTOR,
        second_order=True,
        rivals=rivals.WEIGHTS,
        cases=(
            _qkv("tiny", 1, 3, 4, 2, 1, 3, None, ("bias",), causal=True),
            _qkv("plain", 2, 65, 130, 4, 2, 32),
            _qkv("causal", 2, 100, 100, 4, 2, 40, causal=True, softcap=3.0),
            _qkv("sums", 2, 200, 300, 4, 2, 32, causal=True, column_sums=True),
            _qkv("mask", 2, 63, 65, 2, 1, 32, None, ("mask",), column_sums=True),
            _qkv("fixed", 1, 160, 160, 4, 2, 16, mask=masks.Fixed(50, 3)),
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


def _varlen() -> OpSpec:
    mixed = _packed("mixed", 8, 1024, 1024, 8, 8, 64, causal=True)
    return OpSpec(
        name="attention_varlen",
        family="attention",
        cuda="emulated",
        paper="Dao 2023, arXiv 2307.08691",
        inputs=_varlen_inputs,
        differentiable=("q", "k", "v", "bias", "alibi_slopes", "sinks", "head_scale"),
        flops=_sequence_flops,
        gradient_factor=ATTENTION_GRADIENT_FACTOR,
        gradient_factors=ATTENTION_GRADIENT_FACTORS,
        second_order=True,
        rivals=rivals.VARLEN,
        cases=(
            _packed("tiny", 3, 3, 3, 2, 1, 3, ("bias",), causal=True, return_lse=True),
            _packed("self", 5, 130, 130, 4, 2, 32, causal=True, return_lse=True),
            _packed("cross", 5, 70, 200, 4, 2, 32, return_lse=True),
            _packed("short", 9, 20, 20, 4, 1, 16, window_size=(3, 2)),
            _packed("decode", 6, 1, 300, 4, 2, 32, causal=True),
            _packed("terms", 4, 120, 120, 4, 2, 16, ("alibi per batch", "sinks", "head scale")),
            _packed("bias", 3, 60, 110, 4, 2, 16, ("bias per batch", "mask"), softcap=3.0),
            _packed("dropout", 3, 70, 70, 2, 2, 16, ("seed",), causal=True, dropout_p=0.3),
            _packed("strided", 4, 150, 150, 4, 2, 16, mask=masks.Strided(40, 9)),
            _packed("prefix", 2, 150, 150, 2, 2, 16, mask=masks.PrefixLM(torch.tensor([0, 70]))),
            _packed("relu2", 3, 60, 60, 2, 2, 16, normaliser="relu2", scale=0.05),
        ),
        benchmarks=(Benchmark(mixed, (F32, BF16), EACH, "compute"),),
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


def _cached() -> OpSpec:
    decode = _qkv("decode", 4, 1, 4096, 32, 8, 128, causal=True)
    return OpSpec(
        name="attention_cached",
        family="attention",
        cuda="emulated",
        paper="Dao 2023, arXiv 2307.08691",
        inputs=_cached_inputs,
        differentiable=("q", "k", "v", "alibi_slopes", "sinks"),
        flops=_sequence_flops,
        gradient_factor=ATTENTION_GRADIENT_FACTOR,
        gradient_factors=ATTENTION_GRADIENT_FACTORS,
        second_order=True,
        rivals=rivals.CACHED,
        cases=(
            _qkv("tiny", 2, 2, 4, 2, 1, 3, causal=True, return_lse=True),
            _qkv("decode", 4, 1, 700, 4, 2, 32, causal=True, return_lse=True),
            _qkv("chunk", 3, 60, 200, 4, 2, 32, causal=True),
            _qkv("window", 3, 3, 300, 4, 2, 16, causal=True, window_size=(50, 0)),
            _qkv("terms", 3, 2, 100, 4, 2, 16, None, ("alibi", "sinks"), causal=True),
            _qkv("full", 2, 5, 5, 2, 2, 8, causal=True),
            _paged("pages", 3, 1, 5, 16, 4, 2, 32, causal=True, return_lse=True),
            _paged("oddpages", 4, 3, 90, 7, 4, 2, 16, ("sinks",), causal=True),
            _paged("pagesoftokens", 2, 2, 40, 1, 4, 2, 16, ("alibi",), window_size=(20, 0)),
            _paged("chunkofpages", 3, 60, 5, 40, 4, 2, 16, causal=True),
        ),
        benchmarks=(
            Benchmark(decode, (F32, BF16), FORWARD),
            Benchmark(_paged("pages", 4, 1, 64, 64, 32, 8, 128, causal=True), (F32, BF16), FORWARD),
        ),
    )


def _select() -> OpSpec:
    return OpSpec(
        name="select_attention",
        family="attention",
        cuda="emulated",
        paper="straight through: Bengio et al. 2013, arXiv 1308.3432",
        inputs=_attention_inputs,
        differentiable=("q", "k", "v"),
        flops=lambda case, pass_: _attention_flops(case, pass_) / 2,
        gradient_factor=ATTENTION_GRADIENT_FACTOR,
        second_order=True,
        rivals={"eager": reference.select_attention},
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
            Benchmark(
                _qkv("causal", 1, 1024, 1024, 8, 8, 64, causal=True), (F32,), FORWARD, "compute"
            ),
        ),
    )


# rows ---------------------------------------------------------------------------------------------


def _rows(label: str, M: int, N: int, tensors: tuple[str, ...] = (), **options: Any) -> Case:
    return Case(label, {"M": M, "N": N}, tensors, options)


def _norm_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, n = case.sizes["M"], case.sizes["N"]
    shapes = {"x": (m, n), "weight": (n,), "bias": (n,), "residual": (m, n), "gate": (m, n)}
    return {name: random.normal(*shapes[name]) for name in ("x", *case.tensors)}


def _element_flops(per_element: int) -> Callable[[Case, Pass], float]:
    """Nominal counts: these ops are bound by memory."""

    def flops(case: Case, pass_: Pass) -> float:
        elements = case.sizes["M"] * case.sizes["N"]
        passes = {"forward": 1, "backward": 2, "forward+backward": 3}[pass_]
        return float(per_element * elements * passes)

    return flops


def _norms() -> tuple[OpSpec, ...]:
    sizes = [(3, 1), (5, 63), (4, 64), (7, 65), (33, 100), (64, 1024), (3, 4097), (700, 48)]
    empties = [(0, 8), (3, 0)]
    speed = (2048, 1024)
    rms = OpSpec(
        name="rms_norm",
        family="norm",
        cuda="emulated",
        paper="Zhang and Sennrich 2019, arXiv 1910.07467",
        inputs=_norm_inputs,
        differentiable=("x", "weight", "residual"),
        flops=_element_flops(4),
        rivals=rivals.RMS_NORM,
        cases=(
            _rows("tiny", 3, 5, ("weight", "residual"), offset=1.0),
            *(_rows("plain", m, n, ("weight",)) for m, n in sizes + empties),
            _rows("bare", 17, 130, eps=1e-3),
            _rows("offset", 17, 130, ("weight",), offset=1.0),
            _rows("residual", 33, 65, ("weight", "residual")),
            _rows("bareresidual", 9, 1025, ("residual",)),
        ),
        benchmarks=(
            Benchmark(_rows("plain", *speed, ("weight",)), (F32, BF16), TRAINING),
            Benchmark(_rows("residual", *speed, ("weight", "residual")), (F32,), TRAINING),
            Benchmark(_rows("call", 4, 64, ("weight",)), (F32,), ("forward", "forward+backward")),
        ),
    )
    layer = OpSpec(
        name="layer_norm",
        family="norm",
        cuda="emulated",
        paper="Ba, Kiros and Hinton 2016, arXiv 1607.06450",
        inputs=_norm_inputs,
        differentiable=("x", "weight", "bias", "residual"),
        flops=_element_flops(6),
        rivals=rivals.LAYER_NORM,
        cases=(
            _rows("tiny", 3, 5, ("weight", "bias", "residual")),
            *(_rows("plain", m, n, ("weight", "bias")) for m, n in sizes[1:] + empties),
            _rows("bare", 17, 130, eps=1e-3),
            _rows("nobias", 17, 130, ("weight",)),
            _rows("residual", 33, 65, ("weight", "bias", "residual")),
        ),
        benchmarks=(Benchmark(_rows("plain", *speed, ("weight", "bias")), (F32, BF16), TRAINING),),
    )
    groups = tuple(
        _rows("groups", m, n, ("weight", "bias"), num_groups=g)
        for m, n, g in [(5, 63, 3), (7, 130, 2), (33, 256, 4), (300, 48, 6), (0, 8, 2), (3, 0, 1)]
    )
    group = OpSpec(
        name="group_norm",
        family="norm",
        cuda="emulated",
        paper="Wu and He 2018, arXiv 1803.08494",
        inputs=_norm_inputs,
        differentiable=("x", "weight", "bias"),
        flops=_element_flops(6),
        second_order=True,
        rivals=rivals.GROUP_NORM,
        cases=(
            _rows("tiny", 3, 6, ("weight", "bias"), num_groups=2),
            *groups,
            _rows("bare", 17, 130, num_groups=13, eps=1e-3),
            _rows("rms", 17, 130, ("weight",), num_groups=2, center=False),
            _rows("long", 3, 5000, ("bias",), num_groups=1),
        ),
        benchmarks=(
            Benchmark(
                _rows("heads", 2048, 1024, ("weight", "bias"), num_groups=16), (F32, BF16), TRAINING
            ),
        ),
    )
    gated = OpSpec(
        name="rms_norm_gated",
        family="norm",
        cuda="emulated",
        paper="Dao and Gu 2024, arXiv 2405.21060",
        inputs=_norm_inputs,
        differentiable=("x", "gate", "weight"),
        flops=_element_flops(10),
        second_order=True,
        rivals=rivals.RMS_NORM_GATED,
        cases=(
            _rows("tiny", 3, 6, ("gate", "weight"), num_groups=2, norm_before_gate=False),
            *(
                _rows("after", m, n, ("gate", "weight"))
                for m, n in [(5, 63), (4, 64), (33, 100), (64, 1024), (3, 4097), (0, 8), (3, 0)]
            ),
            _rows("before", 33, 130, ("gate", "weight"), norm_before_gate=False),
            _rows("beforegroups", 33, 256, ("gate",), norm_before_gate=False, num_groups=4),
            _rows("sigmoid", 17, 96, ("gate", "weight"), activation="sigmoid", num_groups=3),
            _rows("sigmoidbefore", 9, 64, ("gate",), activation="sigmoid", norm_before_gate=False),
        ),
        benchmarks=(
            Benchmark(_rows("after", *speed, ("gate", "weight")), (F32, BF16), TRAINING),
            Benchmark(
                _rows("before", *speed, ("gate", "weight"), norm_before_gate=False),
                (F32, BF16),
                TRAINING,
            ),
        ),
    )
    return rms, layer, group, gated


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


def _rotary() -> OpSpec:
    return OpSpec(
        name="apply_rotary",
        family="rope",
        cuda="emulated",
        paper="Su et al. 2021, arXiv 2104.09864",
        inputs=_rotary_inputs,
        differentiable=("q", "k"),
        flops=_rotary_flops,
        second_order=True,
        rivals=rivals.ROTARY,
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


def _qk_norm() -> OpSpec:
    weights = ("weights",)
    return OpSpec(
        name="qk_norm_rotary",
        family="rope",
        cuda="emulated",
        paper="Henry et al. 2020, arXiv 2010.04245",
        inputs=_qk_norm_inputs,
        differentiable=("q", "k", "q_weight", "k_weight"),
        flops=_rotary_flops,
        second_order=True,
        rivals=rivals.QK_NORM_ROTARY,
        cases=(
            _heads("tiny", 1, 2, 2, 1, 6, 4, weights),
            _heads("half", 2, 63, 4, 2, 64, None, weights),
            _heads("interleaved", 2, 65, 4, 2, 64, None, weights, interleaved=True),
            _heads("partial", 2, 33, 3, 1, 40, 10, weights, rotary_start=17, offset=1.0),
            _heads("partialpairs", 2, 33, 3, 1, 41, 10, weights, interleaved=True),
            _heads("bare", 1, 5, 2, 2, 130, eps=1e-3),
            _heads("positions", 2, 30, 2, 1, 32, None, ("positions", *weights)),
            _heads("offset", 2, 1, 2, 1, 32, None, ("long tables", *weights), positions=77),
            _heads("empty", 2, 0, 4, 2, 64, None, weights),
        ),
        benchmarks=(
            Benchmark(_heads("half", 1, 2048, 16, 4, 128, None, weights), (F32, BF16), TRAINING),
        ),
    )


def _glu_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, n = case.sizes["M"], case.sizes["N"]
    if "packed" in case.tensors:
        return {"gate": random.normal(m, 2 * n)}
    return {"gate": random.normal(m, n), "up": random.normal(m, n)}


def _glus() -> tuple[OpSpec, ...]:
    cases = (
        _rows("tiny", 2, 3, ("packed",)),
        *(_rows("pair", m, n) for m, n in [(3, 1), (5, 63), (4, 64), (7, 65), (33, 1000), (0, 4)]),
        *(_rows("packed", m, n, ("packed",)) for m, n in [(5, 63), (33, 1000), (3, 0)]),
    )
    tanh = tuple(
        _rows(f"tanh{label}", 33, 100, tensors, approximate="tanh")
        for label, tensors in (("pair", ()), ("packed", ("packed",)))
    )
    speed = (Benchmark(_rows("pair", 2048, 1024), (F32, BF16), TRAINING),)
    rows = {"swiglu": (), "geglu": tanh, "reglu": (), "glu": (), "bilinear": ()}
    return tuple(
        OpSpec(
            name=name,
            family="activation",
            cuda="emulated",
            paper="Shazeer 2020, arXiv 2002.05202",
            inputs=_glu_inputs,
            differentiable=("gate", "up"),
            flops=_element_flops(6),
            second_order=True,
            rivals=rivals.GLU[name],
            cases=cases + extra,
            benchmarks=speed if name in ("swiglu", "geglu") else (),
        )
        for name, extra in rows.items()
    )


# feed-forward layers ------------------------------------------------------------------------------


def _ffn(
    label: str,
    M: int,
    K: int,
    F: int,
    N: int | None = None,
    tensors: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    return Case(label, {"M": M, "K": K, "F": F, "N": K if N is None else N}, tensors, options)


def _ffn_inputs(gated: bool) -> Callable[[Case, Random], dict[str, Tensor]]:
    def inputs(case: Case, random: Random) -> dict[str, Tensor]:
        m, k, f, n = (case.sizes[s] for s in "MKFN")
        scale = max(k, 1) ** -0.5, max(f, 1) ** -0.5
        shapes = {"gate_bias": (f,), "up_bias": (f,), "down_bias": (n,)}
        made = {"x": random.normal(m, k)}
        if gated:
            made["gate_weight"] = random.normal(f, k) * scale[0]
        made |= {
            "up_weight": random.normal(f, k) * scale[0],
            "down_weight": random.normal(n, f) * scale[1],
        }
        if "biases" in case.tensors:
            made |= {b: random.normal(*s) for b, s in shapes.items() if gated or b != "gate_bias"}
        return made | ({"seed": torch.tensor([7, 3])} if "seed" in case.tensors else {})

    return inputs


def _ffn_flops(projections: int) -> Callable[[Case, Pass], float]:
    def flops(case: Case, pass_: Pass) -> float:
        m, k, f, n = (case.sizes[s] for s in "MKFN")
        passes = {"forward": 1, "backward": 2, "forward+backward": 3}[pass_]
        return 2.0 * m * f * (projections * k + n) * passes

    return flops


def _ffns() -> tuple[OpSpec, OpSpec]:
    sizes = [(1, 1, 1, 1), (33, 65, 100, 63), (5, 300, 17, 40), (0, 5, 6, 7), (5, 6, 7, 0)]
    cases = (
        _ffn("tiny", 2, 3, 4, 5, ("biases",)),
        _ffn("plain", 64, 64, 128),
        *(_ffn("offtile", m, k, f, n, ("biases",)) for m, k, f, n in sizes),
        _ffn("recompute", 33, 48, 80, None, ("biases",), recompute=True),
        _ffn("dropout", 33, 48, 80, None, ("seed",), dropout_p=0.3),
        *(
            _ffn(name, 17, 33, 40, None, (), activation=name)
            for name in ("relu", "gelu", "gelu_tanh", "sigmoid", "quick_gelu", "relu_squared")
        ),
    )
    shared: dict[str, Any] = {
        "family": "ffn",
        "cuda": "emulated",
        "second_order": True,
        "chooses": True,
        "cases": cases,
    }
    glu_mlp = OpSpec(
        name="glu_mlp",
        paper="Shazeer 2020, arXiv 2002.05202",
        inputs=_ffn_inputs(True),
        differentiable=(
            "x",
            "gate_weight",
            "up_weight",
            "down_weight",
            "gate_bias",
            "up_bias",
            "down_bias",
        ),
        flops=_ffn_flops(2),
        rivals=rivals.GLU_MLP,
        benchmarks=(
            Benchmark(_ffn("swiglu", 2048, 512, 1408), (F32,), EACH, "compute"),
            Benchmark(_ffn("swiglu", 2048, 512, 1408), (BF16,), TRAINING, "compute"),
        ),
        **shared,
    )
    mlp = OpSpec(
        name="mlp",
        paper="Vaswani et al. 2017, arXiv 1706.03762",
        inputs=_ffn_inputs(False),
        differentiable=("x", "up_weight", "down_weight", "up_bias", "down_bias"),
        flops=_ffn_flops(1),
        rivals=rivals.MLP,
        benchmarks=(Benchmark(_ffn("gelu", 2048, 512, 2048), (F32,), TRAINING, "compute"),),
        **shared,
    )
    return glu_mlp, mlp


# gemm and losses ----------------------------------------------------------------------------------


def _gemm(
    label: str, M: int, N: int, K: int, tensors: tuple[str, ...] = (), **options: Any
) -> Case:
    return Case(label, {"M": M, "N": N, "K": K}, tensors, options)


def _linear_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, n, k = (case.sizes[s] for s in "MNK")
    made = {"x": random.normal(m, k), "weight": random.normal(n, k)}
    return made | {"bias": random.normal(n)} if "bias" in case.tensors else made


def _gemm_flops(case: Case, pass_: Pass) -> float:
    size = 2.0 * case.sizes["M"] * case.sizes.get("N", case.sizes.get("V", 0)) * case.sizes["K"]
    return size * {"forward": 1, "backward": 2, "forward+backward": 3}[pass_]


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


def _gemms() -> tuple[OpSpec, ...]:
    linear = OpSpec(
        name="linear",
        family="gemm",
        cuda="emulated",
        paper="Goto and van de Geijn 2008, doi 10.1145/1356052.1356053",
        inputs=_linear_inputs,
        differentiable=("x", "weight", "bias"),
        flops=_gemm_flops,
        second_order=True,
        chooses=True,
        rivals=rivals.LINEAR,
        cases=(
            _gemm("tiny", 2, 3, 4, ("bias",)),
            _gemm("plain", 64, 64, 64),
            *(
                _gemm("offtile", m, n, k, ("bias",))
                for m, n, k in [(1, 1, 1), (63, 65, 100), (65, 63, 1), (1, 300, 257), (130, 1, 33)]
            ),
            _gemm("blocks", 200, 520, 700, ("bias",)),
            *(_gemm("empty", m, n, k, ("bias",)) for m, n, k in [(0, 5, 6), (5, 0, 6), (5, 6, 0)]),
        ),
        benchmarks=(
            Benchmark(_gemm("square", 1024, 1024, 1024), (F32,), EACH, "compute"),
            Benchmark(_gemm("square", 1024, 1024, 1024), (BF16, F16), FORWARD, "compute"),
        ),
    )
    options: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
        ("ignored", ("ignored",), {}),
        ("ignore7", ("ignored",), {"ignore_index": 7, "reduction": "sum"}),
        ("smooth", ("ignored",), {"label_smoothing": 0.1}),
        ("zloss", ("ignored",), {"z_loss": 1e-2, "reduction": "none"}),
        ("everything", ("ignored",), {"label_smoothing": 0.2, "z_loss": 1e-3}),
        ("nothing", ("all ignored",), {}),
    )
    cross_entropy = OpSpec(
        name="cross_entropy",
        family="loss",
        cuda="emulated",
        paper="Milakov and Gimelshein 2018, arXiv 1805.02867",
        inputs=_loss_inputs,
        differentiable=("logits",),
        flops=lambda case, pass_: 4.0 * case.sizes["M"] * case.sizes["V"] * (1 + ("+" in pass_)),
        rivals=rivals.CROSS_ENTROPY,
        cases=(
            _loss("tiny", 3, 5, label_smoothing=0.1, z_loss=1e-2),
            *(_loss("plain", m, v) for m, v in [(4, 1), (5, 63), (64, 64), (7, 65), (9, 5003)]),
            *(_loss(label, 33, 100, tensors, **kw) for label, tensors, kw in options),
            _loss("empty", 0, 8),
        ),
        benchmarks=(Benchmark(_loss("plain", 1024, 32000), (F32, BF16), TRAINING),),
    )
    linear_cross_entropy = OpSpec(
        name="linear_cross_entropy",
        family="loss",
        cuda="emulated",
        paper="Wijmans et al. 2024, arXiv 2411.09009",
        inputs=_fused_loss_inputs,
        differentiable=("x", "weight", "bias"),
        flops=_gemm_flops,
        rivals=rivals.LINEAR_CROSS_ENTROPY,
        cases=(
            _fused_loss("tiny", 3, 5, 4, ("bias",), label_smoothing=0.1, z_loss=1e-2),
            _fused_loss("plain", 65, 100, 33),
            _fused_loss("plain", 7, 3001, 64, ("bias",)),
            *(
                _fused_loss(label, 33, 100, 24, (*tensors, "bias"), **kw)
                for label, tensors, kw in options
            ),
            _fused_loss("empty", 0, 8, 4),
        ),
        benchmarks=(
            Benchmark(_fused_loss("plain", 1024, 8192, 512), (F32, BF16), TRAINING, "compute"),
        ),
    )
    return linear, cross_entropy, linear_cross_entropy


# mixture of experts -------------------------------------------------------------------------------


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
    return 6.0 * m * s * k * n * {"forward": 1, "backward": 2, "forward+backward": 3}[pass_]


def _moe() -> OpSpec:
    gpt_oss = {"activation": "clamped_swiglu", "interleaved": True}
    both: tuple[Pass, ...] = ("forward", "forward+backward")
    return OpSpec(
        name="moe_experts",
        family="moe",
        cuda="emulated",
        paper="Shazeer et al. 2017, arXiv 1701.06538",
        inputs=_moe_inputs,
        differentiable=("x", "weights", "up", "down", "up_bias", "down_bias"),
        flops=_moe_flops,
        # Pre-activations are kept for the backward in the dtype, as eager keeps them: in fp32 they
        # would take twice the memory. On CUDA h and the gradient of pre pass through it too, as
        # operands of tensor cores. Multiples of eager's error, measured: at most 0.9 (CPU) and 1.3
        # (CUDA) in y, 2.3 and 1.9 in gradients.
        eager=experts_in_dtype,
        second_order=True,
        rivals=rivals.MOE,
        cases=(
            _experts("tiny", 3, 2, 2, 3, 2, ("biases",)),
            _experts("mixtral", 100, 4, 2, 40, 72),
            _experts("gptoss", 60, 4, 2, 40, 136, ("transposed", "biases", "dropped"), **gpt_oss),
            _experts("many", 150, 33, 6, 24, 20, activation="geglu"),
            _experts("recompute", 90, 2, 2, 65, 130, ("biases",), recompute=True),
            _experts("one", 1, 5, 1, 300, 129, activation="gelu"),
            _experts("interleaved", 20, 3, 3, 17, 31, ("dropped",), interleaved=True),
            _experts("all", 40, 3, 3, 70, 33, ("transposed",), activation="silu"),
            _experts(
                "oneexpert", 600, 2, 1, 24, 24, ("one expert", "transposed"), activation="relu"
            ),
            _experts("reglu", 30, 2, 2, 16, 300, activation="reglu"),
            _experts("bilinear", 9, 2, 4, 16, 16, activation="bilinear"),
            _experts("tanh", 9, 2, 1, 16, 16, activation="geglu_tanh"),
            _experts("notokens", 0, 3, 2, 8, 8, ("biases",)),
            _experts("noslots", 3, 3, 0, 8, 8),
            _experts("nofeatures", 5, 3, 2, 8, 0, ("biases",)),
            _experts("nodim", 5, 3, 2, 0, 8, ("biases",)),
        ),
        benchmarks=(
            Benchmark(_experts("mixtral", 1024, 8, 2, 512, 1024), (F32, BF16), both, "compute"),
            Benchmark(_experts("batch", 64, 8, 2, 512, 1024), (F32, BF16), FORWARD),
            Benchmark(_experts("decode", 4, 8, 2, 512, 1024), (F32, BF16), FORWARD),
            Benchmark(_experts("small", 2048, 64, 6, 256, 256), (F32, BF16), both, "compute"),
        ),
    )


def _scores(
    label: str, M: int, N: int, k: int, tensors: tuple[str, ...] = (), **options: Any
) -> Case:
    return Case(label, {"M": M, "N": N}, tensors, {"k": k, **options})


def _top_k_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    m, n = case.sizes["M"], case.sizes["N"]
    made = {"scores": random.normal(m, n)}
    if "ties" in case.tensors:
        made["scores"] = made["scores"].round()
    if "mask" in case.tensors:
        made["mask"] = random.uniform(m, n) < 0.2
    return made


def _top_k() -> OpSpec:
    return OpSpec(
        name="top_k",
        family="topk",
        cuda="emulated",
        paper="stable, as np.argsort",
        inputs=_top_k_inputs,
        differentiable=("scores",),
        flops=_element_flops(1),
        second_order=True,
        rivals=rivals.TOP_K,
        cases=(
            _scores("tiny", 2, 5, 3),
            _scores("experts", 33, 64, 6),
            _scores("ties", 20, 100, 40, ("ties",)),
            _scores("mask", 20, 65, 20, ("ties", "mask")),
            _scores("long", 3, 3000, 9),
            _scores("all", 5, 17, 17),
            _scores("none", 5, 17, 0),
            _scores("empty", 0, 4, 2),
        ),
        benchmarks=(
            Benchmark(_scores("experts", 2048, 64, 6), (F32,), FORWARD),
            Benchmark(_scores("keys", 1024, 4096, 64), (F32,), FORWARD),
        ),
    )
