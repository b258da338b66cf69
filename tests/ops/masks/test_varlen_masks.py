"""Combined masks and functions as masks of packed and cached batches: those of each sequence."""

from __future__ import annotations

import functools

import pytest
import torch
from varlen_cases import F64, LENGTHS_K, LENGTHS_Q, D, H, packed, pages_of

from omniattn import reference
from omniattn.functional import attention, attention_cached, attention_varlen, masks

COUNTS = torch.tensor([2, 0, 70, 1, 30])
ROOM = torch.rand(5, 1, 130, 200, generator=torch.Generator().manual_seed(1)) < 0.3
WINDOW = masks.SlidingWindow(5, 2)

#: masks that are not the AND of rules, of a batch or of one of its sequences [n, last)
COMBINED = {
    "or": lambda row, tq, tk: WINDOW | masks.GlobalTokens((0, 90), 33),
    "not": lambda row, tq, tk: ~masks.Chunked(17) & masks.Causal(),
    "heads": lambda row, tq, tk: masks.Strided(20, 6, True) | masks.Fixed(40, 3, patterns=2),
    "representatives": lambda row, tq, tk: WINDOW | masks.Representatives(10, 7),
    "neighbors": lambda row, tq, tk: masks.Neighborhood(21) | masks.GlobalTokens((3,)),
    "lengths": lambda row, tq, tk: ~masks.KeyLengths(COUNTS[row]) | WINDOW,
    "tensor": lambda row, tq, tk: ~(masks.BoolMask(ROOM[row, :, :tq, :tk]) | WINDOW),
}


@pytest.mark.parametrize("lengths_q", [LENGTHS_Q, LENGTHS_K, [3, 0, 40, 1, 50]])
@pytest.mark.parametrize("name", COMBINED)
def test_a_combined_mask_is_that_of_each_sequence(name, lengths_q):
    """As blocks of sequences that differ, of self-attention, and as a tensor for few queries."""
    make, longest = COMBINED[name], max(lengths_q)
    if name == "tensor" and longest != max(LENGTHS_Q):
        make = COMBINED["or"]
    qkv, cu_q, cu_k = packed(lengths_q)
    leaves = [t.requires_grad_() for t in qkv]

    def parts():
        for n, (tq, tk) in enumerate(zip(lengths_q, LENGTHS_K, strict=True)):
            ends = zip(leaves, (cu_q, cu_k, cu_k), strict=True)
            mask = make(slice(n, n + 1), tq, tk)
            yield attention(*(t[None, cu[n] : cu[n + 1]] for t, cu in ends), mask=mask)[0]

    whole = make(slice(None), longest, max(LENGTHS_K))
    outs = [
        torch.cat(list(parts())),
        attention_varlen(*leaves, cu_q, cu_k, mask=whole),
        attention_varlen(*leaves, cu_q, cu_k, mask=whole, backend="reference"),
        reference.attention_varlen(*leaves, cu_q, cu_k, mask=whole),
    ]
    weight = torch.linspace(-1, 1, outs[0].numel(), dtype=F64).view(outs[0].shape)
    want, *found = ([o, *torch.autograd.grad((o * weight).sum(), leaves)] for o in outs)
    for got in found:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("tq", [1, 4, 70])
@pytest.mark.parametrize("name", COMBINED)
def test_a_combined_mask_is_that_of_each_cache(name, tq):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([200, 64, 41, 170, 70])
    q = torch.randn(5, tq, H, D, generator=generator, dtype=F64, requires_grad=True)
    k, v = (torch.randn(5, 200, 2, D, generator=generator, dtype=F64) for _ in range(2))
    mask = COMBINED[name](slice(None), tq, 200)
    want = [
        attention(
            q[n : n + 1],
            k[n : n + 1, :tk],
            v[n : n + 1, :tk],
            mask=COMBINED[name](slice(n, n + 1), tq, tk),
        )
        for n, tk in enumerate(lengths.tolist())
    ]
    (k_pages, table), (v_pages, _) = pages_of(k, 50), pages_of(v, 50)
    table[torch.arange(table.shape[1]) * 50 >= lengths[:, None]] = -1  # not read
    found = [
        attention_cached(q, k, v, lengths, mask=mask),
        attention_cached(q, k, v, lengths, mask=mask, backend="reference"),
        reference.attention_cached(q, k, v, lengths, mask=mask),
        attention_cached(
            q, k_pages.nan_to_num(), v_pages.nan_to_num(), lengths, block_table=table, mask=mask
        ),
    ]
    want, *found = ([o, torch.autograd.grad(o.sum(), q)[0]] for o in [torch.cat(want), *found])
    for got in found:
        torch.testing.assert_close(got, want)


def test_a_function_is_a_mask_of_each_sequence():
    """A mask function gets row numbers in a packed batch, and positions among the keys in a
    cache."""
    qkv, cu_q, cu_k = packed(LENGTHS_K)

    def seen(b, h, q, k, n=0, first=0):
        return (k <= q + first + 2 * h) & (k >= COUNTS[b + n] - q - first)

    def of(n, first=0):
        return functools.partial(seen, n=n, first=first)

    parts = [
        [t[None, cu[n] : cu[n + 1]] for t, cu in zip(qkv, (cu_q, cu_k, cu_k), strict=True)]
        for n in range(5)
    ]
    want = [attention(*part, mask=of(n))[0] for n, part in enumerate(parts)]
    got = attention_varlen(*qkv, cu_q, cu_k, mask=seen)
    torch.testing.assert_close(got, torch.cat(want))
    q, k, v = (
        torch.nn.utils.rnn.pad_sequence([part[i][0] for part in parts], True) for i in range(3)
    )
    q = torch.cat((q[:, :3], q[:, :1]), 1)
    sizes = torch.tensor([40, 5, 130, 100, 200])
    got = attention_cached(q, k, v, sizes, mask=seen)
    for n, size in enumerate(sizes.tolist()):
        alone = (q[n : n + 1], k[n : n + 1, :size], v[n : n + 1, :size])
        torch.testing.assert_close(got[n], attention(*alone, mask=of(n, size - 4))[0])


class Combined(torch.nn.Module):
    def forward(self, q, k, v, cu_q, cu_k, lengths):
        mask = COMBINED["neighbors"](None, None, None)
        packed = attention_varlen(q, k, v, cu_q, cu_k, 130, 200, mask=mask)
        cached = attention_cached(q[None, :70], k[None], v[None], lengths, mask=mask)
        return packed, cached


@pytest.mark.parametrize("strict", [None, False, True])
def test_combined_masks_are_compiled_and_exported(strict):
    qkv, cu_q, cu_k = packed(dtype=torch.float32)
    inputs = *qkv, cu_q, cu_k, torch.tensor([90])
    layer = Combined()
    if strict is None:
        traced = torch.compile(layer, fullgraph=True, backend="eager")
    else:
        traced = torch.export.export(layer, inputs, strict=strict).module()
    torch.testing.assert_close(traced(*inputs), layer(*inputs))


def test_masks_are_combined_inside_a_compiled_function():
    """As the page of masks says: dynamo has no `~` of objects, but calls `Not`."""
    q, k, v = torch.randn(3, 1, 150, 2, 8).unbind(0)
    document = torch.arange(150).div(40, rounding_mode="floor")[None]

    def outside(document):
        near = masks.SlidingWindow(5, 0)
        seen = masks.Causal() & (near | masks.Not(masks.Documents(document)))
        return attention(q, k, v, mask=seen)

    got = torch.compile(outside, fullgraph=True, backend="eager")(document)
    near = masks.SlidingWindow(5, 0)
    want = attention(q, k, v, mask=masks.Causal() & (near | ~masks.Documents(document)))
    torch.testing.assert_close(got, want)


def test_vmap_over_the_lengths_of_combined_masks():
    qkv, cu_q, cu_k = packed(dtype=torch.float32)
    mask = COMBINED["heads"](None, None, None)
    both = torch.stack((cu_k, cu_k[-1] - cu_k.flip(0)))

    def call(cu):
        return attention_varlen(*qkv, cu_q, cu, 130, 200, mask=mask)

    torch.testing.assert_close(torch.vmap(call)(both), torch.stack([call(cu) for cu in both]))


def test_self_attention_keeps_one_mask_for_all_sequences():
    qkv, cu, _ = packed(LENGTHS_K)
    mask = WINDOW | masks.GlobalTokens((0,))
    for ends in (cu, cu.clone()):
        attention_varlen(*qkv, ends, cu, mask=mask)
    ((_, by_size),) = mask.known
    (blocks,) = by_size.values()
    assert blocks.codes.shape == (1, 1, 4, 4)
