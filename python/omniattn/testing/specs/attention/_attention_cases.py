"""Cases of attention and their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omniattn.functional import masks
from omniattn.testing.spec import Case, Pass, Random


def qkv(
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


def attention_tensors(case: Case, random: Random) -> dict[str, Tensor]:
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
        "sinks of queries": lambda: {"sinks": random.normal(b, h, tq)},
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


def attention_inputs(case: Case, random: Random) -> dict[str, Tensor]:
    b, tq, tk, h, g, d = (case.sizes[k] for k in ("B", "Tq", "Tk", "H", "G", "D"))
    pages = b * case.sizes.get("N", 1)
    made = {
        "q": random.normal(b, tq, h, d),
        "k": random.normal(pages, tk, g, d),
        "v": random.normal(pages, tk, g, case.sizes.get("Dv", d)),
    }
    return made | attention_tensors(case, random)


def _ends(random: Random, count: int) -> Tensor:
    """Returns values at or near both ends of the dtype's range, alternating."""
    top = torch.finfo(random.dtype).max
    values = torch.tensor([-top, top, -0.3 * top, 0.3 * top, -math.inf], dtype=random.dtype)
    return values[torch.arange(count) % len(values)]


def _ends_of_the_range(random: Random, *shape: int) -> Tensor:
    """Returns a bias with such values on all keys, on some, or on some with -inf on all others.

    The three kinds of rows alternate.
    """
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


def attention_flops(case: Case, pass_: Pass) -> float:
    """Counts 2 FLOP per visible (query, key) and feature, with 2 GEMMs forward and 5 backward."""
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
