"""Rows of goals.py for sparse attention: patterns, selected keys, layers that select, decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from baselines import BASELINES
from tqdm import tqdm

from goal_rows.goal import (
    PASSES,
    PRODUCTS,
    Provider,
    Row,
    called_once,
    fill,
    provider,
    self_attention,
    tensors,
)
from omniattn import functional, modules
from omniattn.functional import masks
from omniattn.functional.sparse import bigbird
from omniattn.testing import prepare, registry
from omniattn.testing.spec import Function, Pass

DENSE = "dense x visited area"


@dataclass(frozen=True)
class Pattern:
    """A call with a sparse pattern, and the equivalent masks."""

    call: Function
    masks: Callable[[int], list[masks.Mask]]
    options: dict[str, Any]

    def area(self, length: int, heads: int) -> float:
        """Returns the share of blocks that the kernel visits."""
        found = self.masks(length)
        return sum(mask.block_density(length, length, heads=heads) for mask in found)

    def pairs(self, length: int, heads: int) -> float:
        return sum(mask.count(length, length, heads=heads) for mask in self.masks(length))


def _bigbird(length: int, heads: int = 4, block: int = 64) -> list[masks.Mask]:
    counts = bigbird._kept_counts(length // block, heads, 3, 0, 0, False)
    at = torch.arange(length) // block
    return [bigbird._mask(counts > 0, at, block, length, 0, False)]


def _blocks(length: int, size: int = 64) -> list[masks.Mask]:
    """Makes a mask of random blocks, a tenth of all, and the diagonal."""
    count = length // size
    chosen = torch.rand(count, count, generator=torch.Generator().manual_seed(0)) < 0.1
    table = chosen | torch.eye(count, dtype=torch.bool)
    return [masks.Blocks.from_block_mask(table[None, None], block_size=size, size=(length, length))]


def _with_mask(make: Callable[[int], list[masks.Mask]]) -> Pattern:
    """Returns the pattern of attention with a mask."""
    kept: dict[int, masks.Mask] = {}

    def call(q, k, v):
        length = q.shape[1]
        if length not in kept:
            (kept[length],) = make(length)
        return functional.attention(q, k, v, mask=kept[length])

    return Pattern(call, make, {})


def _na2d(q, k, v, **options):
    """Computes na2d on a grid of 64 rows."""
    grid = (t.unflatten(1, (64, -1)) for t in (q, k, v))
    return functional.na2d(*grid, **options).flatten(1, 2)


def patterns() -> dict[str, Pattern]:
    hubs = (0, 1000)
    sets = {"window": 256, "global_index": torch.tensor([[0, 1, 2, 3]])}
    local = masks.SlidingWindow(128, 128)
    rope = functional.rotary_tables(functional.rope_frequencies(64), torch.arange(1025))
    chunks = {"cos": rope[0], "sin": rope[1], "chunk_size": 1024, "local_window": 256}
    return {
        "blocks, a tenth": _with_mask(_blocks),
        "block-local 256 + global": _with_mask(
            lambda t: [masks.block_local_global(256, (0, 1, 2, 3))]
        ),
        "Longformer 256 + 4": Pattern(
            functional.longformer_attention,
            lambda t: [local | masks.GlobalTokens((0, 1, 2, 3))],
            sets,
        ),
        "BigBird 64": Pattern(functional.bigbird_attention, _bigbird, {}),
        "hubs 256 + 2": Pattern(
            functional.hub_spoke_attention,
            lambda t: [masks.hub_spoke(256, hubs)],
            {"window": 256, "global_index": hubs},
        ),
        "DetSA 256, 64": Pattern(
            functional.detsa_attention,
            lambda t: [masks.deterministic_sparse(256, 64)],
            {"window": 256, "stride": 64},
        ),
        "local 256 and strided 64": Pattern(
            lambda q, k, v, **o: functional.local_strided_attention(
                q, k, v, torch.zeros(*q.shape[:3], 1), **o
            ),
            lambda t: [masks.SlidingWindow(255, 0), masks.EveryKth(64)],
            {"window": 256, "stride": 64},
        ),
        "dual chunk 1024, 256": Pattern(
            functional.dual_chunk_attention, lambda t: [masks.Causal()], chunks
        ),
        "na2d 13 x 13": Pattern(
            _na2d,
            lambda t: [masks.GridNeighborhood((64, t // 64), kernel_size=13)],
            {"kernel_size": 13},
        ),
    }


def pattern_rows() -> Iterator[Row]:
    """Time per visited tile: each pattern takes at most 1.25 times its share of the dense call."""
    length, heads, dim = 4096, 4, 64
    qkv = self_attention(1, length, heads, dim)
    found = patterns()
    shares = {name: (p.area(length, heads), p.pairs(length, heads)) for name, p in found.items()}
    for pass_ in PASSES:
        dense = provider(pass_, qkv, functional.attention)
        for name, pattern in found.items():
            area, pairs = shares[name]
            yield Row(
                f"{name} N{length} D{dim}",
                pass_,
                provider(pass_, qkv, pattern.call, **pattern.options),
                dense,
                DENSE,
                1.25,
                share=area,
                flops=2.0 * pairs * dim * PRODUCTS[pass_],
            )


def visited(pattern: Pattern, length: int, heads: int) -> float:
    """Returns the visited pairs, extrapolated linearly from two shorter lengths if long."""
    least, most = 2048, 4096
    if length <= most:
        return pattern.area(length, heads) * length**2
    low, high = (pattern.area(t, heads) * t**2 for t in (least, most))
    return high + (high - low) * (length - most) / (most - least)


#: Patterns with a fixed number of keys per query.
LINEAR = ("block-local 256 + global", "Longformer 256 + 4", "BigBird 64", "hubs 256 + 2")


def length_rows() -> Iterator[Row]:
    """Time per visited block of linear patterns: constant from 1k to 32k tokens."""
    short, heads, dim = 1024, 4, 64
    for name, pattern in patterns().items():
        if name not in LINEAR:
            continue
        least = visited(pattern, short, heads)
        for length in (8192, 32768):
            seen = visited(pattern, length, heads)
            for pass_ in PASSES:
                run, base = (
                    provider(
                        pass_, self_attention(1, t, heads, dim), pattern.call, **pattern.options
                    )
                    for t in (length, short)
                )
                yield Row(
                    f"{name} N{length} D{dim}",
                    pass_,
                    run,
                    base,
                    f"the same at N{short}, per visited block",
                    1.15,
                    share=seen / least,
                    flops=2.0 * seen * heads * dim * PRODUCTS[pass_],
                )


def selected_rows() -> Iterator[Row]:
    """Selected attention against the dense kernel's rate per pair, and a gather in torch."""
    spec = registry()["selected_attention"]
    for benchmark, dtype in itertools.product(spec.benchmarks, (torch.float32, torch.bfloat16)):
        case = benchmark.case
        if case.label not in ("nsa", "tokens") or torch.float32 not in benchmark.dtypes:
            continue
        if case.label == "tokens":  # with few queries, the gradients of all keys dominate
            case = replace(case, sizes=case.sizes | {"Tq": 32})
        call = spec.call(case, dtype)
        s = case.sizes
        dense_inputs = {name: call.tensors[name] for name in "qkv"}
        for pass_ in PASSES:
            run = prepare(call, spec.public, pass_)
            flops = spec.flops(case, pass_)
            dense = provider(pass_, dense_inputs, functional.attention, causal=True)
            seen = s["Tq"] * (s["Tk"] - (s["Tq"] - 1) / 2)
            sizes = {"forward": s["D"] + s["Dv"], "forward+backward": 4 * s["D"] + 3 * s["Dv"]}
            dense_flops = 2.0 * s["B"] * s["H"] * seen * sizes[pass_]
            name = f"selected {case.label} H{s['H']} D{s['D']} n{s['n']} of N{s['Tk']}"
            yield Row(
                name,
                pass_,
                run,
                dense,
                "dense x visited pairs",
                1 / (0.6 if case.label == "nsa" else 0.5),
                share=flops / dense_flops,
                dtype=dtype,
                flops=flops,
            )
            if dtype == torch.bfloat16:  # the gather in torch rounds its weights, too
                continue
            yield Row(
                name,
                pass_,
                run,
                prepare(call, BASELINES["selected_attention"]["eager"], pass_),
                "a gather in torch",
                1 / 5,
                flops=flops,
                memory=0.1,
                same=True,
            )


def indexer_rows() -> Iterator[Row]:
    """Indexer for the last 1024 of 8k tokens, 64 heads of 128, 2048 selected keys."""
    if not hasattr(functional, "dsa_indexer"):
        tqdm.write("indexer: no rows, there is no dsa_indexer")
        return
    queries, length, heads, dim, topk = 1024, 8192, 64, 128, 2048
    q, k, w = tensors((1, queries, heads, dim), (1, length, dim), (1, queries, heads))
    named = {"q": q, "k": k, "w": w}
    flops = 2.0 * heads * dim * queries * (length - (queries - 1) / 2)

    def eager(q, k, w, topk):
        """Runs a few queries at a time: the scores of all heads are 64 times the result's size."""
        chosen = []
        for start in range(0, queries, 64):
            rows = slice(start, start + 64)
            scores = (q[:, rows].flatten(1, 2) @ k.mT).unflatten(1, (-1, heads)).relu()
            scores = (scores * w[:, rows, :, None]).sum(2)
            position = torch.arange(length - queries + start, length - queries + start + 64)
            hidden = torch.arange(length) > position[:, None]
            chosen.append(scores.masked_fill(hidden, -torch.inf).topk(topk).indices)
        return torch.cat(chosen, 1)

    run = provider("forward", named, functional.dsa_indexer, topk=topk)
    name = f"dsa_indexer T{queries} of N{length} H{heads} D{dim}"
    yield Row(
        f"{name} k{topk}",
        "forward",
        run,
        provider("forward", named, eager, topk=topk),
        "products, relu and topk in torch",
        1.0,
        flops=flops,
        least=0.7 / 1.2,
        memory=0.1,
    )
    yield Row(
        f"{name} k{topk}",
        "forward",
        run,
        provider("forward", named, functional.dsa_indexer, topk=1),
        "the same with k1: the scores",
        1.2,
        flops=flops,
    )


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention layer: grouped heads, or DSA's latent and indexer."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: int
    index_heads: int
    index_topk: int

    def layers(self) -> dict[str, torch.nn.Module]:
        torch.manual_seed(0)
        sizes = {"dim": self.width, "num_heads": self.heads, "num_kv_heads": self.kv_heads}
        sizes["head_dim"] = self.head_dim
        latent = {"q_lora_rank": None, "kv_lora_rank": self.latent, "qk_rope_dim": 0}
        heads = {"qk_nope_dim": self.head_dim, "v_dim": self.head_dim}
        index = {"index_heads": self.index_heads, "index_dim": 64, "index_topk": self.index_topk}
        return {
            "dense": modules.Attention(**sizes, causal=True),
            "NSA": modules.NSA(**sizes),
            "MoBA": modules.MoBA(**sizes, decode="moba"),
            "DSA": modules.DeepSeekSparseAttention(
                self.width, self.heads, **latent, **heads, **index
            ),
        }


SMALL = Sizes(256, 4, 1, 64, latent=128, index_heads=4, index_topk=1024)
LARGE = Sizes(2048, 16, 4, 128, latent=512, index_heads=16, index_topk=2048)


def _training(layer: torch.nn.Module, length: int) -> Provider:
    (x,) = tensors((1, length, SMALL.width))
    leaves = [x.requires_grad_(), *layer.parameters()]
    grad = torch.randn(1, length, SMALL.width)

    def train() -> object:
        results, gradients = [layer(x)], [grad]
        loss = getattr(layer, "auxiliary", None)  # the only loss that trains DSA's indexer
        if loss is not None:
            results, gradients = [*results, loss], [grad, torch.ones_like(loss)]
        return torch.autograd.grad(results, leaves, gradients)

    return train


def layer_rows() -> Iterator[Row]:
    """Training against dense causal attention: crossover length, and 3x at 32k tokens."""
    made = SMALL.layers()
    dense = made.pop("dense")
    pass_: Pass = "forward+backward"
    for length, goal in ((8192, 1.0), (16384, 1.0), (32768, 1 / 3)):
        measured = called_once(_training(dense, length))
        for name, layer in made.items():
            yield Row(
                f"{name} layer d{SMALL.width} H{SMALL.heads} N{length}",
                pass_,
                _training(layer, length),
                against="dense causal attention",
                goal=goal,
                **measured,
            )


SEEN = 32768


@dataclass(frozen=True)
class Steps:
    """Decode steps of each layer, and the bytes that each must read."""

    runs: dict[str, Provider]
    bytes: dict[str, float]


def steps(sizes: Sizes, seen: int) -> Steps:
    """Makes decode steps after `seen` tokens."""
    made = sizes.layers()
    states = {name: layer.new_state(1, seen + 1) for name, layer in made.items()}
    whole = fill(states["dense"], seen)
    token = whole // seen
    c = made["NSA"].config
    for branch in states["NSA"].branches:
        fill(branch, seen)
    compressed = fill(states["NSA"].compressed, states["NSA"].windows(seen))
    fill(states["MoBA"], seen)
    moba, dsa = made["MoBA"].config, made["DSA"].config
    fill(states["DSA"].latents, seen)
    index = fill(states["DSA"].index, seen)
    read = {
        "dense": whole,
        "NSA": compressed + token * (c.topk * c.block_size + c.window),
        # Block means, the query's own block, and the other blocks for each head.
        "MoBA": whole // 2 // moba.block_size
        + token * moba.block_size * (1 + sizes.heads // sizes.kv_heads * (moba.topk - 1)),
        "DSA": index + 4 * dsa.index_topk * dsa.kv_lora_rank,
    }
    weights = {name: 4 * sum(p.numel() for p in layer.parameters()) for name, layer in made.items()}
    (x,) = tensors((1, 1, sizes.width))

    def step(name: str) -> Provider:
        def run() -> object:
            states[name].crop(seen)
            with torch.no_grad():
                return made[name](x, state=states[name])

        return run

    return Steps(
        {name: step(name) for name in made},
        {name: float(read[name] + weights[name]) for name in made},
    )


def decode_rows() -> Iterator[Row]:
    """Decoding after 32k tokens: 80 % of the bandwidth for the necessary reads, against dense
    attention; in a large layer also against decoding after 8k tokens, relative to the reads. In
    small layers the overhead of calls exceeds the reads."""
    for sizes in (SMALL, LARGE):
        found = steps(sizes, SEEN)
        label = "" if sizes == SMALL else f" d{sizes.width} H{sizes.heads}/{sizes.kv_heads}"
        for name in ("NSA", "MoBA", "DSA"):
            title = f"{name} decode{label} after {SEEN} tokens"
            against = found.runs["dense"], "dense attention", 1.0
            read = {"bytes": found.bytes[name], "least": 0.8}
            yield Row(title, "forward", found.runs[name], *against, **read)
    short = steps(LARGE, SEEN // 4)
    for name in ("NSA", "MoBA", "DSA"):
        share = found.bytes[name] / short.bytes[name]
        against = short.runs[name], f"the same after {SEEN // 4}, by bytes", 1.1
        title = f"{name} decode{label} after {SEEN} tokens"
        yield Row(title, "forward", found.runs[name], *against, share=share)
