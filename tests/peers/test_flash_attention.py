"""flash-attention's own tests of its functions (2 to 4), on ours."""

import flash_attention_on_ours
import peers
import pytest

#: Decorators of kernels, in whose files definitions are.
DECORATORS = {
    "custom_bwd": lambda function: function,
    "custom_fwd": lambda function: function,
    "triton_op": lambda *_, **__: lambda function: function,
}
PEER = peers.Peer(
    "flash-attention",
    ("flash_attn", "triton"),
    flash_attention_on_ours.NAMES | DECORATORS,
    {"flash_attn.bert_padding": "flash_attn/bert_padding.py"},
    {"[50257, 128256]": "[5025, 12825]"},
)
HOPPER = peers.Peer(
    "flash-attention",
    ("flash_attn", "flash_attn_interface", "padding", "test_util", "triton"),
    {},
    {"padding": "hopper/padding.py", "test_util": "hopper/test_util.py"},
)
CUTE = peers.Peer(
    "flash-attention",
    ("flash_attn", "triton"),
    {},
    {"flash_attn.cute.testing": "flash_attn/cute/testing.py"},
)
LONGEST, WIDEST = 260, 128


def fits(**arguments: object) -> bool:
    """True if the CPU's eager references take only seconds, and without dropout, whose bits
    differ."""
    lengths = [n for key, n in arguments.items() if key.startswith("seqlen") and type(n) is int]
    return (
        max(lengths, default=0) <= LONGEST
        and arguments.get("d", 0) <= WIDEST
        and not arguments.get("dropout_p")
        and not arguments.get("compiled")
    )


if PEER.present:
    definitions = PEER.load("flash_attn/layers/rotary.py")
    PEER.names["apply_rotary_emb_torch"] = definitions.apply_rotary_emb_torch
    norms = PEER.load("flash_attn/ops/triton/layer_norm.py")
    PEER.names |= {name: vars(norms)[name] for name in ("layer_norm_ref", "rms_norm_ref")}
ZERO = "with a single key the gradients of q and k are 0, and rounding errors in ours"
OTHER = {
    "tests/test_flash_attn.py": {"paged_block_table_bounds": "the error has another text"},
    "hopper/test_flash_attn.py": {
        "flash_attn_output-1153": ZERO,
        "flash_attn_output-1276": ZERO,
        "varlen_output-1636": ZERO,
        "flash3_bw_compatibility": "torch.ops.flash_attn_3 is not here",
    },
    "tests/cute/test_flash_attn.py": {"invalid_head_dim": "ours takes any width"},
}
#: Races of threads on a GPU, hundreds of runs of one case.
WITHOUT = ("race_condition", "deterministic")
FILES = [
    (PEER, "tests/test_flash_attn.py", 6),
    (PEER, "tests/test_rotary.py", 4),
    (PEER, "tests/losses/test_cross_entropy.py", 6),
    (PEER, "tests/ops/triton/test_layer_norm.py", 6),
    (HOPPER, "hopper/test_flash_attn.py", 4),
    (CUTE, "tests/cute/test_flash_attn.py", 4),
    (CUTE, "tests/cute/test_flash_attn_varlen.py", 4),
]
CASES = [
    pytest.param(peer, *case.values, marks=case.marks, id=f"{path.split('/')[-2]}-{case.id}")
    for peer, path, most in FILES
    for case in peer.cases(path, most, fits, OTHER.get(path, {}))
    if not any(name in case.id for name in WITHOUT)
]


@pytest.mark.slow
@peers.require(PEER)
@pytest.mark.parametrize(("peer", "function", "arguments"), CASES)
def test_flash_attention_s_own(peer, function, arguments):
    peer.run(function, arguments)
