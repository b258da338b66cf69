"""Masks in blocks: whole ones, compressed rows, and those made of a predicate."""

from __future__ import annotations

import itertools

import pytest
import torch
from mask_cases import TK, TQ, B, H, gradients, qkv
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from omniattn import functional, reference
from omniattn.encoding.masks import MaskKind
from omniattn.functional import masks


def test_blocks_are_hidden_visible_or_partial():
    blocks = masks.from_predicate(lambda b, h, q, k: k <= q, 150, 200)
    assert blocks.codes.tolist() == [[[[2, 0, 0, 0], [1, 3, 0, 0], [1, 1, 4, 0]]]]
    assert blocks.bits.shape == (3, 64)
    none = masks.from_predicate(lambda b, h, q, k: k > k + q, 70, 70)
    assert (none.codes == 0).all() and len(none.bits) == 0
    whole = masks.Blocks.from_block_mask(torch.eye(3, dtype=torch.bool)[None, None])
    want = torch.block_diag(*[torch.ones(64, 64)] * 3).bool()
    assert torch.equal(whole.dense(192, 192), want[None, None])
    assert torch.equal(whole.dense(150, 150), want[None, None, :150, :150])


def test_sparse_patterns_of_whole_blocks():
    block_mask = torch.rand(2, 2, 7, 9, generator=torch.Generator().manual_seed(1)) < 0.3
    mask = masks.Blocks.from_block_mask(block_mask)
    dense = block_mask.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :400, :550]
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, n, 2, 8, generator=make, dtype=torch.float64) for n in (400, 550, 550)]
    torch.testing.assert_close(
        gradients(functional.attention, inputs, mask & masks.Causal()),
        gradients(reference.attention, inputs, dense & masks.Causal().dense(400, 550)),
    )


@pytest.mark.parametrize("block", [(64, 64), (128, 64), (16, 48), (100, 7)])
def test_blocks_of_any_size(block):
    make = torch.Generator().manual_seed(1)
    rows, columns = -(-TQ // block[0]), -(-TK // block[1])
    block_mask = torch.rand(B, H, rows, columns, generator=make) < 0.4
    mask = masks.Blocks.from_block_mask(block_mask, block_size=block, size=(TQ, TK))
    q, k = torch.arange(TQ)[:, None] // block[0], torch.arange(TK) // block[1]
    want = block_mask[:, :, q, k]
    assert torch.equal(mask.dense(TQ, TK).expand_as(want), want)
    torch.testing.assert_close(
        gradients(functional.attention, qkv(), mask), gradients(reference.attention, qkv(), want)
    )
    one = block_mask[0, 1].to_sparse_csr()
    csr = masks.Blocks.from_csr(one.crow_indices(), one.col_indices(), (TQ, TK), block_size=block)
    assert torch.equal(csr.dense(TQ, TK)[0, 0], want[0, 1])


def test_compressed_rows_per_head():
    pointers = torch.tensor([[[0, 1, 3], [0, 2, 3]]], dtype=torch.int32)
    columns = torch.tensor([[[2, 0, 1], [0, 2, 1]]])
    mask = masks.Blocks.from_csr(pointers, columns, (70, 129))
    want = torch.tensor([[[0, 0, 1], [1, 1, 0]], [[1, 0, 1], [0, 1, 0]]]).bool()
    assert torch.equal(mask.codes[0].bool(), want)


def _csr(rows, columns, size=(100, 129), **options):
    return masks.Blocks.from_csr(torch.tensor(rows), torch.tensor(columns), size, **options)


WRONG_BLOCKS = [
    (lambda: _csr([0, 1], [0]), r"row_ptr must have 3 entries"),
    (lambda: _csr([0, 1, 1], [0, 1]), "row_ptr must ascend from 0 to the 2 entries of col_idx"),
    (lambda: _csr([0, 2, 1], [0]), "row_ptr must ascend from 0 to the 1 entries of col_idx"),
    (lambda: _csr([1, 1, 2], [0, 1]), "row_ptr must ascend from 0"),
    (lambda: _csr([0, 1, 2], [0, 3]), r"col_idx must be in \[0, 3\), got col_idx from 0 to 3"),
    (lambda: _csr([0, 2, 2], [1, 0]), "col_idx must ascend in each row, without repetition"),
    (lambda: _csr([0, 2, 2], [1, 1]), "col_idx must ascend in each row, without repetition"),
    (lambda: _csr([[0, 1, 2]], [[0, 1]]), "row_ptr must have 1 dimension, or 3"),
    (lambda: _csr([0, 1, 2], [0, 1], block_size=0), "block_size must be two ints >= 1"),
    (
        lambda: masks.Blocks.from_block_mask(torch.ones(1, 1, 2, 2) > 0, block_size=32),
        "size must be given unless blocks are of 64",
    ),
    (
        lambda: masks.Blocks.from_block_mask(
            torch.ones(1, 1, 2, 2) > 0, block_size=32, size=(64, 65)
        ),
        r"block_mask must have \(2, 3\) blocks of \(32, 32\)",
    ),
    (lambda: masks.Blocks.from_block_mask(torch.ones(2, 2) > 0), "must have 4 dimensions"),
]


@pytest.mark.parametrize("make,message", WRONG_BLOCKS)
def test_blocks_that_do_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()


TABLE = torch.arange(40 * 7).view(40, 7) % 5 > 1


#: mask_mods of flex_attention, of which most mean something else for tensors with dimensions.
MASK_MODS = {
    "noop": noop_mask,
    "causal": lambda b, h, q, k: q >= k,
    "of b and h": lambda b, h, q, k: (b + h) % 2 == 0,
    "and": and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < 9),
    "or": or_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: k < 3),
    "sum of a row": lambda b, h, q, k: TABLE[q].sum() > 4,
    "any of a row": lambda b, h, q, k: (TABLE[q] & TABLE[k]).any(),
    "all of a row": lambda b, h, q, k: ~TABLE[k].all(),
    "row and column": lambda b, h, q, k: TABLE[q, k % 7],
    "column": lambda b, h, q, k: TABLE[:, k % 7].sum() > q + 2,
    "one number": lambda b, h, q, k: TABLE[q, 2],
    "local tensor": lambda b, h, q, k: torch.tensor([3, 30])[b] <= q + k,
    "maximum": lambda b, h, q, k: torch.stack([q, k, h]).max() > 20,
    "any of one": lambda b, h, q, k: (q < k).any(),
    "sum of one": lambda b, h, q, k: (q - k).sum() > 4,
    "positions of a range": lambda b, h, q, k: (torch.arange(7) == q % 7).sum() == (k < 9),
    "scalar tensors": lambda b, h, q, k: torch.where(h == 0, q >= k, q <= k),
    "new_ones": lambda b, h, q, k: q.new_ones((), dtype=torch.bool),
}


@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("size", [(2, 3, 40, 33), (1, 1, 1, 7)])
def test_a_predicate_is_called_as_flex_attention_calls_it(name, size):
    batch, heads, tq, tk = size
    want = create_mask(MASK_MODS[name], *size, device="cpu").expand(size)
    got = masks.from_predicate(MASK_MODS[name], tq, tk, batch=batch, heads=heads)
    assert torch.equal(got.dense(tq, tk, heads=heads).expand(size), want)
    blocks = create_block_mask(MASK_MODS[name], *size, device="cpu", BLOCK_SIZE=16)
    got = masks.from_block_mask(blocks)
    assert torch.equal(got.dense(tq, tk, heads=heads).expand(size), want)


@pytest.mark.parametrize("size", [(0, 3, 40, 33), (2, 0, 40, 33), (2, 3, 0, 33), (2, 3, 40, 0)])
def test_a_predicate_of_no_pairs(size):
    batch, heads, tq, tk = size
    mask = masks.from_predicate(lambda b, h, q, k: q >= k, tq, tk, batch=batch, heads=heads)
    assert mask.codes.numel() == 0 or mask.codes.sum() == 0


def test_a_predicate_must_return_a_value_for_each_pair():
    with pytest.raises(ValueError, match=r"predicate must return .* without .* shape=\(3,\)"):
        masks.from_predicate(lambda b, h, q, k: torch.ones(3, dtype=torch.bool), 4, 5)


def test_a_predicate_must_return_a_bool_tensor():
    for predicate in (lambda b, h, q, k: q - k, lambda b, h, q, k: True):
        with pytest.raises(TypeError, match="predicate must return a bool tensor"):
            masks.from_predicate(predicate, 4, 4)


def test_a_code_without_its_bits_hides():
    """The raw op trusts no code: it stays inside the bits it was given."""
    q, k, v = qkv(64, 64, torch.float32)
    codes = torch.tensor([2, 3, 2**31 - 1, -5], dtype=torch.int32)
    for code, h in itertools.product(codes, (1, 4)):
        aux = [code.expand(1, h, 1, 1).contiguous(), torch.full((1, 64), -1)]
        out, *_ = torch.ops.omniattn.attention_raw(
            q, k, v, aux, None, [MaskKind.BLOCKS, 0, 0, 0], [], [0.25, 0.0]
        )
        want = functional.attention(q, k, v, scale=0.25) if code == 2 else torch.zeros_like(out)
        torch.testing.assert_close(out, want)
