"""softpick_attention: the public formula, logits near 0, NaN, nested and cached sequences."""

import math

import pytest
import torch
from torch.nn import functional as F

from omniattn.functional import (
    attention,
    attention_cached,
    attention_varlen,
    attention_weights,
    merge_attention,
    softpick_attention,
)

F64 = torch.float64
PICK = {"causal": True, "normalizer": "softpick"}


def inputs(tq=20, tk=20, heads=4, kv_heads=2, batch=2, scale=1.0, dtype=F64):
    make = torch.Generator().manual_seed(0)
    shapes = ((batch, tq, heads, 8), (batch, tk, kv_heads, 8), (batch, tk, kv_heads, 5))
    q, k, v = (torch.randn(shape, generator=make, dtype=F64) for shape in shapes)
    return [t.to(dtype) for t in (scale * q, k, v)]


def by_pairs(q, k, v):
    """`naive_softpick_attn` of zaydzuhri/softpick-attention at commit c97f4dc, stated again with
    eps = 0; also the logarithm of the denominator."""
    group, tq, tk = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.ones(tq, tk).triu(tk - tq + 1).bool()
    top = logits.masked_fill(hidden, -math.inf).amax(-1, keepdim=True)
    powers = (torch.exp(logits - top) - torch.exp(-top)).masked_fill(hidden, 0)
    total = powers.abs().sum(-1, keepdim=True)
    out = torch.einsum("bhij,bjhd->bihd", F.relu(powers) / total, v)
    return out, (top + total.log()).squeeze(-1)


def gradients(f, tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, lse = f(*leaves)
    loss = (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum()
    loss = loss + (lse * torch.linspace(1, 2, lse.shape[-1], dtype=lse.dtype)).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


def picked(**options):
    return lambda *t: softpick_attention(*t, causal=True, return_lse=True, **options)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("sizes", [(150, 150), (3, 300), (2, 2), (1, 1)])
def test_the_public_formula(sizes, backend):
    got = gradients(picked(backend=backend), inputs(*sizes))
    want = gradients(by_pairs, inputs(*sizes))
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 30.0])
def test_small_and_large_logits(scale):
    """Near 0, exp(z) - 1 would lose all digits."""
    given = inputs(400, 400, batch=1, scale=scale, dtype=torch.float32)
    got = gradients(picked(), given)
    want = gradients(picked(backend="reference"), [t.double() for t in given])
    for mine, other in zip(got, want, strict=True):
        bound = 1e-6 * max(scale, 1) * max(other.abs().max().item(), 1)
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=bound)


def test_negative_logits_give_nothing_but_have_gradients():
    q, k, v = inputs(1, 3)
    k[:, 1:] = -q.mean(2, keepdim=True).expand(-1, 2, 2, -1)
    q = q.mean(2, keepdim=True).expand(-1, -1, 4, -1)
    k[:, 0] = q[:, 0, :2]
    v.requires_grad_()
    k.requires_grad_()
    out = softpick_attention(q, k, v)
    dk, dv = torch.autograd.grad(out.sum(), (k, v))
    assert (dv[:, 1:] == 0).all() and (dv[:, 0] > 0).all() and (dk[:, 1:] != 0).all()


def test_rows_of_zeros_and_rows_without_keys():
    q, k, v = inputs(5, 3)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = softpick_attention(*leaves, causal=True, return_lse=True)
    assert (out[:, :2] == 0).all() and (lse[..., :2] == -math.inf).all()
    zeros = torch.zeros_like(q).requires_grad_()
    out, lse = softpick_attention(zeros, k, v, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    for grad in torch.autograd.grad(out.sum(), (zeros, k, v)):
        assert (grad == 0).all()
    assert softpick_attention(q[:, :0], k, v).shape == (2, 0, 4, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_in_its_row(dtype):
    q, k, v = inputs(300, 300, dtype=dtype)
    want = softpick_attention(q, k, v, causal=True)
    q[0, 150, 1] = math.nan
    got = softpick_attention(q, k, v, causal=True)
    assert got[0, 150, 1].isnan().all()
    got[0, 150, 1] = want[0, 150, 1] = 0
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_packed_cached_and_merged_calls(dtype):
    q, k, v = inputs(600, 600, batch=1, dtype=dtype)
    want, lse = attention(q, k, v, return_lse=True, **PICK)
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    ends = torch.tensor([0, 250, 600])
    packed = attention_varlen(q[0], k[0], v[0], ends, ends, **PICK)
    parts = [
        attention(q[:, a:b], k[:, a:b], v[:, a:b], **PICK)[0] for a, b in ((0, 250), (250, 600))
    ]
    torch.testing.assert_close(packed, torch.cat(parts), **close)
    lengths = torch.tensor([600])
    for count in (1, 3):
        few, sums = attention_cached(q[:, -count:], k, v, lengths, return_lse=True, **PICK)
        torch.testing.assert_close(few, want[:, -count:], **close)
        torch.testing.assert_close(sums, lse[..., -count:], rtol=1e-4, atol=1e-4)
    halves = [
        softpick_attention(q[:, -1:], k[:, s], v[:, s], return_lse=True)
        for s in (slice(0, 200), slice(200, 600))
    ]
    merged, sums = merge_attention(*zip(*halves, strict=True))
    torch.testing.assert_close(merged, want[:, -1:], **close)
    torch.testing.assert_close(sums, lse[..., -1:], rtol=1e-4, atol=1e-4)


def test_nested_sequences_are_apart():
    ends, parts = torch.tensor([0, 7, 7, 20]), ((0, 7), (7, 20))
    rows = [t[0].requires_grad_() for t in inputs(20, 20, batch=1)]
    nested = [torch.nested.nested_tensor_from_jagged(t, ends) for t in rows]
    got = softpick_attention(*nested, causal=True)
    want = [softpick_attention(*(t[None, a:b] for t in rows), causal=True)[0] for a, b in parts]
    torch.testing.assert_close(got.values(), torch.cat(want))


def test_errors():
    q, k, v = inputs()
    with pytest.raises(
        TypeError, match=r"softpick_attention.* unexpected keyword argument 'sinks'"
    ):
        softpick_attention(q, k, v, sinks=torch.zeros(4))
    with pytest.raises(ValueError, match="sinks need softmax"):
        attention(q, k, v, normalizer="softpick", sinks=torch.zeros(4))
    _, lse = attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r"^attention_weights: normalizer must not be 'softpick'"):
        attention_weights(q, k, lse, normalizer="softpick")
