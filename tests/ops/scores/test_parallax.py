"""parallax_attention: the public formula, blocks of queries, a derivative of attention, errors."""

from itertools import pairwise

import pytest
import torch
from torch.func import jvp

from omniattn.compositions.attention import parallax
from omniattn.functional import attention, parallax_attention

F64 = torch.float64


def inputs(tq=20, tk=20, heads=4, kv_heads=2):
    make = torch.Generator().manual_seed(0)
    shapes = [(2, tq, heads, 8), (2, tq, heads, 8), (2, tk, kv_heads, 8), (2, tk, kv_heads, 6)]
    return [torch.randn(shape, generator=make, dtype=F64) for shape in shapes]


def sums(q, r, k, v, left=-1, causal=True):
    """As in fla/ops/parallax/naive.py of fla-org/flash-linear-attention at commit 012a873.

    Queries are the last ones, and the window has `left` keys before that of the query.
    """
    group, ahead = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    rows = []
    for i in range(q.shape[1]):
        low = max(0, i + ahead - left) if left >= 0 else 0
        seen = slice(low, i + ahead + 1 if causal else k.shape[1])
        keys, values = k[:, seen], v[:, seen]
        e = (torch.einsum("bhd,bjhd->bjh", q[:, i], keys) * q.shape[3] ** -0.5).exp()
        e2 = e * torch.einsum("bhd,bjhd->bjh", r[:, i], keys)
        d = e.sum(1)[..., None]
        one, two = (torch.einsum("bjh,bjhd->bhd", t, values) for t in (e, e2))
        rows.append(one / d * (1 + e2.sum(1)[..., None] / d) - two / d)
    return torch.stack(rows, 1)


def gradients(function, given):
    leaves = [t.clone().requires_grad_() for t in given]
    out = function(*leaves)
    weight = torch.arange(out.numel(), dtype=F64).cos().view_as(out)
    return [out, *torch.autograd.grad(out, leaves, weight)]


SIZES = [{}, {"tk": 33}, {"kv_heads": 4}, {"tq": 1, "tk": 9}, {"tq": 150, "tk": 170}]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("left", "causal"), [(-1, True), (-1, False), (4, True), (0, True), (90, True)]
)
def test_the_definition(left, causal, sizes):
    given = inputs(**sizes)
    window = (left, 0 if causal else -1)

    def call(*t):
        return parallax_attention(*t, causal=causal, window_size=window)

    got = gradients(call, given)
    want = gradients(lambda *t: sums(*t, left, causal), given)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("logits", [1, 500, 1 << 19])
@pytest.mark.parametrize("right", [-1, 0, 3])
def test_blocks_of_the_composition(right, logits, monkeypatch):
    """Devices without kernels run it, with blocks of this many logits."""
    monkeypatch.setattr(parallax, "_LOGITS", logits)
    given, rest = inputs(tk=33), (None, 9, right, 0.3)
    options = {"causal": False, "window_size": (9, right), "scale": 0.3}
    want = gradients(lambda *t: parallax_attention(*t, **options), given)
    out = parallax._forward(*given, *rest)
    weight = torch.arange(out.numel(), dtype=F64).cos().view_as(out)
    torch.testing.assert_close([out, *parallax._backward(weight, *given, *rest)], want)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (2, 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_attention_minus_its_derivative(causal, window, backend):
    q, r, k, v = inputs(tk=27)
    options = {"causal": causal, "window_size": window, "scale": 0.3}
    out, along = jvp(lambda q: attention(q, k, v, backend="reference", **options), (q,), (r,))
    got = parallax_attention(q, r, k, v, backend=backend, **options)
    torch.testing.assert_close(got, out - along / 0.3)


def test_packed_sequences_are_apart():
    q, r, k, v = (t[:1] for t in inputs())
    ends = [0, 7, 7, 12, 20]
    for options in ({}, {"window_size": (2, 0)}, {"causal": False}):
        parts = [
            parallax_attention(*(t[:, a:b] for t in (q, r, k, v)), **options)
            for a, b in pairwise(ends)
        ]
        packed = parallax_attention(q, r, k, v, cu_seqlens=torch.tensor(ends), **options)
        torch.testing.assert_close(packed, torch.cat(parts, 1))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_rows_without_keys_are_zero(backend):
    got = gradients(lambda *t: parallax_attention(*t, backend=backend), inputs(tq=20, tk=13))
    assert not got[0][:, :7].any()
    assert not got[1][:, :7].any()
    assert not got[2][:, :7].any()
    assert all(t.isfinite().all() for t in got)


def test_errors():
    q, r, k, v = inputs()
    with pytest.raises(ValueError, match=r"r must have shape \(2, 20, 4, 8\), got .*\(2, 19, 4, 8"):
        parallax_attention(q, r[:, 1:], k, v)
    with pytest.raises(TypeError, match=r"parallax_attention: r must .*r.dtype=torch.float32"):
        parallax_attention(q, r.float(), k, v)
    with pytest.raises(ValueError, match=r"window_size must be two ints .*\(-2, 0\)"):
        parallax_attention(q, r, k, v, window_size=(-2, 0))
    with pytest.raises(ValueError, match="Tq must be Tk with cu_seqlens, got Tq=1, Tk=20"):
        parallax_attention(
            *(t[:1] for t in (q[:, :1], r[:, :1], k, v)), cu_seqlens=q.new_zeros(1).int()
        )
