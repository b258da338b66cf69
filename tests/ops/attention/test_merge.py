"""merge_attention and attention_weights: attention put together from parts, and taken apart."""

from __future__ import annotations

import itertools

import pytest
import torch

from omniattn.functional import attention, attention_weights, masks, merge_attention

F64 = torch.float64


def qkv(tq=20, tk=90, heads=4):
    make = torch.Generator().manual_seed(0)
    shapes = ((2, tq, heads, 16), (2, tk, 2, 16), (2, tk, 2, 8))
    return [torch.randn(s, generator=make, dtype=F64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("cuts", [[0, 90], [0, 30, 90], [0, 1, 2, 60, 90]], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_parts_of_the_keys_merge_exactly(cuts, with_sinks):
    q, k, v = qkv()
    sinks = torch.linspace(-1, 2, 4, dtype=F64).requires_grad_() if with_sinks else None
    seen = masks.SlidingWindow(40, 0).dense(20, 90)
    seen[3] = False
    parts = [slice(*cut) for cut in itertools.pairwise(cuts)]
    each = [
        attention(q, k[:, s], v[:, s], mask=seen[:, s].contiguous(), return_lse=True) for s in parts
    ]
    got = merge_attention(*zip(*each, strict=True), sinks=sinks)
    want = attention(q, k, v, mask=seen, sinks=sinks, return_lse=True)
    torch.testing.assert_close(got, want)
    leaves = [t for t in (q, k, v, sinks) if t is not None]

    def loss(out, lse):
        return (out * torch.arange(8)).sum() + lse[lse.isfinite()].square().sum()

    grads = [torch.autograd.grad(loss(*x), leaves) for x in (got, want)]
    torch.testing.assert_close(*grads)


def test_merge_derivatives():
    outs = [torch.randn(1, 2, 2, 3, dtype=F64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 2, dtype=F64, requires_grad=True) for _ in range(3)]

    def call(*tensors):
        return merge_attention(tensors[:3], tensors[3:])

    assert torch.autograd.gradcheck(call, (*outs, *lses))
    assert torch.autograd.gradgradcheck(call, (*outs, *lses))


def test_wrong_parts():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 2)
    with pytest.raises(ValueError, match=r"same length >= 1, got len\(outs\)=0, len\(lses\)=0"):
        merge_attention([], [])
    with pytest.raises(ValueError, match=r"lse.shape=\(1, 2, 3\)"):
        merge_attention([out], [lse.transpose(1, 2)])
    with pytest.raises(ValueError, match=r"sinks must have shape \(3,\)"):
        merge_attention([out], [lse], sinks=torch.zeros(2))


OPTIONS = {
    "causal": {"causal": True},
    "slopes": {"alibi_slopes": torch.rand(4, dtype=F64), "softcap": 4.0},
    "documents": {"mask": masks.Documents(torch.arange(20) // 7, torch.arange(90) // 30)},
    "sinks": {"sinks": torch.randn(4, dtype=F64), "head_scale": torch.rand(4, dtype=F64)},
    "sigmoid": {"normalizer": "sigmoid"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_weights_times_values_are_the_output(options):
    q, k, v = (t.detach() for t in qkv())
    softmax = options.get("normalizer", "softmax") == "softmax"
    if softmax:
        out, lse = attention(q, k, v, return_lse=True, **options)
    else:
        out, lse = attention(q, k, v, **options), torch.zeros(2, 4, 20, dtype=F64)
    weights = attention_weights(q, k, lse, **options)
    values = v.transpose(1, 2).repeat_interleave(2, 1)
    torch.testing.assert_close((weights @ values).transpose(1, 2), out)
    of_groups = weights.unflatten(1, (2, 2)).sum(2)
    for want, sums in (
        (weights.sum(2), {"column_sums": True}),
        (of_groups, {"group_sums": True}),
        (of_groups.sum(2), {"column_sums": True, "group_sums": True}),
    ):
        torch.testing.assert_close(attention_weights(q, k, lse, **sums, **options), want)


def test_weights_are_of_the_call_they_came_from():
    q, k, _ = (t.detach() for t in qkv())
    with pytest.raises(ValueError, match=r"lse must have shape \(2, 4, 20\)"):
        attention_weights(q, k, torch.zeros(2, 20, 4, dtype=F64))
    with pytest.raises(TypeError, match=r"lse must be torch\.float64"):
        attention_weights(q, k, torch.zeros(2, 4, 20))
