"""Rows of goals.py for attention, masks, scores, caches and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from goal_rows.goal import (
    BF16,
    F32,
    PASSES,
    PRODUCTS,
    Provider,
    Row,
    provider,
    sdpa,
    self_attention,
    tensors,
)
from omniattn import functional
from omniattn.functional import masks, scores
from omniattn.modules import DifferentialAttention, KVCache, RollingCache
from omniattn.testing.spec import Function, Pass
from omniattn.testing.specs.attention import _score_mods


def with_table(
    make: Callable[[torch.Tensor], scores.RelativeBias],
) -> Function:
    """Returns attention with `table` as a tensor argument, so that it has a gradient."""

    def attention(q, k, v, table, **options):
        return functional.attention(q, k, v, relative=make(table), **options)

    return attention


def dense_rows() -> Iterator[Row]:
    """Dense fp32 attention against the machine's multiply-add rate, and against torch."""
    heads = 8
    for length, dim in ((1152, 128), (4096, 64), (4096, 128)):
        qkv = self_attention(1, length, heads, dim)
        for causal in (False, True):
            pairs = length * (length + 1) // 2 if causal else length * length
            for pass_ in PASSES:
                yield Row(
                    f"attention {'causal' if causal else 'full'} N{length} D{dim}",
                    pass_,
                    provider(pass_, qkv, functional.attention, causal=causal),
                    provider(pass_, qkv, sdpa, is_causal=causal),
                    "torch's attention",
                    1.0,
                    flops=2.0 * heads * pairs * dim * PRODUCTS[pass_],
                    least=0.8,
                )


def mask_rows() -> Iterator[Row]:
    """Time per visited tile: every mask takes at most 1.25 times its share of the dense call."""
    length, heads, dim = 4096, 4, 64
    qkv = self_attention(1, length, heads, dim)
    starts = torch.tensor([0, 300, 1000, 1100, 1900, 2400, 3000, 3800])
    found = {
        "window 256": masks.SlidingWindow(255, 0),
        "neighborhood 255": masks.Neighborhood(255),
        "dilated 4 x 64": masks.Dilated(4, 63),
        "strided 64": masks.Strided(64, 64),
        "fixed 128": masks.Fixed(128, 16),
        "prefix 1024": masks.PrefixLM(torch.tensor([1024])),
        "documents": masks.Documents(
            torch.searchsorted(starts, torch.arange(length), right=True)[None]
        )
        & masks.Causal(),
        "predicate": masks.from_predicate(
            lambda b, h, q, k: ((q - k).abs() < 200) | (k < 64) | (q // 512 == k // 512),
            length,
            length,
        ),
    }
    for pass_ in PASSES:
        dense = provider(pass_, qkv, functional.attention)
        for name, mask in found.items():
            pairs = mask.count(length, length) * heads
            yield Row(
                f"mask {name} N{length} D{dim}",
                pass_,
                provider(pass_, qkv, functional.attention, mask=mask),
                dense,
                "dense x visited area",
                1.25,
                share=mask.block_density(length, length),
                flops=2.0 * pairs * dim * PRODUCTS[pass_],
            )


def window_rows() -> Iterator[Row]:
    """A window of fixed size: time per visible pair is constant in the length."""
    short, heads, dim, window = 1024, 4, 64, masks.SlidingWindow(255, 0)
    for pass_ in PASSES:
        base = provider(
            pass_, self_attention(1, short, heads, dim), functional.attention, mask=window
        )
        for length in (2048, 4096, 8192, 16384, 32768):
            pairs = window.count(length, length) * heads
            yield Row(
                f"window 256 N{length} D{dim}",
                pass_,
                provider(
                    pass_,
                    self_attention(1, length, heads, dim),
                    functional.attention,
                    mask=window,
                ),
                base,
                f"the same at N{short}, per pair",
                1.15,
                share=pairs / (window.count(short, short) * heads),
                flops=2.0 * pairs * dim * PRODUCTS[pass_],
            )


VARLEN = [1024, 100, 700, 30, 512, 350, 900, 64]


def varlen_calls(pass_: Pass, dtype: torch.dtype = F32) -> tuple[Provider, Provider, int]:
    """Returns our packed call with 8 heads of 64, torch's padded call, and the number of pairs."""
    lengths, heads, dim, longest = VARLEN, 8, 64, max(VARLEN)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    shape = (sum(lengths), heads, dim)
    packed = dict(zip("qkv", tensors(*[shape] * 3, dtype=dtype), strict=True))
    padded = self_attention(len(lengths), longest, heads, dim, dtype)
    seen = torch.arange(longest) < torch.tensor(lengths)[:, None]
    hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)[:, None, None]
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    limits = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return (
        provider(pass_, packed, functional.attention_varlen, **options, **limits),
        provider(pass_, padded, sdpa, bias=hidden),
        sum(n * n for n in lengths),
    )


def varlen_rows() -> Iterator[Row]:
    """Packed sequences: time proportional to visible pairs, and against the padded call."""
    heads, dim, longest = 8, 64, max(VARLEN)
    for pass_ in PASSES:
        run, padded_call, pairs = varlen_calls(pass_)
        row = Row(
            f"varlen 8 sequences of {sum(VARLEN)} D{dim}",
            pass_,
            run,
            provider(pass_, self_attention(1, longest, heads, dim), functional.attention),
            "one sequence, per pair",
            1.15,
            share=pairs / longest**2,
            flops=2.0 * pairs * heads * dim * PRODUCTS[pass_],
        )
        yield row
        yield replace(row, yardstick=padded_call, against="padded SDPA", share=1.0, goal=1.0)


def score_rows() -> Iterator[Row]:
    """Score terms against the kernel without them, and a full bias against torch's."""
    length, heads, dim = 2048, 4, 64
    qkv = self_attention(1, length, heads, dim)
    windows = self_attention(512, 49, 4, 32)
    slopes, t5, bias, swin = tensors((heads,), (32, heads), (heads, length, length), (169, 4))
    t5_attention = with_table(scores.T5Bias)
    swin_attention = with_table(lambda table: scores.WindowBias(table, (7, 7)))
    terms = {
        "ALiBi": (qkv, {"alibi_slopes": slopes.abs()}, functional.attention, 1.15),
        "T5 table": (qkv, {"table": t5}, t5_attention, 1.15),
        "Swin table": (windows, {"table": swin}, swin_attention, 1.15),
        "full bias": (qkv, {"bias": bias}, functional.attention, 1.35),
    }
    for pass_ in PASSES:
        for name, (inputs, extra, function, goal) in terms.items():
            batch, tokens, count, size = inputs["q"].shape
            run = provider(pass_, inputs | extra, function)
            plain = provider(pass_, inputs, functional.attention)
            flops = 2.0 * batch * count * tokens**2 * size * PRODUCTS[pass_]
            row = Row(f"{name} N{tokens} D{size}", pass_, run, plain, "no term", goal, flops=flops)
            yield row
            if name == "full bias":
                masked = provider(pass_, inputs | extra, sdpa)
                yield replace(row, yardstick=masked, against="masked SDPA", goal=1 / 3)


def score_mod_rows() -> Iterator[Row]:
    """score_mod against the equivalent option, or against no score_mod."""
    length, heads, dim = 1024, 8, 64
    qkv = self_attention(1, length, heads, dim)
    (table,) = tensors((32, heads))
    same: dict[str, tuple[Function, dict[str, object]]] = {
        "softcap": (_score_mods.softcap, {"softcap": 20.0}),
        "ALiBi": (_score_mods.alibi, {"alibi_slopes": torch.exp2(-1.0 - torch.arange(heads))}),
        "T5": (_score_mods.t5, {"relative": scores.T5Bias(table)}),
        "gate": (_score_mods.gate, {}),
    }
    for pass_ in PASSES:
        for name, (score_mod, option) in same.items():
            yield Row(
                f"score_mod {name} N{length} D{dim}",
                pass_,
                provider(pass_, qkv, functional.attention, score_mod=score_mod),
                provider(pass_, qkv, functional.attention, **option),
                "the option" if option else "no function",
                1.5,
                flops=2.0 * heads * length**2 * dim * PRODUCTS[pass_],
            )


def normalizer_rows() -> Iterator[Row]:
    """Sigmoid and relu^2 against softmax; differential attention at most 1.1 times two calls."""
    length, heads, dim = 2048, 4, 64
    qkv = self_attention(1, length, heads, dim)
    for pass_ in PASSES:
        softmax = provider(pass_, qkv, functional.attention, causal=True)
        pairs = heads * length * (length + 1) / 2
        flops = 2.0 * pairs * dim * PRODUCTS[pass_]
        for name in ("sigmoid", "relu2"):
            run = provider(pass_, qkv, functional.attention, causal=True, normalizer=name)
            yield Row(f"{name} N{length} D{dim}", pass_, run, softmax, "softmax", 1.0, flops=flops)

    layer = DifferentialAttention(DifferentialAttention.Config(dim=512, num_heads=4, depth=3))
    x = tensors((1, length, 512))[0]
    q, k, v = (p(x).detach() for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    pairs_of = [t.unflatten(-1, (4, 2, 64)) for t in (q, k)]
    (q1, q2), (k1, k2) = (t.unbind(3) for t in pairs_of)
    named = {"q1": q1, "k1": k1, "q2": q2, "k2": k2, "v": v.unflatten(-1, (4, 128))}

    def two_calls(q1, k1, q2, k2, v):
        calls = (functional.attention(*pair, v, causal=True) for pair in ((q1, k1), (q2, k2)))
        return tuple(calls)

    def differential(q1, k1, q2, k2, v):
        first, second = two_calls(q1, k1, q2, k2, v)
        out = first - layer.scalar_lambda() * second
        return functional.rms_norm(out, layer.subln.weight) * (1 - layer.config.lambda_init)

    flops = {"forward": 2 * (64 + 128), "forward+backward": 2 * (4 * 64 + 3 * 128)}
    for pass_ in PASSES:
        run, both = (provider(pass_, named, f) for f in (differential, two_calls))
        yield Row(
            f"differential N{length} D64",
            pass_,
            run,
            both,
            "two calls that share v",
            1.1,
            flops=2 * 4 * length * (length + 1) / 2 * flops[pass_],
        )


def mla_rows() -> Iterator[Row]:
    """Heads of 192 and 128 against torch's math path; absorbed decoding against its ceiling."""
    length, heads = 1024, 16
    shapes = [(1, length, heads, d) for d in (192, 192, 128)]
    qkv = dict(zip("qkv", tensors(*shapes), strict=True))
    pairs = heads * length * (length + 1) / 2
    flops = {"forward": 2 * (192 + 128), "forward+backward": 2 * (4 * 192 + 3 * 128)}
    for pass_, goal in zip(PASSES, (1 / 3, 1 / 2.5), strict=True):
        yield Row(
            f"MLA prefill N{length} D192/128",
            pass_,
            provider(pass_, qkv, functional.attention, causal=True),
            provider(pass_, qkv, sdpa, is_causal=True),
            "SDPA",
            goal,
            flops=pairs * flops[pass_],
        )
    for dtype in (F32, BF16):
        q, k = tensors((1, 1, 128, 576), (1, 4096, 1, 576), dtype=dtype)
        absorbed = {"q": q, "k": k, "v": k[..., :512]}
        yield Row(
            "MLA absorbed decode H128 N4096",
            "forward",
            provider("forward", absorbed, functional.attention),
            provider("forward", absorbed, sdpa, enable_gqa=True),
            "SDPA",
            1.0,
            dtype=dtype,
            least=0.65,
            flops=2.0 * 128 * 4096 * (576 + 512),
        )


def cache_rows() -> Iterator[Row]:
    """Pages against contiguous keys; a rolling cache after many tokens against few tokens."""
    batch, length, heads, kv_heads, dim, size = 4, 4096, 32, 8, 128, 64
    for dtype in (F32, BF16):
        q, k, v = tensors(
            (batch, 1, heads, dim), *[(batch, length, kv_heads, dim)] * 2, dtype=dtype
        )
        order = torch.randperm(batch * length // size)
        pages = [torch.empty_like(t).view(-1, size, kv_heads, dim) for t in (k, v)]
        for page, t in zip(pages, (k, v), strict=True):
            page[order] = t.view(-1, size, kv_heads, dim)
        lengths = {"cache_seqlens": torch.full((batch,), length)}
        table = {"block_table": order.view(batch, -1).int()}
        paged = {"q": q, "k": pages[0], "v": pages[1]} | lengths | table
        contiguous = {"q": q, "k": k, "v": v} | lengths
        yield Row(
            f"paged decode B{batch} N{length} pages of {size}",
            "forward",
            provider("forward", paged, functional.attention_cached),
            provider("forward", contiguous, functional.attention_cached),
            "contiguous",
            1.1,
            dtype=dtype,
            bytes=k.nbytes + v.nbytes,
        )

    def decoding(cache: KVCache | RollingCache, generated: int) -> Provider:
        q, k, v = tensors((1, 1, heads, dim), *[(1, 1, kv_heads, dim)] * 2)
        for _ in range(0, generated, 512):
            cache.append(*(t.expand(1, 512, kv_heads, dim) for t in (k, v)))

        def step() -> object:
            with torch.no_grad():
                return functional.attention(q, *cache.append(k, v))

        return step

    window = 1024
    early, late = (RollingCache(1, window, kv_heads, dim) for _ in range(2))
    yield Row(
        f"rolling cache of {window}, 64 windows on",
        "forward",
        decoding(late, 64 * window),
        decoding(early, 2 * window),
        "2 windows on",
        1.1,
        bytes=early.nbytes,
    )


def expert_rows() -> Iterator[Row]:
    """More experts with a fixed number per token: time per token is constant."""
    tokens, top_k, dim, hidden, few = 16384, 2, 256, 512, 8

    def experts(count: int) -> dict[str, torch.Tensor]:
        shapes = [(tokens, dim), (tokens, count), (count, 2 * hidden, dim), (count, dim, hidden)]
        x, logits, up, down = tensors(*shapes)
        weights, index = logits.softmax(-1).topk(top_k)
        names = ("x", "index", "weights", "up", "down")
        return dict(zip(names, (x, index, weights, 0.05 * up, 0.05 * down), strict=True))

    for pass_ in PASSES:
        base = provider(pass_, experts(few), functional.moe_experts)
        for count in (16, 32, 64, 128):
            yield Row(
                f"moe_experts E{count} k{top_k} d{dim} f{hidden} T{tokens}",
                pass_,
                provider(pass_, experts(count), functional.moe_experts),
                base,
                f"the same with {few} experts",
                1.1,
                flops=2.0 * tokens * top_k * 3 * dim * hidden * (1 if pass_ == "forward" else 3),
            )
