"""The kernels of avx512_bf16 pass the OpSpecs' tests where the machine has no bf16 dot product.

A library of the development build computes it by other instructions.
"""

import pytest

from omniattn import testing

OPS = ("attention", "attention_varlen", "moe_experts", "linear", "glu_mlp")
PROPERTIES = ("forward", "backward", "strided", "poisoned", "deterministic")


@pytest.mark.skipif(
    testing.isas()[-1] != "avx512",
    reason="without AVX-512 nothing can run them; with avx512_bf16 all tests do",
)
@pytest.mark.parametrize("op", OPS)
def test_kernels_pass_the_specs(run_with_library, op):
    names = " or ".join(f"{p}-{op}-" for p in PROPERTIES)
    run_with_library("libomniattn_bf16_emulated.so", f"({names}) and bf16", "test_specs")
