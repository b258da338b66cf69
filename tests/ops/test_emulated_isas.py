"""The kernels of levels of products pass the OpSpecs' tests on machines without these levels.

A library of the development build computes their products by the instructions of avx512, or of
avx2 those of AMX alone (tests/support/emulation.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tile_results
from emulation import LEVELS, LIBRARY, TILES, needs_software

from omniattn import testing

pytestmark = pytest.mark.timeout(1800)  # of processes that run many tests

#: Ops by process; the processes take about equally long, and `pytest -n` runs them in parallel.
OPS = {
    "attention": (
        *("attention", "scaled_dot_product_attention", "na2d"),
        *("attention_weights", "select_attention"),
    ),
    "sequences": ("attention_varlen", "attention_cached", "attention_int8", "selected_attention"),
    "recurrences": ("delta_rule", "gated_delta_rule", "gated_linear_attention", "retention", "ssd"),
    "products": (
        *("moe_experts", "linear", "glu_mlp", "mlp"),
        *("linear_cross_entropy", "linear_log_prob", "linear_jsd"),
    ),
}
VALUES = ("forward", "derivatives", "each_gradient")
#: Properties to run on each form of software tiles; the portable form (avx2) takes ten times as
#: long.
PROPERTIES = {
    "libomniattn_amx_emulated.so": (*VALUES, "strided", "poisoned", "deterministic"),
    "libomniattn_amx_portable.so": VALUES,
}
#: Names of the dtype that each level with tiles multiplies.
DTYPES = {"amx_bf16": ("bf16", "bfloat16"), "amx_fp16": ("f16", "float16")}
FUZZED = (
    *("attention_raw", "attention_backward", "selected_attention_raw"),
    *("attention_weights_raw", "attention_select"),
    *("linear_raw", "linear_backward", "moe_raw", "moe_backward"),
)


def skip_where_it_runs(level):
    if level in testing.isas():
        pytest.skip("the machine has it, so that all tests run on it")


@needs_software
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("group", OPS)
def test_kernels_pass_the_specs(run_with_library, group, level):
    skip_where_it_runs(level)
    dtype, _ = DTYPES.get(level, ("bf16", ""))
    labels = f"^({'|'.join(PROPERTIES[LIBRARY])})-({'|'.join(OPS[group])})-.*-{dtype}$"
    env = {"OMNIATTN_CPU_ISA": level, "OMNIATTN_TEST_SPECS": labels}
    run_with_library(LIBRARY, "", "test_specs", **env)


@needs_software
def test_tiles_pass_their_own_tests(run_with_library):
    skip_where_it_runs("amx_fp16")
    files = "test_tiles", "test_tiles_by_size", "test_tiles_fp16", "test_recurrence_tiles"
    run_with_library(LIBRARY, "", *files, OMNIATTN_CPU_ISA="amx_fp16")


@needs_software
@pytest.mark.parametrize("level", TILES)
def test_tiles_are_fuzzed(run_with_library, level):
    skip_where_it_runs(level)
    names = " or ".join(f"test_raw_op[{name}]" for name in FUZZED)
    env = {"OMNIATTN_CPU_ISA": level, "OMNIATTN_FUZZ_DTYPE": DTYPES[level][1]}
    run_with_library(LIBRARY, names, "test_fuzz", **env)


@needs_software
@pytest.mark.parametrize("level", TILES)
def test_software_tiles_give_the_results_of_the_hardware(level):
    """In every bit, forward and backward, of every case."""
    if level not in testing.isas():
        pytest.skip(f"needs {level}")
    found = []
    for library in ("libomniattn_cpu.so", LIBRARY):
        env = os.environ | {"OMNIATTN_CPU_LIBRARY": library, "OMNIATTN_CPU_ISA": level}
        command = [sys.executable, str(Path(tile_results.__file__)), DTYPES[level][1]]
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-3000:]
        found.append(result.stdout.splitlines())
    assert found[0] == found[1]
