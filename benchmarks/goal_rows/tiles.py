"""Rows of goals.py for CPUs with AMX: bf16 products on tiles against torch, which also uses AMX.

    python benchmarks/goals.py --group tiles

The goals come from prototypes on a Sapphire Rapids with two cores. Machines without AMX have no
rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from baselines.ffn import BASELINES as FFN
from baselines.loss import linear_cross_entropy
from baselines.moe import experts_grouped
from tqdm import tqdm

from goal_rows.attention import varlen_calls
from goal_rows.goal import BF16, F32, PASSES, PRODUCTS, Row, provider, sdpa, self_attention, tensors
from omniattn import functional
from omniattn.config import CPU_ISAS
from omniattn.functional import masks
from omniattn.ops import gemm
from omniattn.testing.spec import Pass

#: (length, head size) -> speed-ups over torch: full forward, causal forward, and forward and
#: backward of both.
ATTENTION = {
    (1152, 128): (1.55, 1.75, 2.6),
    (4096, 128): (1.7, 1.9, 2.8),
    (1152, 64): (2.1, 2.3, 3.8),
    (4096, 64): (2.1, 2.3, 3.8),
}
#: Head size -> speed-up over torch's backward.
BACKWARD = {128: 3.5, 64: 5.0}
#: Size of a square product -> speed-up over oneDNN.
LINEAR = {1024: 1.8, 2048: 1.1}
#: Number of bf16 pieces -> speed-up over MKL's fp32 product.
PIECES = {3: 1.4, 2: 2.2}
#: (tokens, experts, experts per token, width, hidden): a layer like Mixtral's, and many small ones.
EXPERTS = [(1024, 8, 2, 512, 1792), (2048, 64, 6, 512, 352)]


def _attention_rows() -> Iterator[Row]:
    heads = 8
    for (length, dim), (full, causal, both) in ATTENTION.items():
        qkv = self_attention(1, length, heads, dim, BF16)
        passes: list[tuple[Pass, bool, float]] = [
            ("forward", False, full),
            ("forward", True, causal),
            ("forward+backward", False, both),
            ("forward+backward", True, both),
        ]
        for pass_, is_causal, gain in passes:
            pairs = length * (length + 1) // 2 if is_causal else length * length
            yield Row(
                f"tiles attention {'causal' if is_causal else 'full'} N{length} D{dim}",
                pass_,
                provider(
                    pass_, qkv, functional.attention, mask=masks.Causal() if is_causal else None
                ),
                provider(pass_, qkv, sdpa, is_causal=is_causal),
                "torch's attention",
                1 / gain,
                dtype=BF16,
                flops=2.0 * heads * pairs * dim * PRODUCTS[pass_],
            )


def _more_attention_rows() -> Iterator[Row]:
    """GQA, only the backward, a window, packed sequences and the gradient of a bias."""
    length, heads, dim = 1152, 8, 128
    pairs = length * (length + 1) // 2
    q, k, v = tensors((1, length, heads, dim), *[(1, length, 2, dim)] * 2, dtype=BF16)
    shared = {"q": q, "k": k, "v": v}
    yield Row(
        f"tiles attention causal GQA 8/2 N{length} D{dim}",
        "forward",
        provider("forward", shared, functional.attention, causal=True),
        provider("forward", shared, sdpa, is_causal=True, enable_gqa=True),
        "torch's attention",
        1 / 2.0,
        dtype=BF16,
        flops=4.0 * heads * pairs * dim,
    )
    for size, gain in BACKWARD.items():
        qkv = self_attention(1, length, heads, size, BF16)
        yield Row(
            f"tiles attention backward N{length} D{size}",
            "backward",
            provider("backward", qkv, functional.attention),
            provider("backward", qkv, sdpa),
            "torch's attention",
            1 / gain,
            dtype=BF16,
            flops=10.0 * heads * length**2 * size,
        )
    length, heads, dim = 4096, 8, 64
    qkv, window = self_attention(1, length, heads, dim, BF16), masks.SlidingWindow(255, 0)
    hidden = torch.zeros(length, length, dtype=BF16)
    hidden.masked_fill_(~window.dense(length, length).view(length, length), -torch.inf)
    yield Row(
        f"tiles window 256 N{length} D{dim}",
        "forward+backward",
        provider("forward+backward", qkv, functional.attention, mask=window),
        provider("forward+backward", qkv, sdpa, bias=hidden),
        "masked SDPA",
        1 / 10,
        dtype=BF16,
        flops=14.0 * heads * window.count(length, length) * dim,
    )
    run, padded, pairs = varlen_calls("forward+backward", BF16)
    yield Row(
        "tiles varlen 8 sequences",
        "forward+backward",
        run,
        padded,
        "padded SDPA",
        1 / 5,
        dtype=BF16,
        flops=14.0 * pairs * 8 * 64,
    )
    length, heads = 1152, 8
    qkv = self_attention(1, length, heads, dim, BF16)
    biased = qkv | {"bias": tensors((1, heads, length, length), dtype=BF16)[0]}
    yield Row(
        f"tiles bias with gradient N{length} D{dim}",
        "forward+backward",
        provider("forward+backward", biased, functional.attention),
        provider("forward+backward", biased, sdpa),
        "masked SDPA",
        1 / 2.5,
        dtype=BF16,
        flops=14.0 * heads * length**2 * dim,
    )


def _linear_rows() -> Iterator[Row]:
    for size, gain in LINEAR.items():
        named = dict(zip(("x", "weight"), tensors(*[(size, size)] * 2, dtype=BF16), strict=True))
        yield Row(
            f"tiles linear {size}^3",
            "forward",
            provider("forward", named, functional.linear, backend="cpu"),
            provider("forward", named, _torch_linear),
            "oneDNN",
            1 / gain,
            dtype=BF16,
            flops=2.0 * size**3,
        )


def _piece_rows() -> Iterator[Row]:
    for size in LINEAR:
        x, weight = tensors(*[(size, size)] * 2)
        for pieces, gain in PIECES.items():
            named = {"x": x, "weight": weight}
            yield Row(
                f"tiles linear {size}^3 fp32 in {pieces} pieces",
                "forward",
                provider("forward", named, _in_pieces, pieces=pieces),
                provider("forward", named, _torch_linear),
                "MKL",
                1 / gain,
                dtype=F32,
                flops=2.0 * size**3,
            )


def _in_pieces(x: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
    y: torch.Tensor = gemm.linear(x, weight, None, pieces)
    return y


def _torch_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def _layer_rows() -> Iterator[Row]:
    """Layers dominated by products: feed-forward, loss and experts."""
    tokens, width, hidden, vocab = 2048, 512, 1408, 8192
    shapes = [(tokens, width), (hidden, width), (hidden, width), (width, hidden)]
    names = ("x", "gate_weight", "up_weight", "down_weight")
    named = dict(zip(names, tensors(*shapes, dtype=BF16), strict=True))
    yield Row(
        f"tiles glu_mlp T{tokens} d{width} f{hidden}",
        "forward+backward",
        provider("forward+backward", named, functional.glu_mlp, backend="cpu"),
        provider("forward+backward", named, FFN["glu_mlp"]["compiled"]),
        "compiled",
        1 / 1.3,
        dtype=BF16,
        flops=18.0 * tokens * width * hidden,
    )
    named = dict(
        zip(("x", "weight"), tensors((1024, width), (vocab, width), dtype=BF16), strict=True)
    )
    named["target"] = torch.arange(1024) % vocab
    yield Row(
        f"tiles linear_cross_entropy T1024 d{width} V{vocab}",
        "forward+backward",
        provider("forward+backward", named, functional.linear_cross_entropy),
        provider("forward+backward", named, linear_cross_entropy),
        "eager",
        1 / 1.3,
        dtype=BF16,
        flops=6.0 * 1024 * width * vocab,
    )
    for count, experts, top_k, dim, inner in EXPERTS:
        x, logits, up, down = tensors(
            *((count, dim), (count, experts), (experts, 2 * inner, dim), (experts, dim, inner)),
            dtype=BF16,
        )
        weights, index = logits.softmax(-1).topk(top_k)
        named = {"x": x, "index": index, "weights": weights, "up": up, "down": down}
        for pass_, gain in zip(PASSES, (1.3, 2.0), strict=True):
            yield Row(
                f"tiles moe_experts E{experts} k{top_k} d{dim} f{inner} T{count}",
                pass_,
                provider(pass_, named, functional.moe_experts),
                provider(pass_, named, experts_grouped),
                "grouped_mm",
                1 / gain,
                dtype=BF16,
                flops=6.0 * count * top_k * dim * inner * (1 if pass_ == "forward" else 3),
            )


def rows() -> Iterator[Row]:
    """Yields all rows of the group."""
    isa = CPU_ISAS[torch.ops.omniattn.cpu_isa()]
    if not isa.startswith("amx_"):
        tqdm.write(f"tiles: no rows, the kernels are those of {isa}")
        return
    yield from _attention_rows()
    yield from _more_attention_rows()
    yield from _linear_rows()
    yield from _piece_rows()
    yield from _layer_rows()
