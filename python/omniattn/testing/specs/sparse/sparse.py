"""OpSpecs of composed attention: Longformer, BigBird, hubs, representatives, dual chunks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from omniattn import functional, reference
from omniattn.functional import masks
from omniattn.testing.spec import Benchmark, Case, Function, OpSpec, Pass, Random, Variant
from omniattn.testing.specs._cases import F32, TRAINING
from omniattn.testing.specs.attention.attention import GRADIENT_FACTOR, attention_flops

Inputs = Callable[[Case, Random], dict[str, Tensor]]
#: gradient_factor if gradients of parts are rounded to the dtype before they are added.
PARTS_FACTOR = 2 * GRADIENT_FACTOR


def tokens(
    label: str,
    B: int,
    T: int,
    H: int,
    G: int,
    D: int,
    Dv: int | None = None,
    tensors: tuple[str, ...] = (),
    Tq: int | None = None,
    **options: Any,
) -> Case:
    sizes = {"B": B, "Tq": T if Tq is None else Tq, "Tk": T, "H": H, "G": G, "D": D}
    return Case(label, sizes if Dv is None else {**sizes, "Dv": Dv}, tensors, options)


def _qkv(case: Case, random: Random, *names: str) -> dict[str, Tensor]:
    b, tq, tk, h, g, d = (case.sizes[k] for k in ("B", "Tq", "Tk", "H", "G", "D"))
    q, k, v = names
    return {
        q: random.normal(b, tq, h, d),
        k: random.normal(b, tk, g, d),
        v: random.normal(b, tk, g, case.sizes.get("Dv", d)),
    }


def _inputs(case: Case, random: Random) -> dict[str, Tensor]:
    made = _qkv(case, random, "q", "k", "v")
    if "dropout_seed" in case.tensors:
        made["dropout_seed"] = torch.tensor([1234, 5])
    if "second" in case.tensors:
        made |= _qkv(case, random, "q_global", "k_global", "v_global")
    if "padding" in case.tensors:
        made["key_padding"] = random.uniform(case.sizes["B"], case.sizes["Tk"]) < 0.8
    if "global" in case.tensors:
        made["global_index"] = _sets(random, case.sizes["B"], case.sizes["Tk"])
    if "random" in case.tensors:
        blocks = -(-case.sizes["Tk"] // case.options["block"])
        made["rand_blocks"] = random.integers(blocks, case.sizes["H"], blocks - 2, 3)
    if "seed" in case.tensors:
        made["seed"] = torch.tensor([1234, 5])
    if "gate" in case.tensors:
        made["gate"] = random.normal(*made["q"].shape[:3], made["v"].shape[3])
    if "gate per head" in case.tensors:
        made["gate"] = random.normal(*made["q"].shape[:3], 1)
    return made


def _sets(random: Random, batch: int, length: int) -> Tensor:
    """Makes sets of three tokens per sequence, or of two and none."""
    order = random.uniform(batch, length).argsort(-1)[:, :3]
    order[::2, 2:] = -1
    return order


def _chunks(case: Case, random: Random) -> dict[str, Tensor]:
    made = _qkv(case, random, "q", "k", "v")
    if "seed" in case.tensors:
        made["seed"] = random.integers(2**31, 2)
    size = case.sizes["D"] // 2 * 2
    positions = torch.arange(case.options["chunk_size"] + 1)
    dtype = torch.float64 if random.dtype == torch.float64 else torch.float32
    cos, sin = functional.rotary_tables(functional.rope_frequencies(size), positions, dtype)
    return made | {"cos": cos, "sin": sin}


def _as_mask(mask_of: Callable[[Case], masks.Mask]) -> Callable[[Case, Pass], float]:
    """Counts attention's FLOPs on the pairs that a mask allows."""

    def flops(case: Case, pass_: Pass) -> float:
        plain = Case(case.label, case.sizes, (), {"mask": mask_of(case)})
        return attention_flops(plain, pass_)

    return flops


def _longformer(case: Case) -> masks.Mask:
    reach, causal = case.options["window"] // 2, case.options.get("causal", False)
    few = tuple(range(3)) if "global" in case.tensors else ()
    window = masks.SlidingWindow(reach, 0 if causal else reach)
    return window | masks.GlobalTokens(few) if few else window


def _bigbird(case: Case) -> masks.Mask:
    block, tk = case.options.get("block", 64), case.sizes["Tk"]
    block, near = min(block, tk), masks.SlidingWindow(block, block)
    ends = masks.block_local_global(block, tuple(range(block)))
    return (near | ends) & masks.Causal() if case.options.get("causal") else near | ends


def _hubs(case: Case) -> masks.Mask:
    names = ("window", "global_index", "global_every", "causal")
    return masks.hub_spoke(**{n: case.options[n] for n in names if n in case.options})


def _representatives(case: Case) -> masks.Mask:
    names = ("window", "stride", "global_index", "anchor", "levels")
    options = {n: case.options[n] for n in names if n in case.options}
    return masks.deterministic_sparse(**options)


def _two_patterns(case: Case) -> masks.Mask:
    return masks.deterministic_sparse(case.options["window"], case.options["stride"])


def _rounded_parts(name: str) -> Function:
    """Returns the op with calls of attention replaced by the definition, rounded to the dtype."""
    module = sys.modules[getattr(functional, name).__module__]

    def attend(*tensors: Tensor, backend: str | None = None, **options: Any) -> Any:
        return reference.attention(*tensors, **options)

    def select(*tensors: Tensor, backend: str | None = None, **options: Any) -> Any:
        return functional.selected_attention(*tensors, backend="reference", **options)

    defined = {"attention": attend, "selected_attention": select}
    used = {n: f for n, f in defined.items() if hasattr(module, n)}

    def eager(**arguments: Any) -> Any:
        with mock.patch.dict(vars(module), used):
            return getattr(functional, name)(**arguments)

    return eager


def _spec(
    name: str,
    paper: str,
    flops: Callable[[Case], masks.Mask],
    cases: tuple[Case, ...],
    benchmarks: tuple[Benchmark, ...],
    *,
    special: tuple[str, ...] = (),
    inputs: Inputs = _inputs,
    more: tuple[str, ...] = (),
) -> OpSpec:
    return OpSpec(
        name=name,
        family="attention",
        cuda="emulated",
        paper=paper,
        inputs=inputs,
        differentiable=("q", "k", "v", *more),
        flops=_as_mask(flops),
        eager=_rounded_parts(name),
        gradient_factor=PARTS_FACTOR,
        second_order=True,
        special=special,
        cases=cases,
        benchmarks=benchmarks,
    )


def _timed(case: Case) -> Benchmark:
    return Benchmark(case, (F32,), TRAINING, "compute")


SECOND = ("q_global", "k_global", "v_global")
BOTH = ("second", "global")
LONGFORMER = _spec(
    "longformer_attention",
    "Beltagy et al. 2020, arXiv 2004.05150",
    _longformer,
    (
        tokens("tiny", 1, 5, 2, 1, 3, 2, BOTH, window=2),
        tokens("plain", 2, 130, 4, 2, 16, window=32),
        tokens("global", 2, 130, 4, 2, 16, 8, (*BOTH, "padding"), window=32),
        tokens("shared", 2, 100, 2, 1, 16, None, ("global",), window=20, causal=True),
        tokens("dilated", 2, 150, 4, 4, 8, None, BOTH, window=20, dilation=(1, 2, 1, 3)),
        tokens(
            *("dropout", 2, 150, 4, 2, 16, 8, (*BOTH, "padding", "seed")),
            window=32,
            dropout_p=0.3,
        ),
        tokens(
            *("dropoutheads", 2, 80, 2, 1, 8, None, ("global", "seed")),
            window=10,
            dilation=(1, 3),
            causal=True,
            softcap=3.0,
            dropout_p=0.2,
        ),
    ),
    (
        _timed(tokens("window", 1, 1024, 8, 8, 64, window=128)),
        _timed(tokens("global", 1, 1024, 8, 8, 64, None, BOTH, window=128)),
    ),
    special=("global", "dilated", "dropout", "dropoutheads"),
    more=SECOND,
)
BIGBIRD = _spec(
    "bigbird_attention",
    "Zaheer et al. 2020, arXiv 2007.14062",
    _bigbird,
    (
        tokens("tiny", 1, 9, 2, 1, 3, 2, block=1, n_random=1),
        tokens("plain", 2, 150, 4, 2, 16, block=10, n_random=2, seed=7),
        tokens("ragged", 1, 700, 2, 2, 16, 8, n_random=1, draw=3),
        tokens("full", 2, 130, 2, 2, 16, None, ("padding",)),
        tokens(
            *("repeated", 2, 140, 4, 2, 16, None, ("random", "padding")),
            block=16,
            count_duplicates=True,
        ),
        tokens("causal", 1, 160, 4, 2, 16, block=10, n_random=2, causal=True),
        tokens(
            *("growing", 1, 150, 4, 2, 16, None, (), 70),
            block=10,
            n_random=2,
            length=300,
            causal=True,
        ),
        tokens("extra", 2, 130, 2, 1, 16, None, ("padding",), block=8, num_global_tokens=5),
        tokens(
            *("dropout", 2, 75, 2, 1, 8, None, ("padding", "dropout_seed")),
            block=6,
            n_random=1,
            num_global_tokens=5,
            causal=True,
            softcap=3.0,
            dropout_p=0.3,
        ),
    ),
    (_timed(tokens("blocks", 1, 2048, 8, 8, 64)),),
    special=("ragged", "repeated", "extra"),
)
HUBS = _spec(
    "hub_spoke_attention",
    "pattern: Child et al. 2019, arXiv 1904.10509",
    _hubs,
    (
        tokens(
            *("tiny", 1, 5, 2, 1, 3, 2, ("second",)), window=1, global_index=(2,), dual="disjoint"
        ),
        tokens("plain", 2, 130, 4, 2, 16, window=20, global_every=50),
        tokens("both", 2, 130, 2, 1, 16, window=9, global_index=(0, 70), causal=False),
        tokens(
            *("disjoint", 2, 150, 4, 2, 16, 8, ("second",)),
            window=20,
            global_every=40,
            dual="disjoint",
        ),
        tokens(
            *("rows", 2, 100, 4, 2, 16, None, ("second",), 70),
            window=20,
            global_index=(3, 50),
            dual="longformer",
        ),
        tokens("decode", 2, 200, 4, 2, 16, None, (), 3, window=20, global_every=40),
        tokens(
            *("dropout", 2, 90, 4, 2, 16, None, ("second", "seed")),
            window=20,
            global_every=40,
            dual="disjoint",
            softcap=3.0,
            dropout_p=0.3,
        ),
    ),
    (
        _timed(tokens("hubs", 1, 1024, 8, 8, 64, window=127, global_every=128)),
        _timed(
            tokens(
                *("disjoint", 1, 1024, 8, 8, 64, None, ("second",)),
                window=127,
                global_every=128,
                dual="disjoint",
            )
        ),
    ),
    special=("disjoint", "rows"),
    more=SECOND,
)
REPRESENTATIVES = _spec(
    "detsa_attention",
    "pattern: Child et al. 2019, arXiv 1904.10509",
    _representatives,
    (
        tokens("tiny", 1, 6, 2, 1, 3, 2, window=1, stride=2),
        tokens("plain", 2, 150, 4, 2, 16, window=30, stride=16),
        tokens("absolute", 2, 150, 2, 1, 16, window=30, stride=16, anchor="absolute"),
        tokens("mean", 2, 150, 4, 2, 16, 8, window=30, stride=16, representative="mean"),
        tokens(
            *("blocks", 2, 150, 2, 1, 16),
            window=30,
            stride=16,
            anchor="absolute",
            representative="mean",
            count_bias=True,
        ),
        tokens(
            *("pyramid", 2, 150, 2, 1, 16),
            window=20,
            stride=1,
            levels=((4, 4), (3, 16), (2, 60)),
            representative="mean",
            count_bias=True,
        ),
        tokens("decode", 2, 200, 4, 2, 16, None, (), 3, window=20, stride=16),
        tokens(
            *("dropout", 2, 60, 2, 1, 8, None, ("seed",)),
            window=5,
            stride=1,
            levels=((2, 4), (2, 9)),
            representative="mean",
            softcap=3.0,
            dropout_p=0.3,
        ),
    ),
    (
        _timed(tokens("tokens", 1, 1024, 8, 8, 64, window=127, stride=64)),
        _timed(tokens("means", 1, 1024, 8, 8, 64, window=127, stride=64, representative="mean")),
    ),
    special=("mean", "blocks", "pyramid"),
)
CHUNKS = _spec(
    "dual_chunk_attention",
    "An et al. 2024, arXiv 2402.17463",
    lambda case: masks.Causal(),
    (
        tokens("tiny", 1, 7, 2, 1, 4, 2, chunk_size=4, local_window=2),
        tokens("plain", 2, 150, 4, 2, 16, chunk_size=48, local_window=16),
        tokens("short", 2, 30, 2, 1, 16, chunk_size=48, local_window=16),
        tokens(
            *("scaled", 1, 130, 2, 1, 16, 8, (), 90),
            chunk_size=30,
            local_window=5,
            mscale="qwen",
            train_length=40,
        ),
        tokens("decode", 2, 150, 4, 2, 16, None, (), 1, chunk_size=48, local_window=16),
        tokens(
            *("dropout", 2, 90, 4, 2, 16, None, ("seed",)),
            chunk_size=24,
            local_window=6,
            softcap=3.0,
            dropout_p=0.3,
        ),
    ),
    (_timed(tokens("chunks", 1, 1024, 8, 8, 64, chunk_size=192, local_window=64)),),
    special=("scaled", "decode"),
    inputs=_chunks,
)
TWO_PATTERNS = replace(
    _spec(
        "local_strided_attention",
        "patterns: Child et al. 2019, arXiv 1904.10509",
        _two_patterns,
        (
            tokens("tiny", 1, 5, 2, 1, 3, 2, ("gate",), window=2, stride=2),
            tokens("plain", 2, 150, 4, 2, 16, None, ("gate",), window=30, stride=16),
            tokens("heads", 2, 130, 4, 2, 16, 8, ("gate per head",), 90, window=30, stride=7),
            tokens(
                *("dropout", 2, 70, 4, 2, 16, 8, ("gate", "seed"), 50),
                window=9,
                stride=7,
                softcap=3.0,
                dropout_p=0.3,
            ),
        ),
        (_timed(tokens("two", 1, 1024, 8, 8, 64, None, ("gate",), window=128, stride=64)),),
        special=("heads",),
        more=("gate",),
    ),
    batch_invariant=False,
)

SPECS = (LONGFORMER, BIGBIRD, HUBS, REPRESENTATIVES, CHUNKS, TWO_PATTERNS)

VARIANTS = (
    Variant(
        "block-local attention with global tokens",
        ("block_local_global", "GlobalTokens", "BlockSparseAttention"),
        "Zaheer et al. 2020, arXiv 2007.14062",
    ),
    Variant(
        "Longformer: dilated windows per head, global tokens with separate projections",
        ("longformer_attention", "LongformerAttention"),
        "Beltagy et al. 2020, arXiv 2004.05150",
    ),
    Variant(
        "BigBird: random, window and global blocks, global tokens",
        ("bigbird_attention", "bigbird_random_blocks", "BigBirdAttention"),
        "Zaheer et al. 2020, arXiv 2007.14062",
    ),
    Variant(
        "hub-and-spoke attention, shared or separate projections",
        ("hub_spoke_attention", "hub_spoke", "HubSpokeAttention"),
        "Child et al. 2019, arXiv 1904.10509",
    ),
    Variant(
        "deterministic sparse attention: window, representatives, pyramids",
        (
            *("detsa_attention", "deterministic_sparse", "Representatives"),
            "DeterministicSparseAttention",
        ),
        "Child et al. 2019, arXiv 1904.10509",
    ),
    Variant(
        "dual chunk attention",
        ("dual_chunk_attention", "dual_chunk_mscale", "DualChunkAttention"),
        "An et al. 2024, arXiv 2402.17463",
    ),
    Variant(
        "gated combination of local and strided attention",
        ("local_strided_attention", "LocalStridedAttention"),
        "Child et al. 2019, arXiv 1904.10509",
    ),
)
