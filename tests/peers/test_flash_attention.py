"""flash-attention's own tests of its functions (2 to 4), on ours."""

import flash_attention_on_ours
import peers
import pytest

PEER = peers.Peer(
    "flash-attention",
    ("flash_attn", "triton"),
    flash_attention_on_ours.NAMES,
    {"flash_attn.bert_padding": "flash_attn/bert_padding.py"},
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
OTHER = {"paged_block_table_bounds": "the error has another text"}
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
    for case in peer.cases(path, most, fits, OTHER)
    if not any(name in case.id for name in WITHOUT)
]


@pytest.mark.slow
@peers.require(PEER)
@pytest.mark.parametrize(("peer", "function", "arguments"), CASES)
def test_flash_attention_s_own(peer, function, arguments):
    peer.run(function, arguments)
