"""Every CUDA kernel passes the OpSpecs' tests on the CPU, under emulation.

The emulated library takes the place of the CPU library, so the tests of tests/ops run as they are,
in a process of their own.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from omniattn.testing import registry

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the emulator switches stacks in x86-64 code"
)

ROOT = Path(__file__).parents[2]
NATIVE = [spec for spec in registry().values() if spec.cuda != "planned"]
#: Families with kernels of their own, without those that have runs of their own: attention,
#: experts, recurrences and scans.
FAMILIES = ("activation", "conv", "ffn", "gemm", "loss", "norm", "random", "rope", "structured")
FAMILIES += ("topk",)
# Regular expressions: labels read property-op-case-dtype, and an op's name can be part of another
# one's or of a case.
OPS = tuple(f"-{spec.name}-" for spec in NATIVE if spec.family in FAMILIES)
ATTENTION = ("-attention-",)
#: Long cases, and those that only repeat others in the backward.
SEQUENCES = "prefix|strided|short|decode|self|chunk|oddpages"
VARIED = (
    "-attention-(?!decode)",
    f"-attention_varlen-(?!.*({SEQUENCES}))",
    f"-attention_cached-(?!.*({SEQUENCES}))",
)
LAYOUTS = ("-attention_varlen-", "-attention_cached-", "-attention_int8-")
#: Rows of int8 in both kinds of caches.
FEW_CODES = tuple(f"-attention_int8-{case}-" for case in ("tiny", "window", "pages"))
LOOKS = ("-attention_weights-", "-select_attention-")
SELECTED = ("-selected_attention-",)
#: Made of the kernels of other ops.
COMPOSED = ("-moba_attention-", "-nsa_attention-", "-routed_block_attention-", "-dsa_indexer_loss-")
FEW_COMPOSED = (
    *("-moba_attention-softcap-", "-nsa_attention-dropout-", "-routed_block_attention-dropout-"),
    "-dsa_indexer_loss-",
    *(
        f"-{spec.name}-{spec.cases[0].label}-"
        for spec in NATIVE
        if spec.family not in (*FAMILIES, "attention", "moe", "recurrence", "scan")
    ),
)
INDEXER = ("-dsa_indexer-",)
#: Lists that are full more than once, of both orders of the walk, and few keys.
FEW_INDEXED = tuple(f"-dsa_indexer-{case}-" for case in ("tiny", "recent", "drops", "nokeys"))
#: Lists of tokens, of blocks, of no block, per head and per block of queries.
FEW_SELECTED = tuple(
    f"-selected_attention-{case}-"
    for case in ("tiny", "padded", "ragged", "sinks", "dropouttokens", "eachhead", "queryblocks")
)
#: A rule of masks along each axis, and chunks before the query's, in one op each.
PATTERNS = ("-na2d-", "-na3d-video-", "-dual_chunk_attention-scaled-")
#: Cases with few thread blocks; checkers take minutes for the others.
CHECKED_SELECTED = tuple(case for case in FEW_SELECTED if "tiny" in case or "tokens" in case)
FEW = (
    *(
        f"-attention-{case}-"
        for case in ("tiny", "offtile", "wide", "biaskey", "dropout", "terms", "distancesfew")
    ),
    *("-attention_varlen-dropout-", "-attention_cached-terms-"),
)
#: Several tiles of keys, hidden ones, and dropout, with other weights than those of a softmax.
FEW_WEIGHTS = tuple(
    f"-{name}_attention-{case}-"
    for name in ("stick_breaking", "softpick")
    for case in ("tiny", "options", "dropout")
)
#: Sizes of 1, of a tile and of one more.
TILES = tuple(f"-attention-{case}-" for case in ("one", "oneof8", "plain", r"tile\+1"))
EDGES = ("tiny", "tile", "notokens", "noslots", "nofeatures", "nodim")
EXPERTS = tuple(
    f"-moe_experts-{case}-"
    for case in (*EDGES, "mixtral", "gptoss", "recompute", "interleaved", "oneexpert")
)
#: Tensor cores with both layouts of the weights; FMA in f32.
FEW_EXPERTS = tuple(f"-moe_experts-{case}-" for case in ("mixtral", "gptoss"))
#: Every kernel of 16 bits: both passes, decoding, packed and paged rows, experts.
PLACED = (
    *(*FEW, *FEW_EXPERTS),
    *("-attention-decode-", "-attention_varlen-self-", "-attention_cached-pages-"),
)

STATES = tuple(
    f"-{spec.name}-{case}-"
    for spec in NATIVE
    if spec.family == "recurrence" and spec.name != "rwkv7"
    for case in ("tiny", "grouped", "packed", "step", "nosteps")
)
#: A decay for each channel, the delta rule, a bonus, low rank, a skip, features and divisors, value
#: heads that share keys, packed sequences.
FEW_STATES = (
    *(f"-kimi_delta_attention-{case}-" for case in ("tiny", "grouped", "packed")),
    *("-rwkv6-packed-", "-dplr_delta_rule-grouped-", "-ssd-packed-", "-linear_attention-packed-"),
)
SCANS = tuple(
    f"-{spec.name}-{case}-"
    for spec in NATIVE
    if spec.family == "scan"
    for case in ("tiny", "group", "packed", "step", "nosteps", "nobatch")
)
FEW_SCANS = (
    *(f"-{name}-packed-" for name in ("rwkv4", "slstm", "mlstm", "selective_scan")),
    *("-selective_scan-group-", "-selective_scan-constant-"),
)

#: Small cases of every op, for kernels that leave out what only an unwanted gradient needs.
FEW_WANTED = (
    *(*OPS, "-attention-tiny-", "-attention_varlen-tiny-", "-attention_cached-tiny-"),
    *(case for case in FEW_SELECTED + EXPERTS + STATES + SCANS if "-tiny-" in case),
)
#: All options of attention, and every form of the other families.
WANTED = (
    *(*FEW_WANTED, "-attention-", "-selective_attention-"),
    *(*FEW_SELECTED, *FEW_STATES, *FEW_SCANS, *FEW_EXPERTS, *FEW_COMPOSED),
)

#: Ops without 16-bit dtypes.
STRUCTURED = tuple(f"-{spec.name}-" for spec in NATIVE if spec.family == "structured")

#: The products of these ops are torch's on CUDA; under emulation they are those of its CPU library,
#: whose bits depend on the number of threads on some processors (Zen 4).
TORCHS = ("linear_cross_entropy", "linear_log_prob", "linear_jsd", "glu_mlp-clamped")

VALUES = ("forward", "derivatives")
PLACES = ("strided", "far", "poisoned", "deterministic", "expanded_gradient")
#: (ops, properties, dtypes) for each variant of the library and order of its threads; the dtype
#: hardly changes control flow. Attention and experts have other kernels for 16 bits, and take the
#: cases of `FEW` and `FEW_EXPERTS` where all would take minutes.
RUNS = {
    ("value", "ascending"): [
        (OPS, VALUES, ("f64", "f32", "bf16", "f16")),
        (ATTENTION + LAYOUTS + LOOKS, ("forward",), ("f32", "bf16")),
        (VARIED, ("derivatives",), ("bf16",)),
        (WANTED, ("each_gradient",), ("bf16",)),
        (SELECTED, VALUES, ("bf16",)),
        (FEW_COMPOSED, VALUES, ("bf16",)),
        (("-selective_attention-",), VALUES, ("f32", "bf16")),
        (("-forgetting_attention-(tiny|options|one)-",), VALUES, ("bf16",)),
        (("-(path|wall)_attention-(tiny|plain|one)-",), VALUES, ("bf16",)),
        (("-(stick_breaking|softpick)_attention-",), VALUES, ("f32", "bf16")),
        (EXPERTS, VALUES, ("f32", "bf16")),
        (STATES, VALUES, ("bf16",)),
        (SCANS, VALUES, ("f64", "bf16")),
    ],
    ("value", "shuffled"): [
        (OPS, PLACES, ("f32", "bf16")),
        (PATTERNS, VALUES, ("f32", "bf16")),
        (PLACED, ("strided", "far", "poisoned", "deterministic"), ("bf16",)),
        (FEW + TILES, VALUES, ("f64", "f32", "f16")),
        (FEW, PLACES, ("f32",)),
        (FEW_WANTED + FEW[1:2], ("each_gradient",), ("f64", "f32", "f16")),
        (LOOKS, ("strided", "poisoned"), ("f32",)),
        (FEW_CODES, ("strided", "poisoned", "deterministic"), ("f32", "bf16")),
        (FEW_WEIGHTS, (*VALUES, *PLACES), ("f64", "f32")),
        (FEW_SELECTED, PLACES, ("bf16",)),
        (FEW_SELECTED[:1], VALUES, ("f64", "f32", "f16")),
        (INDEXER, ("forward", *PLACES), ("f32", "bf16")),
        (FEW_EXPERTS, VALUES, ("f64", "f16")),
        (FEW_STATES, VALUES, ("f64", "f32", "f16")),
        (FEW_SCANS, VALUES, ("f32", "f16")),
        (FEW_STATES + FEW_SCANS, PLACES, ("bf16",)),
        (FEW_STATES + FEW_SCANS, ("expanded_gradient",), ("f32",)),
        (OPS + FEW_SCANS[:4], ("wanted_gradients",), ("bf16",)),
    ],
    ("race", "ascending"): [
        (OPS, VALUES, ("bf16",)),
        (FEW_INDEXED, ("forward",), ("bf16",)),
        (CHECKED_SELECTED + FEW_WEIGHTS, VALUES, ("bf16",)),
        (FEW, ("derivatives",), ("bf16",)),
        (LOOKS + FEW_CODES, ("forward",), ("bf16",)),
        (FEW_EXPERTS, ("derivatives",), ("f32", "bf16")),
        (FEW_STATES, VALUES, ("bf16",)),
        (FEW_SCANS, VALUES, ("bf16",)),
        (FEW_WANTED, ("each_gradient",), ("bf16",)),
        (STRUCTURED, (*VALUES, "each_gradient"), ("f32",)),
    ],
    ("sanitized", "shuffled"): [
        (OPS, (*VALUES, "strided"), ("bf16",)),
        (FEW_INDEXED, ("forward", "strided"), ("bf16",)),
        (CHECKED_SELECTED + FEW_WEIGHTS, (*VALUES, "strided"), ("bf16",)),
        (FEW, ("derivatives",), ("bf16",)),
        (LOOKS + FEW_CODES, ("forward",), ("bf16",)),
        (FEW_EXPERTS, ("derivatives",), ("f32", "bf16")),
        (FEW_STATES, VALUES, ("bf16",)),
        (FEW_STATES[2:4], ("strided",), ("bf16",)),
        (FEW_SCANS, (*VALUES, "strided"), ("bf16",)),
        (FEW_WANTED, ("each_gradient",), ("bf16",)),
        (STRUCTURED, (*VALUES, "each_gradient", "strided"), ("f32",)),
    ],
}
#: Other schedules, and all dtypes.
SWEEPS = {
    ("sanitized", "shuffled"): [
        (FEW_SELECTED, (*VALUES, "strided"), ("bf16",)),
        (FEW + FEW_STATES + FEW_SCANS + FEW_EXPERTS, ("each_gradient",), ("bf16",)),
    ],
    ("race", "ascending"): [
        (FEW, ("derivatives",), ("f32",)),
        (FEW + FEW_STATES + FEW_SCANS + FEW_EXPERTS, ("each_gradient",), ("bf16",)),
    ],
    ("value", "descending shuffled"): [
        (OPS, VALUES, ("f64", "bf16")),
    ],
    ("value", "ascending"): [
        (OPS, PLACES, ("bf16",)),
        (COMPOSED, VALUES, ("bf16",)),
        (SELECTED, VALUES + PLACES, ("f64", "f32", "bf16", "f16")),
        (INDEXER, ("forward",), ("f64", "f16")),
        (EXPERTS, VALUES, ("f64", "f16")),
        (STATES, VALUES, ("f64",)),
        (WANTED + STATES + SCANS + SELECTED, ("each_gradient",), ("f64", "f32", "bf16", "f16")),
        (FEW + FEW_STATES + FEW_SCANS + FEW_EXPERTS, ("wanted_gradients",), ("f32", "bf16")),
    ],
    ("value", "descending"): [
        (FEW + TILES, VALUES + PLACES, ("f64", "f32", "bf16", "f16")),
        (FEW_SELECTED, VALUES, ("bf16",)),
        (FEW_INDEXED, ("forward",), ("f64", "bf16")),
        (FEW_EXPERTS, (*VALUES, "strided"), ("f32", "bf16")),
        (FEW_STATES + FEW_SCANS, VALUES + PLACES, ("f32", "bf16", "f16")),
    ],
}


def processes(table):
    """(variant, schedules, five runs): each process imports and collects for five seconds."""
    for (variant, schedules), runs in table.items():
        parts = -(-len(runs) // 5)
        for part in range(parts):
            yield variant, schedules, runs[part::parts]


def labels(ops, properties, dtypes):
    """The regular expression of their tests in test_specs.py."""
    left_out = f"(?!deterministic-({'|'.join(TORCHS)}))"
    return f"^{left_out}({'|'.join(properties)})({'|'.join(ops)}).*-({'|'.join(dtypes)})$"


def preloaded():
    """Sanitizer runtimes must come before all other libraries; libstdc++ so that C++ can throw."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    found = (subprocess.check_output(["gcc", f"-print-file-name={n}"], text=True) for n in names)
    return " ".join(path.strip() for path in found)


@pytest.fixture
def run_emulated(run_with_library):
    def run(variant, schedules, selection, *files, **env):
        env |= {
            "OMNIATTN_TEST_SCHEDULES": schedules,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/cuda"), *filter(None, sys.path)]),
            # torch's product in the place of cuBLAS: on AMX that of oneDNN reads bf16 beyond the
            # ends of rows of odd length (torch 2.13).
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        }
        if variant == "sanitized":
            env |= {
                "LD_PRELOAD": preloaded(),
                "ASAN_OPTIONS": "detect_leaks=0",
                "UBSAN_OPTIONS": "halt_on_error=1",
            }
        library = f"libomniattn_emulated_{variant}.so"
        run_with_library(library, selection, *files, options=("-p", "schedules"), **env)

    return run


@pytest.mark.parametrize(
    ("variant", "schedules", "runs"),
    [
        *processes(RUNS),
        *(pytest.param(*process, marks=pytest.mark.slow) for process in processes(SWEEPS)),
    ],
)
def test_kernels_pass_the_specs_under_emulation(run_emulated, variant, schedules, runs):
    chosen = "\n".join(labels(*run) for run in runs)
    run_emulated(variant, schedules, "", "test_specs", OMNIATTN_TEST_SPECS=chosen)


def test_kernels_pass_the_tests_of_their_families(run_emulated):
    """Bad input, extreme values, options; tests that compile or take large inputs say nothing new
    about a kernel."""
    families = [
        f"test_{name}" for name in ("activation", "divergence", "loss", "norm", "random", "rope")
    ]
    run_emulated(
        "value",
        "shuffled",
        "not (compiled or many_chunks or large_results)",
        *families,
    )


def test_attention_fits_into_99_kib_of_shared_memory(run_emulated):
    """A block has 99 KiB on sm_86 and sm_89; kernels that need more take another path."""
    cases = ("-attention-wide", "-attention-decode", "-attention_cached-decode")
    env = {
        "OMNIATTN_TEST_SPECS": labels(cases, VALUES, ("f64", "bf16")),
        "OMNIATTN_TEST_SHARED_MEMORY": str(99 << 10),
    }
    run_emulated("value", "ascending", "", "test_specs", **env)


def test_attention_of_logits_that_are_not_numbers(run_emulated):
    run_emulated("value", "ascending", "not_numbers and few", "test_attention")


def test_attention_passes_the_tests_of_tables_sinks_and_sequences(run_emulated):
    tables = "tables_match and 100-130 and bfloat16"
    rest = "ends_of or sink or tables_are_shared or kernels_refuse"
    rest += " or dropout_depends or cache_is_read or grow or test_paths"
    rest += " or (whole and (both or causal or neighbours or blocks or buckets or biaskeys))"
    files = ("test_scores", "test_varlen", "test_paths", "test_parts", "test_boundaries")
    run_emulated("value", "shuffled", f"({tables}) or {rest}", *files)
