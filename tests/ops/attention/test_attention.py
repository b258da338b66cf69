"""attention: what the registry's generic properties do not cover."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attention_cases import (
    BF16,
    F16,
    F32,
    F64,
    OPTIONS,
    TOLERANCE,
    assert_matches_fp64,
    gradients,
    qkv,
)

from omniattn import reference
from omniattn.functional import attention, attention_weights, masks
from omniattn.reference.layers import philox
from omniattn.testing import isa, isas, poisoned_memory, threads


def torch_attention(q, k, v, bias, *, return_lse):
    """torch's own softmax, with as many key heads as query heads."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    top = s.detach().amax(-1, keepdim=True)  # the gradient of torch.logsumexp takes e^(s - lse)
    lse = (s - top).exp().sum(-1).log() + top[..., 0]
    return (torch.softmax(s, -1) @ v).transpose(1, 2), lse


@pytest.mark.parametrize("end", [-math.inf, -1.0, -0.3, -1e-8, -1e-29, 1e-29, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("sizes", [(2, 50, 300, 2, 2, 16), (2, 1, 300, 4, 4, 16)], ids=str)
def test_rows_at_the_ends_of_the_range_are_those_of_torch(sizes, dtype, end):
    """A bias of so many times the largest number on all keys of a row, and on some."""
    batch, tq, tk, heads = sizes[:4]
    bias = torch.zeros(batch, heads, tq, tk, dtype=dtype)
    bias[:1, :, :, : 7 if end == -math.inf else tk] = end * torch.finfo(dtype).max
    bias[1:, :, :, ::3] = end * torch.finfo(dtype).max
    inputs = [*qkv(*sizes, dtype=dtype), bias]
    for name in isas():
        with isa(name):
            got = gradients(attention, inputs)
            weights = attention_weights(*inputs[:2], got[1], bias=bias)
        for a, w in zip(got, gradients(torch_attention, inputs), strict=True):
            torch.testing.assert_close(a, w, rtol=0, atol=TOLERANCE[dtype] * max(1, w.abs().max()))
        want = reference.attention_weights(*inputs[:2], got[1], bias=bias)
        torch.testing.assert_close(weights, want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("queries", [1, 5, 50])
@pytest.mark.parametrize("keys,size", [(1, 1e3), (1, 1e6), (1, 1e20), (100, 1e3), (100, 1e6)])
def test_probabilities_of_large_logits_have_the_sum_1(queries, keys, size):
    """Keys are equal, so that every probability is 1 / keys. The backward computes them from lse,
    which holds neither the logits nor the sum to the last digit. Few queries take another path,
    which sums the logits in another order than the backward."""
    q, k, v = qkv(1, queries, keys, 2, 2, 16)
    k = k[:, :1].expand_as(k) * size
    for name in isas():
        with isa(name):
            (grad,) = torch.autograd.grad(attention(q, k, v.requires_grad_()).sum(), v)
        torch.testing.assert_close(grad, torch.full_like(v, queries / keys), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e6, 1e10, -1e10])
def test_rows_of_bf16_with_huge_logits_take_the_largest(scale):
    """A logit and the maximum must lose the same amount to rounding."""
    inputs = qkv(1, 130, 130, 2, 2, 64, dtype=BF16)
    q, k, v = (t.double().transpose(1, 2) for t in inputs)
    want = v.gather(2, (q @ k.mT * scale).argmax(-1, keepdim=True).expand_as(v)).transpose(1, 2)
    for name in isas():
        with isa(name):
            out, _, *grads = gradients(attention, inputs, scale=scale)
        assert torch.equal(out, want.to(BF16))
        assert all(t.isfinite().all() for t in grads)


@pytest.mark.parametrize("name", isas())
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_isa_matches_fp64(name, dtype, options):
    with isa(name):
        for shape in [(2, 63, 100, 4, 2, 40), (2, 100, 129, 2, 1, 65, 33), (2, 3, 130, 4, 2, 24)]:
            assert_matches_fp64(qkv(*shape, dtype=dtype), **options)


@pytest.mark.parametrize("tq", (1, 16, 17, 97))
@pytest.mark.parametrize("tk", (1, 15, 64, 65, 300))
def test_lengths_off_the_tile(tq, tk):
    assert_matches_fp64(qkv(1, tq, tk, 2, 1, 32))
    assert_matches_fp64(qkv(1, tq, tk, 2, 1, 32), causal=True)


@pytest.mark.parametrize("d,dv", [(1, 1), (3, 200), (8, 8), (100, 16), (192, 128), (256, 256)])
def test_head_sizes(d, dv):
    assert_matches_fp64(qkv(1, 33, 70, 2, 2, d, dv), causal=True)
    assert_matches_fp64(qkv(1, 2, 70, 2, 2, d, dv), causal=True)


BIAS_SHAPES = list(itertools.product((1, 2), (1, 4), (1, 70)))


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_bias_gradient_of_every_broadcast_shape(shape, dtype):
    b, h, t = shape
    bias = torch.randn(b, h, t, 130, dtype=F64).to(dtype)
    for causal in (True, False):  # a gradient that pairs do not share and all have is not filled
        with poisoned_memory():
            assert_matches_fp64([*qkv(2, 70, 130, 4, 2, 16, dtype=dtype), bias], causal=causal)


def test_bias_of_another_dtype_and_shape():
    q, k, v = qkv(2, 5, 9, 2, 2, 8, dtype=BF16)
    for shape in [(1, 1, 1, 9), (9,), (5, 9), (2, 5, 9), (2, 1, 5, 1)]:
        bias = torch.randn(shape, requires_grad=True)
        attention(q, k, v, bias=bias).sum().backward()
        assert bias.grad.shape == bias.shape and bias.grad.dtype == F32
    assert_matches_fp64([*qkv(2, 50, 70, 2, 2, 8, dtype=F64), torch.randn(2, 50, 70, dtype=F64)])


def test_minus_infinity_in_the_bias_hides_a_key():
    inputs = qkv(1, 40, 70, 2, 2, 16)
    bias = torch.zeros(1, 1, 40, 70).masked_fill(torch.rand(40, 70) < 0.5, -math.inf)
    bias[0, 0, 3] = -math.inf
    out, lse = attention(*inputs, bias=bias, return_lse=True)
    want = attention(*inputs, mask=bias.isfinite(), return_lse=True)
    torch.testing.assert_close((out, lse), want)
    assert (out[0, 3] == 0).all() and (lse[0, :, 3] == -math.inf).all()
    assert all(t.isfinite().all() for t in gradients(attention, [*inputs, bias])[2:])


@pytest.mark.parametrize("tq", [40, 2])
def test_masked_rows_give_zero_and_no_gradient(tq):
    inputs = qkv(1, tq, 70, 2, 1, 16)
    mask = torch.rand(1, 2, tq, 70) < 0.5
    mask[0, :, 1] = False
    out, lse, grad_q, grad_k, grad_v = gradients(attention, inputs, mask=mask)
    assert (out[0, 1] == 0).all() and (lse[0, :, 1] == -math.inf).all()
    assert (grad_q[0, 1] == 0).all()
    assert all(t.isfinite().all() for t in (grad_q, grad_k, grad_v))
    assert_matches_fp64(inputs, mask=mask)
    nothing = gradients(attention, inputs, mask=torch.zeros(1, 1, 1, 70, dtype=torch.bool))
    assert all((t == 0).all() for t in (nothing[0], *nothing[2:]))


@pytest.mark.parametrize("tq", [60, 1])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_hidden_keys_may_hold_nan(tq, softcap, dtype):
    q, k, v = qkv(2, tq, 200, 4, 2, 32, dtype=dtype)
    lengths = torch.tensor([50, 131])
    options = {"mask": masks.KeyLengths(lengths), "softcap": softcap}
    want = gradients(attention, [q, k, v], **options)
    for b, n in enumerate(lengths):
        k[b, n:], v[b, n:] = math.nan, math.nan
    got = gradients(attention, [q, k, v], **options)
    for a, w in zip(got, want, strict=True):
        torch.testing.assert_close(a, w, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "k", "bias", "sinks"])
@pytest.mark.parametrize("tq,tk", [(130, 300), (1, 3000), (3, 5)], ids=["tiles", "decode", "few"])
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16], ids=str)
def test_rows_whose_logits_are_not_numbers_have_an_lse_of_nan(bad, where, tq, tk, dtype):
    q, k, v = qkv(2, tq, tk, 2, 1, 16, dtype=dtype)
    q.abs_()  # so that inf in a key gives +inf
    bias, sinks = torch.zeros(2, 2, tq, tk, dtype=dtype), torch.zeros(2)
    {"q": q[1, -1, 1], "k": k[1, 2, 0], "bias": bias[1, 1, -1], "sinks": sinks}[where][1] = bad
    options = {"bias": bias, "sinks": sinks, "return_lse": True}
    out, lse = attention(q, k, v, **options)
    want, want_lse = reference.attention(q, k, v, **options)
    assert lse[1, 1, -1].isnan() and not lse[0, 0].isnan().any()
    assert torch.equal(lse.isnan(), want_lse.isnan())
    assert torch.equal(out.isnan(), want.isnan())
    hidden, lse = attention(q, k, v, mask=torch.zeros(1, 1, 1, tk, dtype=torch.bool), **options)
    if where != "sinks":
        assert (hidden == 0).all() and (lse == 0).all()


def test_masks_combine():
    q, k, v = qkv(2, 50, 90, 2, 2, 8)
    real = torch.rand(2, 90) < 0.8
    dense = torch.rand(1, 2, 50, 90) < 0.7
    combined = masks.Causal() & masks.KeyPadding(real) & masks.BoolMask(dense)
    want = attention(q, k, v, causal=True, mask=real[:, None, None] & dense)
    torch.testing.assert_close(attention(q, k, v, mask=combined), want)
    window = masks.SlidingWindow(9, 2)
    torch.testing.assert_close(
        attention(q, k, v, mask=window), attention(q, k, v, window_size=(9, 2))
    )
    torch.testing.assert_close(
        attention(q, k, v, mask=window, backend="reference"), attention(q, k, v, mask=window)
    )


def test_strides_are_read_in_place():
    packed = torch.randn(2, 65, 3, 4, 24).transpose(1, 3)  # last stride 1, odd order elsewhere
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    want = attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    torch.testing.assert_close(attention(q, k, v, causal=True), want, rtol=0, atol=0)
    shared = k[:, :, :1].expand(-1, -1, 4, -1)  # stride 0 over heads
    torch.testing.assert_close(
        attention(q, shared, v), attention(q, shared.contiguous(), v), rtol=0, atol=0
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_threads_do_not_change_a_bit(options):
    bias = torch.randn(1, 1, 200, 300)
    for inputs in [
        [*qkv(2, 200, 300, 4, 2, 32), bias],
        qkv(2, 200, 300, 4, 2, 32),
        qkv(2, 2, 900, 4, 2, 32),
    ]:
        results = []
        for count in (1, 2):
            with threads(count), poisoned_memory():
                results.append(gradients(attention, inputs, **options))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_dropout_mask_is_the_specified_one():
    b, h, tq, tk, p = 2, 3, 70, 150, 0.4
    seed = torch.tensor([123456789012, 5])
    q, k = torch.zeros(b, tq, h, 4), torch.zeros(b, tk, h, 4)
    v = torch.eye(tk).expand(b, h, tk, tk).transpose(1, 2)
    weights = attention(q, k, v, dropout_p=p, seed=seed).transpose(1, 2)
    keep = philox.attention_keep(b, h, tq, tk, p, seed)
    torch.testing.assert_close(weights, keep / (tk * (1 - p)))
    assert (attention(q, k, v, dropout_p=1.0, seed=seed) == 0).all()
    lse = attention(q, k, v, dropout_p=p, seed=seed, return_lse=True)[1]
    torch.testing.assert_close(lse, torch.full((b, h, tq), math.log(tk)))


def test_dropout_draws_from_the_generator_of_torch():
    q, k, v = qkv(1, 20, 20, 2, 2, 8)
    torch.manual_seed(3)
    first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "scale,softcap", [(1e38, 0), (1e-45, 0), (1, 1e-38), (1, 1e38), (-1e20, 1e-18)]
)
def test_extreme_factors_do_not_make_nan(scale, softcap):
    for tq in (1, 40):
        q, k, v = qkv(1, tq, 70, 1, 1, 4)
        out = attention(0 * q, k, v, scale=scale, softcap=softcap)
        torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out))


EMPTY = [
    (0, 3, 4, 2, 2, 8, 8),
    (2, 0, 4, 2, 2, 8, 8),
    (2, 3, 0, 2, 2, 8, 8),
    (2, 3, 4, 0, 0, 8, 8),
    (2, 3, 4, 2, 2, 0, 8),
    (2, 3, 4, 2, 2, 8, 0),
]


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_empty_dimensions(sizes):
    assert_matches_fp64(qkv(*sizes))
    assert_matches_fp64(qkv(*sizes), causal=True)
    assert_matches_fp64(qkv(*sizes), alibi_slopes=torch.ones(sizes[3]))


@pytest.mark.parametrize("sizes", [s for s in EMPTY if s[5] > 0], ids=str)
def test_bias_of_no_pair_has_no_gradient(sizes):
    tensors = qkv(*sizes)
    bias = torch.zeros(1, 1, 1, sizes[2], requires_grad=True)
    with poisoned_memory():
        attention(*tensors, bias=bias).sum().backward()
    assert bias.grad is not None and bool((bias.grad == 0).all())


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_many_heads_on_one_latent(dtype):
    """Absorbed MLA: few queries of more heads than a tile has rows; the merge is threaded too."""
    q, k, v = qkv(1, 1, 2100, 128, 1, 130, 256, dtype=dtype)
    results = []
    for count in (1, 2):
        with threads(count), poisoned_memory():
            results.append(attention(q, k, v, causal=True))
    assert torch.equal(*results)
    want = reference.attention(*(t.double() for t in (q, k, v)), causal=True)
    torch.testing.assert_close(results[0].double(), want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("heads", [33, 65])
@pytest.mark.parametrize("values", [slice(0, 70), slice(6, 100)], ids=str)
def test_values_inside_the_latent(heads, values, dtype):
    """Values that are the first columns of their keys are read once, others are not."""
    q, latent, _ = qkv(2, 1, 150, heads, 1, 100, 8, dtype=dtype)
    with poisoned_memory():
        out = attention(q, latent, latent[..., values])
    want = reference.attention(q.double(), latent.double(), latent[..., values].double())
    torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", isas())
def test_many_query_rows_of_a_kv_head(name):
    """Four queries of 8 heads on one kv head take register tiles in decoding."""
    inputs = [*qkv(1, 4, 150, 16, 2, 100, 70), torch.randn(1, 16, 4, 150)]
    with isa(name):
        for options in ({}, OPTIONS["all"]):
            assert_matches_fp64(inputs, **options)
