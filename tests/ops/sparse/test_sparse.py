"""Compositions of attention: what their patterns are, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from omniattn import functional as F
from omniattn import reference
from omniattn.functional import masks

F64 = torch.float64


def qkv(length=40, heads=2, kv_heads=1, queries=None, batch=2):
    make = torch.Generator().manual_seed(0)
    rows = length if queries is None else queries
    shapes = ((batch, rows, heads, 8), (batch, length, kv_heads, 8), (batch, length, kv_heads, 4))
    return [torch.randn(shape, generator=make, dtype=F64) for shape in shapes]


def test_longformer_without_global_tokens_is_a_window():
    q, k, v = qkv()
    want = F.attention(q, k, v, window_size=(5, 5))
    torch.testing.assert_close(F.longformer_attention(q, k, v, window=10), want)


def test_longformer_rows_of_global_tokens_have_projections_of_their_own():
    q, k, v = qkv(kv_heads=2)
    second = [t.flip(1) for t in (q, k, v)]
    index = torch.tensor([[3, -1], [0, 39]])
    out = F.longformer_attention(q, k, v, *second, window=4, global_index=index)
    of_int16 = F.longformer_attention(q, k, v, *second, window=4, global_index=index.short())
    assert torch.equal(of_int16, out)
    every = F.attention(*second)
    for b, tokens in enumerate(([3], [0, 39])):
        torch.testing.assert_close(out[b, tokens], every[b, tokens])
        local = [i for i in range(40) if i not in tokens]
        i, j = torch.arange(40)[:, None], torch.arange(40)
        seen = ((i - j).abs() <= 2) | torch.isin(j, torch.tensor(tokens))
        want = F.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], mask=seen)
        torch.testing.assert_close(out[b, local], want[0, local])


@pytest.mark.parametrize("causal", [False, True])
def test_longformer_drops_what_attention_with_its_mask_drops(causal):
    q, k, v = qkv(150, kv_heads=2)
    index = torch.tensor([[70, -1], [0, 149]])
    seed = torch.tensor([3, 4])
    i, j = torch.arange(150)[:, None], torch.arange(150)
    marked = (index[..., None] == j).any(1)[:, None]
    seen = ((i - j).abs() <= 3) | marked[..., None, :] | marked[..., None]
    mask = seen & (j <= i) if causal else seen
    drop = {"dropout_p": 0.5, "seed": seed}
    want = F.attention(q, k, v, mask=mask, **drop)
    got = F.longformer_attention(q, k, v, window=6, global_index=index, causal=causal, **drop)
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got, F.attention(q, k, v, mask=mask))
    torch.manual_seed(1)
    drawn = F.longformer_attention(q, k, v, window=6, global_index=index, dropout_p=0.5)
    other = F.longformer_attention(q, k, v, window=6, global_index=index, dropout_p=0.5)
    assert not torch.allclose(drawn, other)


def test_random_blocks_are_different_and_far():
    drawn = F.bigbird_random_blocks(20, 3, 4, seed=11)
    assert drawn.shape == (3, 18, 4)
    for h in range(3):
        for row in range(1, 19):
            blocks = drawn[h, row - 1].tolist()
            assert len(set(blocks)) == 4
            assert all(0 < j < 19 and abs(j - row) > 1 for j in blocks)
    assert not torch.equal(drawn, F.bigbird_random_blocks(20, 3, 4, seed=12))
    assert not torch.equal(drawn, F.bigbird_random_blocks(20, 3, 4, seed=11, draw=1))
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("causal", [False, True])
def test_random_blocks_are_those_of_the_definition(causal):
    options = {"draw": 3, "causal": causal}
    drawn = F.bigbird_random_blocks(12, 2, 5, seed=-(2**40) - 9, **options)
    want = reference.bigbird_random_blocks(12, 2, 5, -(2**40) - 9, **options)
    assert torch.equal(drawn, want)
    assert (drawn == -1).any() == causal  # the first blocks have few before them


def test_bigbird_with_blocks_drawn_outside():
    q, k, v = qkv(96)
    random = F.bigbird_random_blocks(12, 2, 2, seed=5)
    want = F.bigbird_attention(q, k, v, block=8, n_random=2, seed=5)
    got = F.bigbird_attention(q, k, v, block=8, rand_blocks=random)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_bigbird_counts_repeated_blocks_as_the_sum_of_their_copies():
    """transformers attends to the concatenation of the keys of all listed blocks."""
    q, k, v = qkv(64, kv_heads=2)
    random = torch.zeros(2, 6, 3, dtype=torch.int64)
    random[:, 2] = torch.tensor([6, 6, 1])
    out = F.bigbird_attention(q, k, v, block=8, rand_blocks=random, count_duplicates=True)
    for row in (2, 3):
        blocks = [0, row - 1, row, row + 1, 7, *random[0, row - 1].tolist()]
        keys = torch.cat([torch.arange(8 * n, 8 * n + 8) for n in blocks])
        rows = slice(8 * row, 8 * row + 8)
        want = F.attention(q[:, rows], k[:, keys], v[:, keys])
        torch.testing.assert_close(out[:, rows], want)


def test_bigbird_falls_back_to_all_pairs():
    q, k, v = qkv(88)
    full = F.attention(q, k, v)
    torch.testing.assert_close(F.bigbird_attention(q, k, v, block=8), full)
    assert not torch.allclose(F.bigbird_attention(q, k, v, block=8, n_random=2), full)


def test_the_counts_of_deterministic_sparse():
    seen = masks.deterministic_sparse(256, 64).dense(1001, 1001)[1000]
    keys = seen.nonzero().flatten()
    assert len(keys) == 269 and keys[:3].tolist() == [0, 40, 104] and keys[-257] == 744
    before = keys[keys < 744].tolist()
    assert before == [0, *range(40, 744, 64)]


def test_means_stand_for_all_older_keys():
    """With count_bias and equal keys, each older key counts once in the mean of the values."""
    q, _, v = qkv(50)
    k = torch.zeros(2, 50, 1, 8, dtype=F64)
    options = {"window": 5, "stride": 7, "representative": "mean", "global_index": ()}
    out = F.detsa_attention(q, k, v, count_bias=True, **options)
    torch.testing.assert_close(out, F.attention(q, k, v, causal=True))


def test_dual_chunk_attention_of_one_chunk_is_rotary_attention():
    q, k, v = qkv(30)
    cos, sin = F.rotary_tables(F.rope_frequencies(8), torch.arange(65), F64)
    out = F.dual_chunk_attention(q, k, v, cos, sin, chunk_size=64, local_window=16)
    q, k = F.apply_rotary(q, k, cos[:30], sin[:30])
    torch.testing.assert_close(out, F.attention(q, k, v, causal=True))


def test_dual_chunk_attention_keeps_near_distances():
    """A query sees keys of its chunk, and the last local_window ones, as in rotary attention."""
    q, k, v = qkv(60)
    cos, sin = F.rotary_tables(F.rope_frequencies(8), torch.arange(65), F64)
    sizes = {"chunk_size": 24, "local_window": 8}
    c = 16
    for i in (20, 40, 55):
        near = torch.arange(60) >= max(i // c * c, i - 8)
        hidden = k.clone()
        hidden[:, ~near] = 0
        values = v * near[:, None, None]
        got = F.dual_chunk_attention(q, hidden, values, cos, sin, **sizes)[:, i]
        turned, keys = F.apply_rotary(q, hidden, cos[:60], sin[:60])
        want = F.attention(turned, keys, values, causal=True)[:, i]
        torch.testing.assert_close(got, want)


def test_dual_chunk_decoding():
    q, k, v = qkv(70)
    cos, sin = F.rotary_tables(F.rope_frequencies(8), torch.arange(25), F64)
    sizes = {"chunk_size": 24, "local_window": 8}
    whole = F.dual_chunk_attention(q, k, v, cos, sin, **sizes)
    rotated, _ = F.apply_rotary(k, None, cos, sin, positions=torch.arange(70) % 16)
    for n in (1, 17, 40, 70):
        step = F.dual_chunk_attention(
            q[:, n - 1 : n], rotated[:, :n], v[:, :n], cos, sin, k_rotated=True, **sizes
        )
        torch.testing.assert_close(step, whole[:, n - 1 : n])


Q, K, V = qkv()
TABLES = F.rotary_tables(F.rope_frequencies(8), torch.arange(25), F64)
INDEX = torch.tensor([[0, 40], [1, 2]])
BLOCKS = torch.zeros(2, 3, 2, dtype=torch.int64)
GATE = torch.zeros(2, 40, 2, 1, dtype=F64)


WRONG = [
    (lambda: F.longformer_attention(Q, K, V, window=3), "window must be even, got window=3"),
    (lambda: F.longformer_attention(Q[:, :9], K, V, window=2), "q and k must have the same T"),
    (
        lambda: F.longformer_attention(Q, K, V, window=2, global_index=INDEX),
        r"global_index must be in \[0, 40\), or -1 for none, got global_index from 0 to 40",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, window=2, global_index=INDEX * 0),
        "global_index must name no token of a row twice",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, window=2, global_index=INDEX[:1]),
        r"global_index must have shape \(B, G\) with B=2",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, window=2, dilation=(1, 2, 3)),
        "dilation must be one int or one for each of 2 heads",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, window=2, dilation=2**40),
        f"longformer_attention: dilation must be an int >= 1 and <= {2**40 - 1}",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, window=2**21, dilation=2**20),
        f"window / 2 \\* dilation must be at most {2**40 - 1}, got window={2**21}",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, Q, window=2),
        "q_global, k_global, v_global must be given together",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, Q, K, K, window=2),
        r"v_global must have shape \(2, 40, 1, 4\)",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, window=2, key_padding=torch.ones(2, 41) > 0),
        r"key_padding must have shape \(2, 40\)",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, window=2, dropout_p=1.5),
        "dropout_p must be a finite number >= 0 and <= 1, got dropout_p=1.5",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, window=2, dropout_p=0.5, seed=INDEX),
        r"seed must be an int64 tensor \[seed, offset\]",
    ),
    (
        lambda: F.bigbird_attention(Q, K, V, block=8, rand_blocks=BLOCKS + 3),
        "rand_blocks must name blocks that are not listed yet unless .* got block 3 for head 0",
    ),
    (
        lambda: F.bigbird_attention(Q, K, V, block=8, rand_blocks=BLOCKS + 5),
        r"rand_blocks must be in \[0, 5\), or -1 for none",
    ),
    (
        lambda: F.bigbird_attention(Q, K, V, block=16, rand_blocks=BLOCKS),
        r"rand_blocks must have shape \(2, 1, 2\)",
    ),
    (lambda: F.bigbird_attention(Q, K, V, block=0), "block must be an int >= 1, got block=0"),
    (
        lambda: F.bigbird_attention(Q, K, V, num_global_tokens=41),
        "num_global_tokens must be at most T",
    ),
    (
        lambda: F.hub_spoke_attention(Q, K, V, window=2),
        "hub_spoke_attention: global_index or global_every must be given",
    ),
    (
        lambda: F.hub_spoke_attention(Q, K, V, Q, K, V, window=2, global_every=3),
        "must be given if and only if dual is, got dual=None",
    ),
    (
        lambda: F.hub_spoke_attention(Q, K, V, window=2, global_every=3, dual="both"),
        'dual must be one of "disjoint", "longformer"',
    ),
    (
        lambda: F.detsa_attention(Q, K, V, window=2, stride=3, count_bias=True),
        'count_bias needs representative="mean"',
    ),
    (
        lambda: F.detsa_attention(Q, K, V, window=2, stride=0),
        "stride must be an int >= 1, got stride=0",
    ),
    (
        lambda: F.dual_chunk_attention(Q, K, V, *TABLES, chunk_size=25, local_window=4),
        r"cos must have shape \(P, Dr / 2\) with P > chunk_size=25",
    ),
    (
        lambda: F.dual_chunk_attention(Q, K, V, *TABLES, chunk_size=8, local_window=8),
        "local_window must be an int >= 0 and <= 7",
    ),
    (
        lambda: F.dual_chunk_attention(
            Q, K, V, *TABLES, chunk_size=8, local_window=2, mscale="qwen"
        ),
        "mscale and train_length must be given together",
    ),
    (
        lambda: F.longformer_attention(Q, K, V, window=2, scale=float("nan")),
        "longformer_attention: scale must be a finite number, got scale=nan",
    ),
    (
        lambda: F.local_strided_attention(Q, K, V, GATE, window=2, stride=3, scale=float("inf")),
        "local_strided_attention: scale must be a finite number, got scale=inf",
    ),
    (
        lambda: F.bigbird_attention(Q, K, V, block=8, dropout_p=0.5, dropout_seed=INDEX),
        r"bigbird_attention: dropout_seed must be an int64 tensor \[seed, offset\]",
    ),
    (
        lambda: F.local_strided_attention(Q, K, V, Q, window=2, stride=3),
        r"gate must have shape \(2, 40, 2, 4\) or \(2, 40, 2, 1\)",
    ),
    (
        lambda: F.detsa_attention(Q, K, V, window=2, stride=3, anchor="old"),
        'detsa_attention: anchor must be one of "relative", "absolute"',
    ),
    (
        lambda: F.dual_chunk_attention(
            Q, K, V, TABLES[0], TABLES[1][1:], chunk_size=8, local_window=2
        ),
        "dual_chunk_attention: cos and sin must have the same shape",
    ),
    (
        lambda: F.bigbird_attention(Q, K, V, block=8, rand_blocks=BLOCKS.to("meta")),
        "bigbird_attention: rand_blocks must be on the device of q, got rand_blocks.device=meta",
    ),
    (lambda: F.na2d(Q, K, V, 3), "na2d: query must have 5 dimensions"),
    (lambda: F.na1d(Q, K, V, 41), "kernel_size must be an int >= 1 and <= 40, got kernel_size=41"),
]


@pytest.mark.parametrize("call,message", WRONG)
def test_arguments_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_arguments_of_another_type():
    with pytest.raises(TypeError, match="global_index must be integers"):
        F.longformer_attention(Q, K, V, window=2, global_index=INDEX.double())
    with pytest.raises(TypeError, match="key_padding must be bool"):
        F.bigbird_attention(Q, K, V, key_padding=torch.ones(2, 40))
    with pytest.raises(TypeError, match=r"bigbird_attention: seed must be an int, got seed=\[1\]"):
        F.bigbird_attention(Q, K, V, seed=[1])
    message = "_attention: global_index must be a tuple of ints, got global_index=-1"
    with pytest.raises(TypeError, match=message):
        F.hub_spoke_attention(Q, K, V, window=2, global_index=-1)
    with pytest.raises(TypeError, match=message):
        F.detsa_attention(Q, K, V, window=2, stride=3, global_index=-1)
    with pytest.raises(TypeError, match="dual_chunk_attention: sin must have the dtype of cos"):
        cos, sin = TABLES
        F.dual_chunk_attention(Q, K, V, cos, sin.float(), chunk_size=8, local_window=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: F.longformer_attention(q, k, v, q, k, v, window=2),
        lambda q, k, v: F.bigbird_attention(q, k, v, block=4, n_random=1),
        lambda q, k, v: F.bigbird_attention(q, k, v, block=4, n_random=1, num_global_tokens=2),
        lambda q, k, v: F.bigbird_attention(
            q, k, v, block=16, rand_blocks=BLOCKS.to("meta"), count_duplicates=True
        ),
        lambda q, k, v: F.hub_spoke_attention(q, k, v, window=2, global_every=9),
    ],
)
def test_shapes_on_meta(call):
    q, k, v = (torch.empty(2, 80, t.shape[2], t.shape[3], device="meta") for t in (Q, K, V))
    assert call(q, k, v).shape == (2, 80, q.shape[2], v.shape[3])


def test_blocks_of_a_mask_need_values():
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match="Blocks: partial blocks must have values, got device="):
        masks.Blocks.from_block_mask(seen, block_size=8, size=(40, 40))


def test_longformer_without_tokens():
    none, index = torch.ones(1, 0, 2, 4), torch.tensor([[-1]])
    for padding in (None, torch.ones(1, 0, dtype=torch.bool)):
        options = {"window": 2, "global_index": index, "key_padding": padding}
        assert F.longformer_attention(none, none, none, **options).shape == none.shape
