"""Rows of goals.py for CPUs with AMX: bf16 products on tiles against torch's, which have them too.

    python benchmarks/goals.py --group tiles

The goals come from prototypes on a Sapphire Rapids with two cores. No record has these rows yet:
they await such a machine, and on others there are none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from goal import BF16, PRODUCTS, Row, provider, sdpa, self_attention, tensors
from tqdm import tqdm

from omniattn import functional
from omniattn.config import CPU_ISAS
from omniattn.functional import masks
from omniattn.testing.spec import Pass

#: (length, head size): how many times torch's speed, forward in full and causal, forward and
#: backward in both.
ATTENTION = {
    (1152, 128): (1.55, 1.75, 2.6),
    (4096, 128): (1.7, 1.9, 2.8),
    (4096, 64): (2.1, 2.3, 3.8),
}
#: Size of a square product: how many times oneDNN's speed.
LINEAR = {1024: 1.8, 2048: 1.1}


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


def _torch_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def rows() -> Iterator[Row]:
    """All rows of the group."""
    isa = CPU_ISAS[torch.ops.omniattn.cpu_isa()]
    if isa != "amx_bf16":
        tqdm.write(f"tiles: no rows, the kernels are those of {isa}")
        return
    yield from _attention_rows()
    yield from _linear_rows()
