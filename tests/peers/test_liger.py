"""Liger-Kernel's own tests of its layers and losses, on ours."""

import math

import liger_on_ours
import peers
import pytest

PEER = peers.Peer(
    "Liger-Kernel",
    ("liger_kernel", "test", "triton"),
    liger_on_ours.NAMES,
    {
        "test.utils": "test/utils.py",
        "test.transformers.test_cross_entropy": "test/transformers/test_cross_entropy.py",
    },
)
LAYERS = (
    *("rms_norm", "fused_add_rms_norm", "layer_norm", "rope", "qwen2vl_mrope", "swiglu", "geglu"),
    *("mlp", "relu_squared", "cross_entropy", "fused_linear_cross_entropy", "kl_div", "jsd"),
    *("fused_linear_jsd", "attn_res", "dyt", "fused_neighborhood_attention", "group_norm"),
    *("mhc", "modulated_rms_norm", "multi_token_attention", "poly_norm"),
    *("softmax", "sparsemax", "tiled_mlp", "tvd", "grpo_loss"),
)
LOSSES = ("dpo", "cpo", "simpo", "orpo", "kto", "grpo", "jsd", "cosine")


def fits(**arguments: object) -> bool:
    """True if the CPU's eager forms take at most a second."""
    sizes = [arguments.get(name, 1) for name in ("B", "T", "V")]
    widths = [arguments.get(name, 1) for name in ("hidden_size", "H")]
    even = arguments.get("head_dim", 0) % 2 == 0  # transformers refuses others
    return even and math.prod(sizes) <= 1 << 26 and max(widths) <= 4096


FILES = [
    *(f"test/transformers/test_{name}.py" for name in LAYERS),
    *(f"test/chunked_loss/test_{name}_loss.py" for name in LOSSES),
]
# Several processes and GPU kernels have no counterpart; models go through omniattn.hf.
WITHOUT = ("dtensor", "blackwell", "gemma4", "liger_cross_entropy_kernel")
TEXT = "the error has another text or type"
BF16 = "torch's bf16 on the CPU is at least as far from fp64 as ours"
Z_LOSS = "torch's fp32 gradient with a z loss is 40 to 100 times further from fp64 than ours"
#: Functions and numbers of the cases in bf16 whose eager results are as far from fp64 as ours, or
#: further, on the other side.
EAGER = {
    "test_layer_norm-test_liger_layer_norm": (6, 8),
    "test_geglu-test_correctness": (2, 3),
    "test_modulated_rms_norm-test_correctness": (
        *(3, 6, 7, 14, 15, 18, 26, 27, 30, 34, 39, 42, 43, 50, 51, 54, 62, 63, 66, 70),
    ),
}
OTHER = {
    "test_cross_entropy-test_correctness-2": BF16,
    "test_cross_entropy-test_correctness_with_ignore_index-0": BF16,
    "test_cross_entropy-test_correctness_with_weight_once-2": BF16,
    "test_cross_entropy-test_correctness_not_last_layer-0": BF16,
    "test_cross_entropy-test_correctness_not_last_layer_with_other_params-11": BF16,
    "test_cross_entropy-test_correctness-0": BF16,
    "test_cross_entropy-test_correctness_with_ignore_index-2": BF16,
    "test_cross_entropy-test_correctness_with_weight_once-0": BF16,
    "test_correctness_with_z_loss_with_other_params_once-5": Z_LOSS,
    "test_correctness_with_z_loss_with_other_params_once-7": Z_LOSS,
    "test_correctness_not_last_layer_with_other_params-8": Z_LOSS,
    "test_correctness_not_last_layer_with_other_params-9": Z_LOSS,
    "test_correctness_not_last_layer_with_other_params-10": Z_LOSS,
    "out_of_bounds_target": TEXT,
    "label_smoothing_validation": TEXT,
    "invalid_loss_type": TEXT,
    "rejects_unsupported": TEXT,
    "neighborhood_attention_edge_cases": TEXT,
    "mhc_coeffs_disallow_fp32": "ours takes fp32",
    "test_grpo_loss-test_functional_correctness": "the test gives True as a temperature",
}
OTHER |= {
    f"{name}-{n}": "eager bf16 is at least as far from fp64 as ours"
    for name, numbers in EAGER.items()
    for n in numbers
}
CASES = [
    case
    for path in FILES
    for case in PEER.cases(path, 3, fits, OTHER)
    if not any(name in case.id for name in WITHOUT)
]


@pytest.mark.slow
@peers.require(PEER)
@pytest.mark.parametrize(("function", "arguments"), CASES)
def test_liger_s_own(function, arguments):
    PEER.run(function, arguments)
