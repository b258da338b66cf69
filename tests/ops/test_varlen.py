"""Packed and cached batches: each sequence is the problem it would be alone."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from omniattn import reference
from omniattn.encoding.masks import MaskKind
from omniattn.functional import attention, attention_cached, attention_varlen, masks, scores
from omniattn.testing import threads

F64 = torch.float64
LENGTHS_Q, LENGTHS_K = [3, 0, 130, 1, 64], [40, 5, 130, 0, 200]
H, D = 4, 16


def boundaries(lengths, first=0):
    return torch.tensor([first, *lengths]).cumsum(0).to(torch.int32)


def packed(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, before=0, behind=0, dtype=F64):
    make = torch.Generator().manual_seed(0)
    rows = [before + sum(n) + behind for n in (lengths_q, lengths_k, lengths_k)]
    shapes = zip(rows, (H, 2, 2), (D, D, 8), strict=True)
    qkv = [torch.randn(s, generator=make, dtype=F64).to(dtype) for s in shapes]
    return qkv, boundaries(lengths_q, before), boundaries(lengths_k, before)


def per_batch(n, options):
    """The options of sequence n as those of a call of its own."""

    def own(name, value):
        if name == "alibi_slopes" and value.dim() == 2:
            return value[n : n + 1]
        if name == "bias":
            value = value[n : n + 1] if value.shape[0] > 1 else value
            return value[:, :, : LENGTHS_Q[n], : LENGTHS_K[n]]
        return value

    return {name: own(name, value) for name, value in options.items()}


def alone(qkv, cu_q, cu_k, options):
    """O and lse by one call per sequence."""
    outs, lses = [], []
    for n in range(len(cu_q) - 1):
        q, k, v = (
            t[None, cu[n] : cu[n + 1]] for t, cu in zip(qkv, (cu_q, cu_k, cu_k), strict=True)
        )
        out, lse = attention(q, k, v, return_lse=True, **per_batch(n, options))
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "softcap": 3.0},
    "window": {"window_size": (20, 4)},
    "dilated": {"mask": masks.Dilated(3, 9)},
    "slopes": {"alibi_slopes": torch.rand(H, dtype=F64), "causal": True},
    "slopes per sequence": {"alibi_slopes": torch.rand(5, H, dtype=F64)},
    "sinks": {"sinks": torch.randn(H, dtype=F64), "head_scale": torch.rand(H, dtype=F64)},
    "bias": {"bias": torch.randn(1, H, 130, 200, dtype=F64)},
    "bias per sequence": {"bias": torch.randn(5, 1, 130, 200, dtype=F64), "causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_sequence_is_a_problem_of_its_own(options):
    qkv, cu_q, cu_k = packed()
    leaves = {n: t for n, t in options.items() if isinstance(t, torch.Tensor)}
    leaves |= dict(zip("qkv", qkv, strict=True))

    def run(together):
        fresh = {n: t.clone().requires_grad_() for n, t in leaves.items()}
        tensors = [fresh[n] for n in "qkv"]
        rest = options | {n: t for n, t in fresh.items() if n in options}
        if together:
            out, lse = attention_varlen(*tensors, cu_q, cu_k, return_lse=True, **rest)
        else:
            out, lse = alone(tensors, cu_q, cu_k, rest)
        weight = torch.linspace(-1, 1, out.numel(), dtype=F64).view(out.shape)
        loss = (out * weight).sum() + lse[lse.isfinite()].sum()
        return out, lse, *torch.autograd.grad(loss, list(fresh.values()))

    for got, want in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(got, want)


COUNTS = torch.tensor([2, 0, 70, 1, 30])
ROOM = torch.rand(5, 1, 130, 200, generator=torch.Generator().manual_seed(1)) < 0.3
WINDOW = masks.SlidingWindow(5, 2)

#: masks that are not the AND of rules, of a batch or of one of its sequences [n, last)
COMBINED = {
    "or": lambda row, tq, tk: WINDOW | masks.GlobalTokens((0, 90), 33),
    "not": lambda row, tq, tk: ~masks.Chunked(17) & masks.Causal(),
    "heads": lambda row, tq, tk: masks.Strided(20, 6, True) | masks.Fixed(40, 3, patterns=2),
    "representatives": lambda row, tq, tk: WINDOW | masks.Representatives(10, 7),
    "neighbours": lambda row, tq, tk: masks.Neighbourhood(21) | masks.GlobalTokens((3,)),
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
    """Of row numbers in a packed batch, of positions among the keys in a cache."""
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
        mask = COMBINED["neighbours"](None, None, None)
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


def test_vmap_over_the_lengths_of_combined_masks():
    qkv, cu_q, cu_k = packed(dtype=torch.float32)
    mask = COMBINED["heads"](None, None, None)
    both = torch.stack((cu_k, cu_k // 2))

    def call(cu):
        return attention_varlen(*qkv, cu_q, cu, 130, 200, mask=mask)

    torch.testing.assert_close(torch.vmap(call)(both), torch.stack([call(cu) for cu in both]))


def test_self_attention_keeps_one_mask_for_all_sequences():
    qkv, cu, _ = packed(LENGTHS_K)
    mask = WINDOW | masks.GlobalTokens((0,))
    for ends in (cu, cu.clone()):
        attention_varlen(*qkv, ends, cu, mask=mask)
    (blocks,) = mask.known.values()
    assert blocks.codes.shape == (1, 1, 4, 4)


def test_tables_are_shared_by_sequences_of_any_length():
    qkv, cu_q, cu_k = packed()
    table = torch.randn(32, H, dtype=F64, requires_grad=True)
    term = scores.T5Bias(table, bidirectional=False)
    rows = torch.randn(2, 100, H, D, dtype=F64, requires_grad=True)
    distances = {
        "relative_keys": scores.DistanceRows(rows[0], 70),
        "relative_queries": scores.DistanceRows(rows[1], -1),
    }
    for options, parameter in (({"relative": term}, table), (distances, rows)):
        want, _ = alone(qkv, cu_q, cu_k, options)
        got = attention_varlen(*qkv, cu_q, cu_k, **options)
        torch.testing.assert_close(got, want)
        weight = torch.linspace(-1, 1, got.numel(), dtype=F64).view(got.shape)
        grads = [torch.autograd.grad((x * weight).sum(), parameter)[0] for x in (got, want)]
        torch.testing.assert_close(*grads)


def test_rows_of_no_sequence_see_nothing():
    qkv, cu_q, cu_k = packed(before=7, behind=9)
    leaves = [t.requires_grad_() for t in qkv]
    out, lse = attention_varlen(*leaves, cu_q, cu_k, return_lse=True)
    want, want_lse = alone(qkv, cu_q, cu_k, {})
    torch.testing.assert_close(out[7:-9], want)
    torch.testing.assert_close(lse[:, 7:-9], want_lse)
    assert (out[:7] == 0).all() and (out[-9:] == 0).all()
    assert (lse[:, :7] == -torch.inf).all() and (lse[:, -9:] == -torch.inf).all()
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert (grad[:7] == 0).all() and (grad[-9:] == 0).all()


def test_dropout_depends_on_the_sequence_not_on_where_it_lies():
    qkv, cu_q, cu_k = packed([50, 50], [70, 70])
    qkv = [t[: len(t) // 2].repeat(2, 1, 1) for t in qkv]
    seed = torch.tensor([3, 4])
    out = attention_varlen(*qkv, cu_q, cu_k, dropout_p=0.5, seed=seed)
    batch = [t.unflatten(0, (2, -1)) for t in qkv]
    want = attention(*batch, dropout_p=0.5, seed=seed)
    torch.testing.assert_close(out, want.flatten(0, 1))


def test_threads_do_not_change_a_bit():
    qkv, cu_q, cu_k = packed(dtype=torch.float32)
    bias = torch.randn(1, 1, 130, 200)
    results = []
    for count in (1, 2):
        leaves = [t.clone().requires_grad_() for t in (*qkv, bias)]
        with threads(count):
            out = attention_varlen(*leaves[:3], cu_q, cu_k, bias=leaves[3], causal=True)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_threads_do_not_change_a_bit_of_the_gradients_of_heads():
    """Sums over sequences, which take different paths by the number of threads."""
    lengths, make = [47, 128, 110, 138], torch.Generator().manual_seed(0)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    for _ in range(10):
        leaves = [torch.randn(423, 1, 64, generator=make).requires_grad_() for _ in range(3)]
        leaves += [torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)]
        results = []
        for count in (1, 2):
            q, k, v, sinks, scale = leaves
            with threads(count):
                out = attention_varlen(
                    q, k, v, ends, ends, 138, 138, causal=True, sinks=sinks, head_scale=scale
                )
                results.append(torch.autograd.grad(out.square().sum(), leaves))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("tq", [1, 4, 40])
def test_a_cache_is_read_up_to_its_length(tq):
    make = torch.Generator().manual_seed(0)
    lengths = torch.tensor([300, 64, 41, 170])
    q = torch.randn(4, tq, H, D, generator=make)
    k, v = (torch.randn(4, 300, 2, D, generator=make) for _ in range(2))
    options = {"causal": True, "window_size": (90, 0), "sinks": torch.randn(H, generator=make)}
    want = [
        attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], **options)
        for b, n in enumerate(lengths.tolist())
    ]
    for b, n in enumerate(lengths.tolist()):
        k[b, n:] = v[b, n:] = torch.nan
    got = attention_cached(q, k, v, lengths, **options)
    torch.testing.assert_close(got, torch.cat(want))


def pages_of(k, size, seed=0):
    """k (B, T, H, D) in pages of `size` tokens in any order, those of other sequences between."""
    batch, length = k.shape[:2]
    count = -(-length // size)
    table = torch.randperm(batch * count + 3, generator=torch.Generator().manual_seed(seed))
    table = table[: batch * count].view(batch, count)
    pages = torch.full((batch * count + 3, size, *k.shape[2:]), torch.nan, dtype=k.dtype)
    for b, n in itertools.product(range(batch), range(count)):
        rows = k[b, n * size : (n + 1) * size]
        pages[table[b, n], : len(rows)] = rows
    return pages, table.int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 16, 50, 64, 300])
@pytest.mark.parametrize("tq", [1, 3, 40])
def test_pages_give_the_bits_of_contiguous_keys(dtype, size, tq):
    make = torch.Generator().manual_seed(0)
    lengths = torch.tensor([300, 64, 41, 170])
    heads = 24 if tq == 3 else H  # 36 rows of a kv head: register tiles
    q = torch.randn(4, tq, heads, D, generator=make).to(dtype)
    k, v = (torch.randn(4, 300, 2, D, generator=make).to(dtype) for _ in range(2))
    (k_pages, table), (v_pages, _) = pages_of(k, size), pages_of(v, size)
    table[torch.arange(table.shape[1]) * size >= lengths[:, None]] = -1  # not read
    options = {"causal": True, "window_size": (90, 0), "sinks": torch.randn(heads, generator=make)}
    got = attention_cached(q, k_pages, v_pages, lengths, block_table=table, **options)
    assert torch.equal(got, attention_cached(q, k, v, lengths, **options))
    heads_first = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k_pages, v_pages))
    again = attention_cached(q, *heads_first, lengths, block_table=table, **options)
    assert torch.equal(got, again)


@pytest.mark.parametrize("tq", [1, 40])
def test_distances_in_pages_are_those_of_each_cache(tq):
    make = torch.Generator().manual_seed(0)
    lengths = torch.tensor([300, 64, 170])
    q = torch.randn(3, tq, H, D, generator=make)
    k, v = (torch.randn(3, 300, 2, D, generator=make) for _ in range(2))
    rows = torch.randn(2, 90, H, D, generator=make)
    options = {
        "causal": True,
        "relative_keys": scores.DistanceRows(rows[0], -1),
        "relative_queries": scores.DistanceRows(rows[1], 60),
    }
    (k_pages, table), (v_pages, _) = pages_of(k, 50), pages_of(v, 50)
    got = attention_cached(q, k_pages, v_pages, lengths, block_table=table, **options)
    for b, n in enumerate(lengths):
        one = slice(b, b + 1)
        want = attention(q[one], k[one, :n], v[one, :n], **options)
        torch.testing.assert_close(got[one], want)


WRONG_TABLES = [
    ([[0, 1], [2, 3]], [8, 9], r"cache_seqlens must lie in \[0, 8\], got 9"),
    ([[0, 1], [2, 4]], [8, 8], r"block_table must name pages in \[0, 4\), got 4 in row 1"),
    ([[0, -1], [2, 3]], [5, 8], r"block_table must name pages in \[0, 4\), got -1 in row 0"),
    ([[0, 1], [2, 2**40]], [8, 5], "block_table must name .* got 1099511627776 in row 1"),
]


@pytest.mark.parametrize("table,lengths,message", WRONG_TABLES)
def test_tables_that_name_no_page(table, lengths, message):
    """The raw op too raises before it reads anything."""
    q, k = torch.zeros(2, 1, H, D), torch.zeros(4, 4, 2, D)
    table, lengths = torch.tensor(table), torch.tensor(lengths)
    with pytest.raises(RuntimeError, match="attention_cached: " + message):
        attention_cached(q, k, k, lengths, block_table=table)
    code = [MaskKind.PAGED, 0, 0, 0]
    with pytest.raises(RuntimeError, match="attention_cached: " + message):
        torch.ops.omniattn.attention_raw(q, k, k, [table, lengths], None, code, [], [1.0, 0.0])


def test_tables_of_the_wrong_shape():
    q, k, lengths = torch.zeros(2, 1, H, D), torch.zeros(4, 4, 2, D), torch.tensor([3, 4])
    code = [MaskKind.PAGED, 0, 0, 0]
    for table in (torch.zeros(2, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"block_table must have shape \(B, N\)"):
            attention_cached(q, k, k, lengths, block_table=table)
        with pytest.raises(RuntimeError, match=r"block_table must have shape \(B, N\)"):
            arguments = [table, lengths], None, code, [], [1.0, 0.0]
            torch.ops.omniattn.attention_raw(q, k, k, *arguments)
    with pytest.raises(TypeError, match="block_table must be an int32 or int64 tensor"):
        attention_cached(q, k, k, lengths, block_table=torch.zeros(2, 1))
    with pytest.raises(RuntimeError, match="pages must be gathered first"):
        out, lse, pages = torch.zeros(2, 1, H, D), torch.zeros(2, H, 1), [table[:2], lengths]
        torch.ops.omniattn.attention_backward(
            out, None, q, k, k, pages, None, out, lse, lse, code, [], [1.0, 0.0], []
        )


WRONG = [
    ([0, 3, 2, 5], [0, 1, 2, 3], "cu_seqlens_q must grow"),
    ([0, 1, 2, 6], [0, 1, 2, 3], r"cu_seqlens_q must lie in \[0, 5\], got 6"),
    ([-1, 1, 2, 5], [0, 1, 2, 3], r"cu_seqlens_q must lie in \[0, 5\], got -1"),
    ([0, 1, 2, 5], [0, 1, 2, 2**31], r"cu_seqlens_k must lie in \[0, 7\]"),
]


@pytest.mark.parametrize("cu_q,cu_k,message", WRONG)
def test_boundaries_that_leave_their_tensor(cu_q, cu_k, message):
    q, k = torch.zeros(5, H, D), torch.zeros(7, 2, D)
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 7}
    with pytest.raises(RuntimeError, match="attention(_varlen)?: " + message):
        attention_varlen(q, k, k, torch.tensor(cu_q), torch.tensor(cu_k), **longest)


def test_lengths_beyond_what_was_promised():
    q, cu = torch.zeros(5, H, D), torch.tensor([0, 1, 5])
    with pytest.raises(
        RuntimeError, match="attention_varlen: cu_seqlens_q must grow by 0 to 3, got 1 then 5"
    ):
        attention_varlen(q, q, q, cu, cu, max_seqlen_q=3)
    with pytest.raises(ValueError, match="cu_seqlens must both have shape"):
        attention_varlen(q, q, q, cu, cu[:2])
    with pytest.raises(TypeError, match="cu_seqlens_q must be an int32 or int64 tensor"):
        attention_varlen(q, q, q, cu.float(), cu)
    with pytest.raises(
        RuntimeError, match=r"attention_cached: cache_seqlens must lie in \[0, 5\], got 6"
    ):
        attention_cached(q[None], q[None], q[None], torch.tensor([6]))
    with pytest.raises(ValueError, match=r"cache_seqlens must have shape \(1,\)"):
        attention_cached(q[None], q[None], q[None], torch.tensor([5, 5]))


@pytest.mark.parametrize("second", ["reference", "jvp"])
def test_definition_takes_slopes_of_each_sequence(second):
    """The eager definition, which also gives second and forward-mode derivatives."""
    q, k = torch.randn(2, 3, 2, 4, dtype=F64), torch.randn(2, 5, 2, 4, dtype=F64)
    lengths, slopes = torch.tensor([5, 3]), torch.rand(2, 2, dtype=F64)

    def cached(slopes, **options):
        return attention_cached(q, k, k, lengths, alibi_slopes=slopes, **options)

    def varlen(slopes, **options):
        cu_q, cu_k = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 10])
        rows = q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1)
        return attention_varlen(*rows, cu_q, cu_k, alibi_slopes=slopes, **options)

    for function in (cached, varlen):
        if second == "reference":
            torch.testing.assert_close(function(slopes, backend="reference"), function(slopes))
        else:
            ones, step = torch.ones_like(slopes), 1e-6
            _, found = torch.func.jvp(function, (slopes,), (ones,))
            wanted = (function(slopes + step) - function(slopes - step)) / (2 * step)
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
