"""The kernels of avx512_bf16 and amx_bf16 pass the OpSpecs' tests on machines without these levels.

A library of the development build computes their products by the instructions of avx512.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tile_results

from omniattn import testing

OPS = (
    "attention", "attention_varlen", "moe_experts", "linear", "glu_mlp", "mlp",
    "linear_cross_entropy", "linear_log_prob", "linear_jsd", "selected_attention",
)  # fmt: skip
PROPERTIES = ("forward", "backward", "strided", "poisoned", "deterministic")


@pytest.mark.skipif("avx512" not in testing.isas(), reason="without AVX-512 nothing can run them")
@pytest.mark.parametrize("level", ["avx512_bf16", "amx_bf16"])
@pytest.mark.parametrize("op", OPS)
def test_kernels_pass_the_specs(run_with_library, op, level):
    if level in testing.isas():
        pytest.skip("the machine has it, so that all tests run on it")
    names = " or ".join(f"{p}-{op}-" for p in PROPERTIES)
    run_with_library(
        "libomniattn_amx_emulated.so", f"({names}) and bf16", "test_specs", OMNIATTN_CPU_ISA=level
    )


@pytest.mark.skipif("amx_bf16" not in testing.isas(), reason="needs AMX")
def test_software_tiles_give_the_results_of_the_hardware():
    """In every bit, forward and backward, of every case."""
    found = []
    for library in ("libomniattn_cpu.so", "libomniattn_amx_emulated.so"):
        env = os.environ | {"OMNIATTN_CPU_LIBRARY": library}
        command = [sys.executable, str(Path(tile_results.__file__))]
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-3000:]
        found.append(result.stdout.splitlines())
    assert found[0] == found[1]
