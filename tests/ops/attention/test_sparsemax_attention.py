"""sparsemax_attention: the projection by sorting, entmax, limits, decoding, sequences, errors."""

import math

import pytest
import torch

from omniattn.compat.liger import liger_sparsemax
from omniattn.functional import attention, sparsemax_attention

F64 = torch.float64


def inputs(tq=20, tk=20, heads=4, kv_heads=2, batch=2, scale=1.0, dtype=F64):
    make = torch.Generator().manual_seed(0)
    shapes = ((batch, tq, heads, 8), (batch, tk, kv_heads, 8), (batch, tk, kv_heads, 5))
    q, k, v = (torch.randn(shape, generator=make, dtype=F64) for shape in shapes)
    return [t.to(dtype) for t in (scale * q, k, v)]


def by_sorting(z):
    """The closed form of section 2.2 of arXiv 1602.02068: sorts the logits."""
    ordered, sums = z.sort(-1, descending=True).values, None
    sums = ordered.cumsum(-1)
    count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    support = (1 + count * ordered > sums).sum(-1, keepdim=True)
    tau = (sums.gather(-1, support - 1) - 1) / support
    return torch.relu(z - tau)


def by_sorting_15(z):
    """1.5-entmax by sorting, algorithm 2 of arXiv 1905.05702."""
    z = z / 2
    ordered = z.sort(-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    mean = ordered.cumsum(-1) / count
    spread = ordered.square().cumsum(-1) - count * mean.square()
    tau = mean - ((1 - spread) / count).clamp(min=0).sqrt()
    support = (tau <= ordered).sum(-1, keepdim=True)
    return torch.relu(z - tau.gather(-1, support - 1)).square()


def by_pairs(q, k, v, weigh):
    """Weights of each row by itself, so that hidden keys are left out and not masked."""
    group, tq, tk = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    z = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    rows = []
    for i in range(tq):
        seen = i + tk - tq + 1
        rows.append(torch.einsum("bhj,bjhd->bhd", weigh(z[:, :, i, :seen]), v[:, :seen]))
    return torch.stack(rows, 1)


def gradients(f, tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = f(*leaves)
    loss = (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum()
    return out.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("sizes", [(90, 90), (3, 200), (1, 1)])
@pytest.mark.parametrize(("alpha", "weigh"), [(2, by_sorting), (1.5, by_sorting_15)])
def test_the_definition(alpha, weigh, sizes, backend):
    options = {"alpha": alpha, "causal": True, "backend": backend}
    got = gradients(lambda *t: sparsemax_attention(*t, **options), inputs(*sizes, scale=3.0))
    want = gradients(lambda *t: by_pairs(*t, weigh), inputs(*sizes, scale=3.0))
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_weights_are_those_of_liger():
    q, k, _ = inputs(20, 30, kv_heads=4)
    values = torch.eye(30, dtype=F64)[None, :, None].expand(2, -1, 4, -1)
    z = torch.einsum("bihd,bjhd->bihj", q, k) / math.sqrt(8)
    torch.testing.assert_close(sparsemax_attention(q, k, values), liger_sparsemax(z))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
def test_weights_sum_to_one(alpha, scale):
    q, k, _ = inputs(9, 3000, 2, 2, 1, scale, torch.float32)
    out = sparsemax_attention(q, k, torch.ones(1, 3000, 2, 1), alpha=alpha)
    torch.testing.assert_close(out, torch.ones(1, 9, 2, 1), rtol=0, atol=2e-5)


@pytest.mark.parametrize("alpha", [1.1, 1.3, 1.7])
def test_a_threshold_for_each_row(alpha):
    """The condition that determines the weights, with their sum."""
    q, k, _ = inputs(9, 30, 4, 4, scale=3.0)
    values = torch.eye(30, dtype=F64)[None, :, None].expand(2, -1, 4, -1)
    weights = sparsemax_attention(q, k, values, alpha=alpha)
    z = (alpha - 1) * torch.einsum("bihd,bjhd->bihj", q, k) / math.sqrt(8)
    support, tau = weights > 0, z - weights.pow(alpha - 1)
    row = tau.masked_fill(~support, -math.inf).amax(-1, keepdim=True)
    torch.testing.assert_close(tau, torch.where(support, row, z), rtol=1e-6, atol=1e-6)
    assert (z.masked_fill(support, -math.inf) <= row + 1e-6).all() and not support.all()


def test_alpha_to_one_is_softmax():
    given = inputs()
    want = attention(*given, causal=True)
    errors = [
        (sparsemax_attention(*given, alpha=alpha, causal=True) - want).norm()
        for alpha in (1.4, 1.2, 1.1)
    ]
    assert errors[0] > 1.5 * errors[1] > 1.5 * 1.5 * errors[2]


def test_steps_equal_the_whole():
    q, k, v = inputs()
    want = sparsemax_attention(q, k, v, causal=True)
    steps = [
        sparsemax_attention(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], causal=True)
        for t in range(20)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), want)


def test_packed_and_nested_sequences_are_apart():
    ends, parts = torch.tensor([0, 7, 7, 20]), ((0, 7), (7, 20))
    rows = inputs(20, 20, batch=1)
    packed = sparsemax_attention(*rows, causal=True, cu_seqlens=ends)
    alone = [sparsemax_attention(*(t[:, a:b] for t in rows), causal=True) for a, b in parts]
    torch.testing.assert_close(packed, torch.cat(alone, 1))
    nested = [torch.nested.nested_tensor_from_jagged(t[0], ends) for t in rows]
    torch.testing.assert_close(sparsemax_attention(*nested, causal=True).values(), packed[0])


def test_nan_stays_in_its_row():
    q, k, v = inputs(dtype=torch.float32)
    want = sparsemax_attention(q, k, v, causal=True)
    q[0, 15, 1] = math.nan
    got = sparsemax_attention(q, k, v, causal=True)
    assert got[0, 15, 1].isnan().all()
    got[0, 15, 1] = want[0, 15, 1] = 0
    torch.testing.assert_close(got, want)


def test_errors():
    q, k, v = inputs()
    for alpha in (1.0, 2.5, math.nan):
        with pytest.raises(ValueError, match=r"^sparsemax_attention: alpha must be"):
            sparsemax_attention(q, k, v, alpha=alpha)
    ends = torch.tensor([0, 20])
    with pytest.raises(ValueError, match=r"cu_seqlens must have shape \(N \+ 1,\), and q B = 1"):
        sparsemax_attention(q, k, v, cu_seqlens=ends)
    with pytest.raises(ValueError, match="Tq must be Tk with cu_seqlens"):
        sparsemax_attention(q[:1, :5], k[:1], v[:1], cu_seqlens=ends)
