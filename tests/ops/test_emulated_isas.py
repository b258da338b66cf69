"""The kernels of avx512_bf16 and amx_bf16 pass the OpSpecs' tests on machines without these levels.

A library of the development build computes their products by the instructions of avx512.
"""

import pytest

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
