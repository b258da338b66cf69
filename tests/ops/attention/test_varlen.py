"""Packed and cached batches: each sequence is the problem it would be alone."""

from __future__ import annotations

import pytest
import torch
from varlen_cases import F64, LENGTHS_K, LENGTHS_Q, D, H, packed, pages_of

from omniattn.encoding.masks import MaskKind
from omniattn.functional import attention, attention_cached, attention_varlen, masks, scores
from omniattn.testing import threads


def per_batch(n, options):
    """Returns the options of sequence n for a separate call."""

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
    with pytest.raises(RuntimeError, match="attention_cached: " + message[:20]):
        attention_cached(q, k, k, lengths, block_table=table, backend="reference")


@pytest.mark.parametrize("lengths", [[2, 6], [-1, 4]])
def test_the_definition_refuses_lengths_beyond_the_cache(lengths):
    q, k, lengths = torch.zeros(2, 1, H, D), torch.zeros(2, 5, 2, D), torch.tensor(lengths)
    with pytest.raises(RuntimeError, match="attention_cached: cache_seqlens must lie in"):
        attention_cached(q, k, k, lengths, backend="reference")


def test_the_definition_reads_no_page_after_the_last_key():
    q, k, lengths = torch.randn(2, 1, H, D), torch.randn(4, 4, 2, D), torch.tensor([4, 8])
    table = torch.tensor([[3, -7], [1, 0]]), torch.tensor([[3, 9], [1, 0]])
    for each in table:
        want, got = (
            attention_cached(q, k, k, lengths, block_table=each, backend=backend)
            for backend in (None, "reference")
        )
        torch.testing.assert_close(got, want)


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
    ([0, 3, 2, 5], [0, 1, 2, 7], "cu_seqlens_q must grow"),
    ([0, 1, 2, 6], [0, 1, 2, 7], "cu_seqlens_q must grow from 0 to the number of queries, 5"),
    ([-1, 1, 2, 5], [0, 1, 2, 7], "cu_seqlens_q must grow from 0 to the number of queries, 5"),
    ([0, 1, 2, 5], [0, 1, 2, 2**31], "cu_seqlens_k must grow from 0 to the number of keys, 7"),
    ([0, 1, 2, 5], [1, 1, 2, 5], "cu_seqlens_k must .* without keys 0 and 5 to 6$"),
]


@pytest.mark.parametrize("cu_q,cu_k,message", WRONG)
def test_boundaries_that_leave_their_tensor(cu_q, cu_k, message):
    q, k = torch.zeros(5, H, D), torch.zeros(7, 2, D)
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 7}
    with pytest.raises(ValueError, match="attention_varlen: " + message):
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


class Packed(torch.nn.Module):
    """Attention within sequences, by their boundaries and by a mask."""

    def forward(self, q, cu):
        mask = masks.Documents.from_cu_seqlens(cu, q.shape[0])
        masked = attention(q[None], q[None], q[None], mask=mask, causal=True)[0]
        return attention_varlen(q, q, q, cu, cu, causal=True), masked


def test_one_graph_without_the_longest_sequence():
    """A graph cannot read the longest sequence, and takes the number of tokens."""
    q, cu = torch.randn(12, H, D), torch.tensor([0, 5, 12])
    longer = torch.randn(20, H, D), torch.tensor([0, 3, 4, 20])
    sizes = {"q": {0: torch.export.Dim("T", min=2)}, "cu": {0: torch.export.Dim("N", min=3)}}
    program = torch.export.export(Packed(), (q, cu), dynamic_shapes=sizes).module()
    compiled = torch.compile(Packed(), fullgraph=True, dynamic=True, backend="aot_eager")
    traced = torch.jit.trace(Packed(), (q, cu), check_trace=False)
    for graph, calls in ((program, 2), (compiled, 2), (traced, 1)):
        for call in ((q, cu), longer)[:calls]:
            results = graph(*call)
            assert all(map(torch.equal, results, Packed()(*call)))
            torch.testing.assert_close(*results)
    for ends in (19, 21):
        with pytest.raises(RuntimeError, match="Documents: cu_seqlens must grow from 0 to total"):
            program(longer[0], torch.tensor([0, 3, ends]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda q, cu: attention_varlen(q, q, q, cu, cu, bias=q.new_zeros(7, 7)),
            "attention_varlen: max_seqlen_q must be given with the tensor bias",
        ),
        (
            lambda q, cu: masks.Documents.from_cu_seqlens(cu).queries,
            "Documents: total must be given with cu_seqlens",
        ),
        (
            lambda q, cu: attention_varlen(q, q, q, cu, cu, sinks=q.new_ones(H + 1)),
            r"attention_varlen: sinks must have shape .*got sinks.shape=\(5,\)",
        ),
    ],
)
def test_a_graph_names_what_it_lacks(function, message):
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        compiled(torch.randn(12, H, D), torch.tensor([0, 5, 12]))
