"""Masks: what each allows against a plain predicate, alone and through the kernels."""

from __future__ import annotations

import pytest
import torch
from mask_cases import TK, TQ, B, H, gradients, qkv

from omniattn import functional, reference
from omniattn.functional import masks

LENGTHS = torch.tensor([3, 40])
IDS_Q = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([30, 50, 20])).expand(2, 100)
IDS_K = torch.tensor([[1, 2, 0] * 43, [0] * 60 + [1] * 40 + [2] * 29])


def within(n, count):
    return (n >= 0) & (n < count)


#: mask, predicate on (b, h, q, k, i) with i = q + Tk - Tq, for Tq = 100, Tk = 129
MASKS = {
    "causal": (masks.Causal(), lambda b, h, q, k, i: k <= i),
    "causal top-left": (masks.Causal(top_left=True), lambda b, h, q, k, i: k <= q),
    "window": (masks.SlidingWindow(9, 3), lambda b, h, q, k, i: (k >= i - 9) & (k <= i + 3)),
    "lengths": (masks.KeyLengths(LENGTHS), lambda b, h, q, k, i: k < LENGTHS[b]),
    "prefix": (masks.PrefixLM(LENGTHS), lambda b, h, q, k, i: (k < LENGTHS[b]) | (k <= i)),
    "chunked": (masks.Chunked(17), lambda b, h, q, k, i: (i // 17 == k // 17) & (k <= i)),
    "chunks": (masks.Chunked(17, causal=False), lambda b, h, q, k, i: i // 17 == k // 17),
    "chunks before": (
        masks.Chunked(17, back=(2, 3)),
        lambda b, h, q, k, i: (i // 17 - k // 17 == 2) | (i // 17 - k // 17 == 3),
    ),
    "all chunks before": (
        masks.Chunked(17, back=(1, None)),
        lambda b, h, q, k, i: k < i // 17 * 17,
    ),
    "pooled": (
        masks.PooledKeys(8, 3, first=20),
        lambda b, h, q, k, i: k * 3 + 8 - 1 <= q + 20,
    ),
    "documents": (
        masks.Documents(IDS_Q, IDS_K),
        lambda b, h, q, k, i: IDS_Q[b, q] == IDS_K[b, k],
    ),
    "dilated": (
        masks.Dilated(3, 5),
        lambda b, h, q, k, i: (k <= i) & (k >= i - 15) & ((i - k) % 3 == 0),
    ),
    "dilated both": (
        masks.Dilated(3, 5, causal=False),
        lambda b, h, q, k, i: ((i - k).abs() <= 15) & ((i - k) % 3 == 0),
    ),
    "strided": (
        masks.Strided(20, 6),
        lambda b, h, q, k, i: (k <= i) & ((i - k < 6) | ((i - k) % 20 == 0)),
    ),
    "strided heads": (
        masks.Strided(20, 6, split_heads=True),
        lambda b, h, q, k, i: (k <= i) & torch.where(h % 2 == 0, i - k < 6, (i - k) % 20 == 0),
    ),
    "fixed": (
        masks.Fixed(40, 3),
        lambda b, h, q, k, i: (k <= i) & ((k // 40 == i // 40) | (k % 40 >= 37)),
    ),
    "fixed heads": (  # 37 .. 39 for heads 0 and 2, 34 .. 36 for heads 1 and 3
        masks.Fixed(40, 3, patterns=2),
        lambda b, h, q, k, i: (
            (k <= i) & ((k // 40 == i // 40) | ((k + h % 2 * 3) % 40 >= 37) & (k % 40 >= 34))
        ),
    ),
    "every kth": (
        masks.EveryKth(13, causal=False),
        lambda b, h, q, k, i: (k % 13 == 0) | (k == i),
    ),
    "neighbors": (
        masks.Neighborhood(21),
        lambda b, h, q, k, i: ((i - 10).clamp(0, 108) <= k) & (k < (i - 10).clamp(0, 108) + 21),
    ),
    "dilated neighbors": (  # those of 3 rounds; 129 = 18 * 7 + 3 keys
        masks.Neighborhood(3, dilation=7),
        lambda b, h, q, k, i: (
            (k % 7 == i % 7)
            & ((k // 7 - (i // 7).clamp(min=1).minimum(17 - (i % 7 >= 3).long())).abs() <= 1)
        ),
    ),
    "grid": (  # of 3 rows of 43: 2 of them, and 8 columns of which 4 are before
        masks.GridNeighborhood((3, 43), (2, 8)),
        lambda b, h, q, k, i: (
            within(k // 43 - (i // 43 - 1).clamp(0, 1), 2)
            & within(k % 43 - (i % 43 - 4).clamp(0, 35), 8)
        ),
    ),
    "causal grid": (
        masks.GridNeighborhood((3, 43), (1, 9), is_causal=(False, True)),
        lambda b, h, q, k, i: (k // 43 == i // 43) & (k <= i) & (i - k < 9),
    ),
    "dilated grid": (  # residues 0 .. 3 have 11 columns, others 10
        masks.GridNeighborhood((3, 43), (3, 10), dilation=(1, 4)),
        lambda b, h, q, k, i: (
            (k % 43 % 4 == i % 43 % 4)
            & ~((i % 43 % 4 < 3) & (i % 43 // 4 > 5) & (k % 43 < 4))
            & ~((i % 43 % 4 < 3) & (i % 43 // 4 <= 5) & (k % 43 >= 40))
        ),
    ),
    "strided grid": (  # groups of 4 rows of 1, whose middle is the third
        masks.GridNeighborhood((129,), 7, stride=4),
        lambda b, h, q, k, i: within(k - (i // 4 * 4 - 1).clamp(0, 122), 7),
    ),
    "global tokens": (
        masks.GlobalTokens((3, 50), 40),
        lambda b, h, q, k, i: (
            (k == 3) | (k == 50) | (k % 40 == 0) | (i == 50) | (i % 40 == 0) | (i == 3)
        ),
    ),
    "global keys": (
        masks.GlobalTokens((3, 200), queries=False),
        lambda b, h, q, k, i: k == 3,
    ),
    "representatives": (
        masks.Representatives(10, 7),
        lambda b, h, q, k, i: (k < i - 10) & ((i - 10 - k) % 7 == 0),
    ),
    "last of blocks": (
        masks.Representatives(10, 7, "absolute"),
        lambda b, h, q, k, i: (k < i - 10) & (k % 7 == 6),
    ),
    "pyramid": (
        masks.Representatives(10, 7, levels=((2, 3), (3, 20))),
        lambda b, h, q, k, i: (
            (i - k == 13) | (i - k == 16) | (i - k == 36) | (i - k == 56) | (i - k == 76)
        ),
    ),
    "block local global": (
        masks.block_local_global(30, (5, 7), causal=True),
        lambda b, h, q, k, i: (
            (k <= i) & ((k // 30 == i // 30) | (k == 5) | (k == 7) | (i == 5) | (i == 7))
        ),
    ),
    "hubs and spokes": (
        masks.hub_spoke(6, (20,), global_every=50),
        lambda b, h, q, k, i: (
            (k <= i) & ((i - k <= 6) | (k == 20) | (i == 20) | (k % 50 == 0) | (i % 50 == 0))
        ),
    ),
    "hubs both ways": (
        masks.hub_spoke(6, (20,), causal=False),
        lambda b, h, q, k, i: ((i - k).abs() <= 6) | (k == 20) | (i == 20),
    ),
    "deterministic sparse": (
        masks.deterministic_sparse(8, 5, (0, 2)),
        lambda b, h, q, k, i: (
            (k <= i) & ((i - k <= 8) | (k == 0) | (k == 2) | ((i - 8 - k) % 5 == 0))
        ),
    ),
    "padding": (masks.KeyPadding(IDS_K > 0), lambda b, h, q, k, i: IDS_K[b, k] > 0),
    "tensor": (
        masks.BoolMask((torch.arange(TQ)[:, None] + torch.arange(TK)) % 3 > 0),
        lambda b, h, q, k, i: (q + k) % 3 > 0,
    ),
    "either": (
        masks.SlidingWindow(5, 2) | masks.KeyLengths(LENGTHS) | masks.Strided(20, 6, True),
        lambda b, h, q, k, i: (
            (k >= i - 5) & (k <= i + 2)
            | (k < LENGTHS[b])
            | (k <= i) & torch.where(h % 2 == 0, i - k < 6, (i - k) % 20 == 0)
        ),
    ),
    "complement": (~masks.Chunked(17), lambda b, h, q, k, i: (i // 17 != k // 17) | (k > i)),
    "combined": (
        masks.PrefixLM(LENGTHS) & masks.Dilated(2, 60) & masks.KeyLengths(torch.tensor([90, 129])),
        lambda b, h, q, k, i: (
            (k <= i) & ((i - k) % 2 == 0) & (i - k <= 120) & (k < torch.tensor([90, 129])[b])
        ),
    ),
}


def expected(predicate, tq=TQ, tk=TK):
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in (B, H, tq, tk)), indexing="ij")
    return predicate(b, h, q, k, q + tk - tq)


def test_every_mask_has_a_predicate():
    made = [mask for mask, _ in MASKS.values()]
    classes = {getattr(masks, name) for name in masks.__all__ if name[0].isupper()}
    # Blocks have tests of their own.
    assert classes - {masks.Mask, masks.Blocks} == {type(mask) for mask in made}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_allows_what_its_predicate_says(name):
    mask, predicate = MASKS[name]
    want = expected(predicate)
    assert torch.equal(mask.dense(TQ, TK, heads=H).expand(B, H, TQ, TK), want)
    assert mask.count(TQ, TK, batch=B, heads=H) == want.sum()
    assert mask.density(TQ, TK, batch=B, heads=H) == want.double().mean()
    tiles = (
        torch.nn.functional.pad(want, (0, 31, 0, 28)).unflatten(3, (5, 32)).unflatten(2, (8, 16))
    )
    inside = torch.ones(1, 1, TQ, TK, dtype=torch.bool)
    inside = (
        torch.nn.functional.pad(inside, (0, 31, 0, 28)).unflatten(3, (5, 32)).unflatten(2, (8, 16))
    )
    area = (tiles.any((3, 5), keepdim=True) & inside).sum() / want.numel()
    got = mask.block_density(TQ, TK, batch=B, heads=H, block=(16, 32))
    assert got == pytest.approx(area.item())


@pytest.mark.parametrize("name", MASKS)
def test_kernels_see_what_the_mask_allows(name):
    mask, predicate = MASKS[name]
    inputs = qkv()
    want = gradients(reference.attention, inputs, expected(predicate))
    for got in (
        gradients(functional.attention, inputs, mask),
        gradients(reference.attention, inputs, mask),
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", MASKS)
def test_decode_sees_the_last_rows(name):
    mask, predicate = MASKS[name]
    if name == "documents":
        mask = masks.Documents(IDS_Q[:, -2:], IDS_K)
    if name == "tensor":
        mask = masks.BoolMask(mask.mask[-2:])
    last = expected(predicate)[:, :, -2:]
    if name in ("causal top-left", "pooled"):
        last = expected(predicate, 2)
    inputs = qkv(2)
    got = gradients(functional.attention, inputs, mask)
    torch.testing.assert_close(got, gradients(reference.attention, inputs, last))


@pytest.mark.parametrize("name", MASKS)
def test_any_predicate_becomes_blocks(name):
    _, predicate = MASKS[name]
    blocks = masks.from_predicate(
        lambda b, h, q, k: predicate(b, h, q, k, q + TK - TQ),
        TQ,
        TK,
        batch=B,
        heads=H,
    )
    want = expected(predicate)
    assert torch.equal(blocks.dense(TQ, TK), want)
    inputs = qkv()
    torch.testing.assert_close(
        gradients(functional.attention, inputs, blocks),
        gradients(reference.attention, inputs, want),
    )


def test_lengths_outside_the_keys_mean_all_or_none():
    lengths = torch.tensor([-3, 1000])
    for make in (masks.KeyLengths, masks.PrefixLM):
        allowed = torch.arange(TK) < lengths[:, None, None, None]
        if make is masks.PrefixLM:
            allowed = allowed | masks.Causal().dense(TQ, TK)
        got = gradients(functional.attention, qkv(), make(lengths))
        torch.testing.assert_close(got, gradients(reference.attention, qkv(), allowed))


def test_a_grid_that_is_generated_token_by_token():
    """With fewer keys a causal grid shows its last query what the whole grid shows it."""
    mask = masks.GridNeighborhood((6, 7), (3, 4), is_causal=True)
    whole = mask.dense(42, 42)
    for n in (1, 6, 8, 30):
        assert torch.equal(mask.dense(1, n)[0], whole[n - 1, :n])


def test_documents_of_packed_batches():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    mask = masks.Documents.from_position_ids(positions)
    assert mask.queries.tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
    mask = masks.Documents.from_cu_seqlens(torch.tensor([0, 3, 5, 6], dtype=torch.int32))
    assert mask.queries.tolist() == [[0, 0, 0, 1, 1, 2]]
    ends = torch.tensor([0, 3, 3, 6])
    mask = masks.Documents.from_cu_seqlens(ends, 6)
    assert mask.queries.tolist() == [[0, 0, 0, 2, 2, 2]]
    broadcast = functional.attention(*qkv(TQ, TQ), mask=masks.Documents(IDS_Q[:1]))
    torch.testing.assert_close(
        broadcast, functional.attention(*qkv(TQ, TQ), mask=masks.Documents(IDS_Q))
    )


@pytest.mark.parametrize(
    "positions",
    [
        [[2, 3, 4, 2, 2, 3]],  # RoBERTa's positions start at 2
        [[0, 1, 2, 0, 1, 0], [5, 6, 7, 8, 9, 10]],
        [[7, 8, 3, 4, 4, 6], [0, 0, 0, 0, 0, 0]],
        [[255, 0, 1, 2, 0, 1]],
        [[9]],
        [[]],
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_documents_start_where_the_count_breaks(positions, dtype):
    got = masks.Documents.from_position_ids(torch.tensor(positions, dtype=dtype)).queries
    for row, ids in zip(positions, got.tolist(), strict=True):
        count, expected = 0, []
        for t, position in enumerate(row):
            count += t > 0 and position != row[t - 1] + 1
            expected.append(count)
        assert ids == expected


def test_window_conventions():
    window = masks.sliding_window
    assert window(4096, "huggingface") == masks.SlidingWindow(4095, 0)
    assert window(4096, "huggingface", causal=False) == masks.SlidingWindow(4096, 4096)
    assert window(4096, "fla") == masks.SlidingWindow(4095, 0)
    assert window(4096, "mistral") == masks.SlidingWindow(4096, 0)
    assert window((7, -1), "flash_attn") == masks.SlidingWindow(7, 0)
    assert window((7, -1), "torch", causal=False) == masks.SlidingWindow(7, -1)
    for size, convention in ((0, "huggingface"), ((1, 1), "fla"), (3, "torch")):
        with pytest.raises((TypeError, ValueError), match="sliding_window: size"):
            window(size, convention)


def test_windows_agree_with_transformers():
    utils = pytest.importorskip("transformers.masking_utils")
    q, k = torch.arange(20)[:, None], torch.arange(20)[None, :]
    causal = utils.sliding_window_causal_mask_function(6)(0, 0, q, k)
    assert torch.equal(masks.sliding_window(6, "huggingface").dense(20, 20), causal)
    both = utils.sliding_window_bidirectional_mask_function(6)(0, 0, q, k)
    assert torch.equal(masks.sliding_window(6, "huggingface", causal=False).dense(20, 20), both)


def test_plot_draws_one_head():
    pytest.importorskip("matplotlib").use("Agg")
    mask = masks.Strided(4, 2, split_heads=True)
    image = mask.plot(10, 10, head=3).images[0].get_array()
    assert (image == mask.dense(10, 10, heads=4)[3].numpy()).all()


WRONG = [
    (lambda: masks.SlidingWindow(-2, 0), "SlidingWindow: left must be an int >= -1, got left=-2"),
    (lambda: masks.Chunked(0), "Chunked: size must be an int >= 1, got size=0"),
    (lambda: masks.PooledKeys(0, 1), "PooledKeys: size must be an int >= 1 .*got size=0"),
    (lambda: masks.PooledKeys(4, 2**20), "PooledKeys: stride must be an int >= 1 and .*=1048576"),
    (lambda: masks.Dilated(0, 1), "dilation must be an int >= 1"),
    (lambda: masks.Strided(3, -1), "local must be an int >= 0"),
    (lambda: masks.Fixed(3, 4), "columns must be an int >= 0 and <= 3"),
    (lambda: masks.Fixed(8, 3, 3), "columns must be an int >= 0 and <= 2, got columns=3"),
    (lambda: masks.Fixed(8, 3, 0), "patterns must be an int >= 1 and <= 2047, got patterns=0"),
    (lambda: masks.EveryKth(0), "k must be an int >= 1"),
    (lambda: masks.Neighborhood(4), "size must be odd, got size=4"),
    (lambda: masks.GlobalTokens((1, -1)), "index must be an int >= 0, got index=-1"),
    (lambda: masks.GlobalTokens((1, 1)), "index must name no token twice"),
    (lambda: masks.GlobalTokens(), "index or every must be given"),
    (lambda: masks.Representatives(3, 0), "stride must be an int >= 1"),
    (lambda: masks.Representatives(3, 2, "last"), 'anchor must be one of "relative", "absolute"'),
    (lambda: masks.Representatives(3, 2, "absolute", ((1, 2),)), "levels need the relative"),
    (lambda: masks.Chunked(4, back=(2, 1)), "far of back must be an int >= 2"),
    (lambda: masks.GridNeighborhood((4, 5), 5), "kernel_size must be an int >= 1 and <= 4"),
    (
        lambda: masks.GridNeighborhood((5, 5), 3, dilation=2),
        "kernel_size [*] dilation must be .* got kernel_size=3, dilation=2, tokens=5",
    ),
    (
        lambda: masks.GridNeighborhood((4, 5), 2, dilation=3),
        r"kernel_size \* dilation must be .*, got kernel_size=2, dilation=3, tokens=4",
    ),
    (lambda: masks.GridNeighborhood((4, 5), (2, 2, 2)), "kernel_size must be one value or 2"),
    (lambda: masks.GridNeighborhood((4, 5), 2, stride=3), "stride must be an int >= 1 and <= 2"),
    (lambda: masks.GridNeighborhood((4, 0), 1), "shape must be an int >= 1"),
]


@pytest.mark.parametrize("make,message", WRONG)
def test_parameters_without_a_meaning(make, message):
    with pytest.raises(ValueError, match=message):
        make()


IDS = torch.arange(140).view(2, 70) // 25
WRONG_SHAPES = [
    (masks.GridNeighborhood((8, 16), 3), r"Tq <= Tk <= 128 must hold"),
    (masks.PrefixLM(torch.arange(3)), r"lengths must have shape \(2,\)"),
    (masks.Documents(IDS_Q[:, 1:], IDS_K), r"documents of queries must have shape \(2, 100\)"),
    (masks.Documents(IDS_Q), r"documents of keys must have shape \(2, 129\)"),
    (masks.from_predicate(lambda b, h, q, k: k <= q, 100, 300), "mask codes must be broadcastable"),
    (
        masks.from_predicate(lambda b, h, q, k: k <= q, 99, 129),
        r"mask must be made for \(Tq, Tk\)=\(100, 129\), got size=\(99, 129\)",
    ),
    (
        masks.Blocks(
            torch.zeros(1, 1, 2, 3, dtype=torch.int32), torch.zeros(1, 63, dtype=torch.int64)
        ),
        "bits must have shape",
    ),
]


@pytest.mark.parametrize("mask,message", WRONG_SHAPES)
def test_shapes_that_do_not_fit_the_call(mask, message):
    with pytest.raises(ValueError, match="(attention|GridNeighborhood): .*" + message):
        functional.attention(*qkv(), mask=mask)


WRONG_TYPES = [
    (lambda: masks.KeyPadding(torch.ones(2, 129)), r"KeyPadding: real must be bool, .*float32"),
    (lambda: masks.BoolMask([[True]]), r"BoolMask: mask must be a torch.Tensor, got mask=\[\[True"),
    (lambda: masks.KeyLengths(torch.ones(2)), "KeyLengths: lengths must be integers, .*float32"),
    (lambda: masks.PrefixLM([1, 2]), r"PrefixLM: lengths must be a torch.Tensor, .*\[1, 2\]"),
    (lambda: masks.Documents(IDS_Q, IDS_K > 0), "Documents: keys must be integers, .*bool"),
    (lambda: masks.Causal() & torch.ones(2, 2, dtype=torch.bool), "All: masks must be masks"),
    (lambda: masks.Causal() | (lambda b, h, q, k: q > k), "AnyOf: masks must be .*from_predicate"),
    (lambda: masks.Not(3), "Not: masks must be masks"),
]


@pytest.mark.parametrize("make,message", WRONG_TYPES)
def test_tensors_of_another_type(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_sequences_have_no_more_keys_than_the_grid():
    q, mask = torch.randn(6, 1, 8), masks.GridNeighborhood((4,), 2)
    cu = torch.tensor([0, 1, 6])
    with pytest.raises(ValueError, match=r"GridNeighborhood: .* at most 4 keys .* got 5"):
        functional.attention_varlen(q, q, q, cu, cu, 5, 5, mask=mask)
