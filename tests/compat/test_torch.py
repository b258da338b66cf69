"""varlen_attn and flex_attention of torch.nn.attention, against torch's on the CPU."""

import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention import varlen

from omniattn.compat import torch as ours

LENGTHS = 5, 0, 7


def packed(heads=4, kv_heads=2):
    torch.manual_seed(0)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    q = torch.randn(int(cu[-1]), heads, 8, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, int(cu[-1]), kv_heads, 8, dtype=torch.float64).unbind()
    return q, k.requires_grad_(), v.requires_grad_(), cu


def each(q, k, v, window=(-1, -1), used=LENGTHS):
    """Attention of the sequences one by one, and lse (Hq, total)."""
    outs, sums = [], []
    parts = (t.split(LENGTHS) for t in (q, k, v))
    for q, k, v, count in zip(*parts, used, strict=True):
        k, v = (t[:count].repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5
        i = torch.arange(len(q))[:, None] + count - len(q)
        j = torch.arange(count)
        left, right = (len(q) + count if n < 0 else n for n in window)
        scores = scores.masked_fill((i - j > left) | (j - i > right), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 3)])
def test_varlen_attn(window):
    q, k, v, cu = packed()
    options = {"window_size": window, "enable_gqa": True}
    options["return_aux"] = varlen.AuxRequest(lse=True)
    out, lse = ours.varlen_attn(q, k, v, cu, cu, 7, 7, **options)
    expected = each(q, k, v, window)
    torch.testing.assert_close((out, lse), expected)
    grads = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, expected[0]))
    torch.testing.assert_close(*grads)
    into = torch.empty_like(out)
    assert ours.varlen_attn_out(into, q, k, v, cu, cu, 7, 7, **options)[0] is into
    torch.testing.assert_close(into, out)


def test_varlen_attn_with_lengths_and_pages():
    q, k, v, cu = packed(2, 2)
    used = torch.tensor([3, 0, 7], dtype=torch.int32)
    expected = each(q, k, v, (-1, 0), used.tolist())[0]
    options = {"window_size": (-1, 0), "seqused_k": used}
    out = ours.varlen_attn(q, k, v, cu, cu, 7, 7, **options)
    torch.testing.assert_close(out, expected)
    table = torch.tensor([[3, 0], [1, 1], [4, 2]], dtype=torch.int32)
    pages = []
    for t in (k, v):
        pool = t.new_zeros(5, 4, *t.shape[1:])
        for row, part in zip(table, t.split(LENGTHS), strict=True):
            for n, piece in enumerate(part.split(4)):
                pool[row[n], : len(piece)] = piece
        pages.append(pool)
    out = ours.varlen_attn(q, *pages, cu, None, 7, 8, block_table=table, **options)
    torch.testing.assert_close(out, expected)


def test_flex_attention():
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8)
    k, v = torch.randn(2, 2, 2, 9, 8).unbind()
    blocks = theirs.create_block_mask(lambda b, h, i, j: (i + j) % 3 != b, 2, None, 6, 9, "cpu")

    def score(s, b, h, i, j):
        return s * (1 + i - j).abs()

    given = dict(score_mod=score, block_mask=blocks, scale=0.3, enable_gqa=True)
    aux = theirs.AuxRequest(lse=True)
    found, expected = (
        module.flex_attention(q, k, v, **given, return_aux=aux) for module in (ours, theirs)
    )
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1].lse, expected[1].lse)
    assert found[1].max_scores is None
    plain = ours.flex_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(plain, theirs.flex_attention(q, k, v, enable_gqa=True))
    with pytest.warns(FutureWarning, match="return_lse is deprecated"):
        out, lse = ours.flex_attention(q, k, v, **given, return_lse=True)
    torch.testing.assert_close((out, lse), (found[0], found[1].lse))


def test_signatures_are_those_of_torch():
    for module, name in ((theirs, "flex_attention"), (varlen, "varlen_attn")):
        wanted = inspect.signature(getattr(module, name)).parameters
        found = inspect.signature(getattr(ours, name)).parameters
        assert list(found) == list(wanted)
        for key, parameter in found.items():
            assert (parameter.kind, parameter.default) == (wanted[key].kind, wanted[key].default)


def test_errors_name_arguments_of_torch():
    q, k, v, cu = packed()
    flat = (t[None].transpose(1, 2) for t in (q, k, v))
    heads = tuple(flat)
    blocks = theirs.create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, "cpu")
    for call, text in (
        (lambda: ours.varlen_attn(q, k, v, cu, cu, 7, 7), "varlen_attn: Hq must be Hkv"),
        (lambda: ours.varlen_attn(q, q, q, cu, None, 7, 7), "cu_seq_k must be given"),
        (lambda: ours.varlen_attn(q[None], q, q, cu, cu, 7, 7), "query must have shape"),
        (lambda: ours.flex_attention(*heads), "flex_attention: Hq must be Hkv"),
        (
            lambda: ours.flex_attention(*heads, block_mask=blocks, enable_gqa=True),
            "block_mask must have the lengths of query and key",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    request = theirs.AuxRequest(max_scores=True)
    with pytest.raises(NotImplementedError, match="max_scores is not supported"):
        ours.flex_attention(*heads, enable_gqa=True, return_aux=request)
