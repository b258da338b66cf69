"""Liger-Kernel's own tests of its layers and losses, on ours."""

import liger_on_ours
import peers
import pytest

PEER = peers.Peer(
    "Liger-Kernel",
    ("liger_kernel", "test", "triton"),
    liger_on_ours.NAMES,
    {"test.utils": "test/utils.py", "liger_kernel.utils": "src/liger_kernel/utils.py"},
)
LAYERS = (
    *("rms_norm", "fused_add_rms_norm", "layer_norm", "rope", "qwen2vl_mrope", "swiglu", "geglu"),
    *("mlp", "relu_squared", "cross_entropy", "fused_linear_cross_entropy", "kl_div", "jsd"),
    "fused_linear_jsd",
)
LOSSES = ("dpo", "cpo", "simpo", "orpo", "kto", "grpo", "jsd")


def fits(**arguments: object) -> bool:
    """Half precision is measured by torch on the GPU; the CPU's eager forms need seconds."""
    sizes = [n for key, n in arguments.items() if key in ("V", "hidden_size") and type(n) is int]
    return max(sizes, default=0) <= 32000 and arguments.get("bsz", 1) <= 8


FILES = [
    *(f"test/transformers/test_{name}.py" for name in LAYERS),
    *(f"test/chunked_loss/test_{name}_loss.py" for name in LOSSES),
]
CASES = [case for path in FILES for case in PEER.cases(path, 6, fits)]


@pytest.mark.slow
@peers.require(PEER)
@pytest.mark.parametrize(("function", "arguments"), CASES)
def test_liger_s_own(function, arguments):
    PEER.run(function, arguments)
