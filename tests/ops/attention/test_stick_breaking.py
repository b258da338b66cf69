"""stick_breaking_attention: the public formula, large logits, NaN, nested and cached sequences."""

import math

import pytest
import torch
from torch.nn import functional as F

from omniattn.functional import (
    attention,
    attention_cached,
    attention_varlen,
    attention_weights,
    masks,
    stick_breaking_attention,
)

F64 = torch.float64
STICK = {"causal": True, "normalizer": "stick_breaking"}


def inputs(tq=20, tk=20, heads=4, kv_heads=2, batch=2, scale=1.0, dtype=F64):
    make = torch.Generator().manual_seed(0)
    shapes = ((batch, tq, heads, 8), (batch, tk, kv_heads, 8), (batch, tk, kv_heads, 5))
    q, k, v = (torch.randn(shape, generator=make, dtype=F64) for shape in shapes)
    return [t.to(dtype) for t in (scale * q, k, v)]


def by_pairs(q, k, v, attend_current=False):
    """`stickbreaking` in stickbreaking_attention/sb_ref.py of shawntan/stickbreaking-attention at
    commit ea69b8d, stated again: the sum of later log(1 - beta) by a triangular matrix."""
    group, tq, tk = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.ones(tq, tk).triu(tk - tq + attend_current).bool()
    left = F.logsigmoid(-logits).masked_fill(hidden, 0)
    later = left @ torch.ones(tk, tk, dtype=q.dtype).tril(-1)
    weights = (F.logsigmoid(logits) + later).exp().masked_fill(hidden, 0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), 1 - weights.sum(-1)


def gradients(f, tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, remainder = f(*leaves)
    loss = (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum()
    loss = loss + (remainder * torch.linspace(1, 2, remainder.shape[-1])).sum()
    return out.detach(), remainder.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("sizes", [(150, 150), (3, 300), (2, 2), (1, 1)])
def test_the_public_formula(sizes, current, backend):
    options = {"attend_current": current, "return_remainder": True, "backend": backend}
    got = gradients(lambda *t: stick_breaking_attention(*t, **options), inputs(*sizes))
    want = gradients(lambda *t: by_pairs(*t, current), inputs(*sizes))
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 30.0, 3e3])
def test_large_logits(scale):
    """Logits of up to 1e4; sums of ln(1 - beta) reach 1e6, next to differences of less than 1."""
    given = inputs(400, 400, batch=1, scale=scale, dtype=torch.float32)
    options = {"return_remainder": True}
    wide = [t.double() for t in given]
    got = gradients(lambda *t: stick_breaking_attention(*t, **options), given)
    again = gradients(lambda *t: stick_breaking_attention(*t, **options), given)
    want = gradients(lambda *t: stick_breaking_attention(*t, **options), wide)
    for n, (mine, other, same) in enumerate(zip(got, want, again, strict=True)):
        assert torch.equal(mine, same)
        bound = (1e-6 if n < 2 else 1e-5) * scale
        torch.testing.assert_close(mine.double(), other, rtol=bound, atol=bound)


def test_masks_and_windows_hide_keys_from_the_stick():
    q, k, v = inputs(9, 12)
    mask = torch.rand(2, 1, 9, 12, generator=torch.Generator().manual_seed(1)) < 0.5
    place = torch.arange(12) - torch.arange(9)[:, None] - 3
    seen = mask & (place < 0) & (place >= -5)
    want = attention(q, k, v, mask=seen, normalizer="stick_breaking")
    got = stick_breaking_attention(q, k, v, window_size=(5, 0), mask=mask)
    torch.testing.assert_close(got, want)
    got = stick_breaking_attention(q, k, v, window_size=(5, 0), mask=masks.BoolMask(mask))
    torch.testing.assert_close(got, want)
    by_function = stick_breaking_attention(q, k, v, mask=lambda b, h, q, k: k % 2 == 0)
    even = (torch.arange(12) % 2 == 0) & (place < 0)
    want = attention(q, k, v, mask=even, normalizer="stick_breaking")
    torch.testing.assert_close(by_function, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_in_its_row(dtype):
    q, k, v = inputs(300, 300, dtype=dtype)
    want = stick_breaking_attention(q, k, v)
    q[0, 150, 1] = math.nan
    got = stick_breaking_attention(q, k, v)
    assert got[0, 150, 1].isnan().all()
    got[0, 150, 1] = want[0, 150, 1] = 0
    assert torch.equal(got, want)


def test_rows_without_keys():
    q, k, v = inputs(5, 3)
    out, remainder = stick_breaking_attention(q, k, v, return_remainder=True)
    assert (out[:, :3] == 0).all() and (remainder[..., :3] == 1).all()
    assert stick_breaking_attention(q[:, :0], k, v).shape == (2, 0, 4, 5)


@pytest.mark.parametrize("current", [False, True])
def test_nested_sequences_are_apart(current):
    ends, parts = torch.tensor([0, 7, 7, 20]), ((0, 7), (7, 20))
    rows = [t[0].requires_grad_() for t in inputs(20, 20, batch=1)]
    nested = [torch.nested.nested_tensor_from_jagged(t, ends) for t in rows]
    options = {"attend_current": current, "return_remainder": True}
    got, left = stick_breaking_attention(*nested, **options)
    alone = [stick_breaking_attention(*(t[None, a:b] for t in rows), **options) for a, b in parts]
    want = torch.cat([out[0] for out, _ in alone])
    torch.testing.assert_close(got.values(), want)
    torch.testing.assert_close(left.transpose(1, 2).values(), torch.cat([r[0].T for _, r in alone]))
    grads = torch.autograd.grad(got.values().square().sum(), rows)
    for grad, expected in zip(grads, torch.autograd.grad(want.square().sum(), rows), strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_packed_and_cached_calls(dtype):
    q, k, v = inputs(600, 600, batch=1, dtype=dtype)
    want, left = attention(q, k, v, return_lse=True, **STICK)
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(
        left.exp(),
        by_pairs(q.double(), k.double(), v.double(), True)[1].to(left.dtype),
        rtol=1e-4,
        atol=1e-4,
    )
    ends = torch.tensor([0, 600])
    packed = attention_varlen(q[0], k[0], v[0], ends, ends, **STICK)
    torch.testing.assert_close(packed, want[0], **close)
    lengths = torch.tensor([600])
    for count in (1, 3):
        few, lse = attention_cached(q[:, -count:], k, v, lengths, return_lse=True, **STICK)
        torch.testing.assert_close(few, want[:, -count:], **close)
        torch.testing.assert_close(lse, left[..., -count:], rtol=1e-4, atol=1e-4)


def test_errors():
    q, k, v = inputs()
    name = "stick_breaking_attention"
    with pytest.raises(TypeError, match=f"^{name}: attend_current must be"):
        stick_breaking_attention(q, k, v, attend_current=1)
    with pytest.raises(TypeError, match=f"^{name}: return_remainder must be"):
        stick_breaking_attention(q, k, v, return_remainder=1)
    with pytest.raises(TypeError, match=rf"{name}.* unexpected keyword argument 'bias'"):
        stick_breaking_attention(q, k, v, bias=q)
    with pytest.raises(ValueError, match="sinks need softmax"):
        attention(q, k, v, normalizer="stick_breaking", sinks=torch.zeros(4))
    _, lse = attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r"^attention_weights: normalizer must not be"):
        attention_weights(q, k, lse, normalizer="stick_breaking")
