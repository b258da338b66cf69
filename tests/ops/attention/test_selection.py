"""select_attention: ties, thresholds, energies, straight-through gradients, wrong arguments."""

from __future__ import annotations

import math

import pytest
import torch

from omniattn.functional import attention, masks, select_attention

F64 = torch.float64


def qkv(tq=70, tk=300, heads=4, kv_heads=2, dtype=F64):
    make = torch.Generator().manual_seed(0)
    shapes = ((2, tq, heads, 8), (2, tk, kv_heads, 8), (2, tk, kv_heads, 5))
    return [torch.randn(s, generator=make, dtype=F64).to(dtype) for s in shapes]


@pytest.mark.parametrize("energy", ["l2", "dot"])
def test_the_nearest_key_answers(energy):
    q, k, v = qkv()
    wide_k, wide_v = (t.repeat_interleave(2, 2) for t in (k, v))
    difference = q[:, :, None] - wide_k[:, None]
    energies = difference.square().sum(-1) / 2
    if energy == "dot":
        energies = -torch.einsum("bihd,bjhd->bijh", q, wide_k)
    energies = energies / math.sqrt(8)
    least, index = energies.min(2)
    want = wide_v.gather(1, index[..., None].expand(-1, -1, -1, 5))
    torch.testing.assert_close(select_attention(q, k, v, energy=energy), want)
    theta = least.median().item() + 1e-9
    answered = (least <= theta)[..., None]
    got = select_attention(q, k, v, energy=energy, theta=theta)
    torch.testing.assert_close(got, want * answered)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
def test_the_first_of_equal_keys_answers(dtype):
    q, k, v = qkv(dtype=dtype)
    at = [200, 5, 77, 131]
    for energy in ("l2", "dot"):
        k[:, at] = 100 * q[:, :1, ::2] if energy == "dot" else q[:, :1, ::2]
        out = select_attention(q[:, :1], k, v, energy=energy)
        assert torch.equal(out[:, :, ::2], v[:, 5:6])
        seen = masks.SlidingWindow(200, 0) & masks.Causal()
        out = select_attention(q[:, :1], k, v, energy=energy, mask=seen)  # keys from 99 on
        assert torch.equal(out[:, :, ::2], v[:, 131:132])


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("energy", ["l2", "dot"])
def test_energies_without_rounding_are_compared_without(energy, dtype):
    """Inputs are small integers: all energies are exact, many are equal, and theta is one of
    them."""
    make = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-3, 4, (1, t, 1, 64), generator=make).to(dtype) for t in (100, 500))
    v = torch.stack((torch.arange(500) // 100, torch.arange(500) % 100), -1)[None, :, None]
    energies = -torch.einsum("bihd,bjhd->ij", q.double(), k.double())
    if energy == "l2":
        energies = (q.double() - k[0, :, 0].double()).square().sum(-1)[0] / 2
    least = energies.amin(-1)
    first = (energies == least[:, None]).int().argmax(-1)
    theta = least.sort().values[50].item()
    got = select_attention(q, k, v.to(dtype), energy=energy, scale=1.0, theta=theta)
    assert torch.equal(got[0, :, 0], v[0, first, 0].to(dtype) * (least <= theta)[:, None])


def test_the_gradient_of_half_keys_is_rounded_once():
    def gradient(dtype):
        q, k, v = ((t + 4).bfloat16().to(dtype) for t in qkv(tk=70))
        k.requires_grad_()
        return torch.autograd.grad(select_attention(q, k, v, energy="l2").sum(), k)[0].double()

    want = gradient(F64)
    floor = 1e-5 * want.abs().max().item()
    torch.testing.assert_close(gradient(torch.bfloat16), want, rtol=2**-8, atol=floor)


def test_gradients_are_those_of_the_soft_choice_and_of_the_chosen_value():
    leaves = [t.requires_grad_() for t in qkv()]
    q, k, v = leaves
    weight = torch.linspace(-1, 1, 2 * 70 * 4 * 5, dtype=F64).view(2, 70, 4, 5)
    got = torch.autograd.grad(select_attention(q, k, v, energy="dot", tau=0.5), leaves, weight)
    soft = attention(q, k, v, scale=2 / math.sqrt(8))
    want = torch.autograd.grad(soft, leaves, weight)
    for a, w in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(a, w)
    torch.testing.assert_close(got[2].sum((1, 2)), weight.sum((1, 2)))
    out = select_attention(q, k, v, ste=False)
    assert torch.autograd.grad(out, leaves, weight, allow_unused=True)[:2] == (None, None)


def test_gradients_of_a_batch_are_those_of_each():
    q, k, v = (torch.stack((t, -t)).requires_grad_() for t in qkv(5, 6))
    each = torch.stack([select_attention(q[i], k[i], v[i]) for i in range(2)])
    want = torch.autograd.grad(each.sum(), (q, k, v))
    together = torch.func.vmap(select_attention)(q, k, v)
    torch.testing.assert_close(torch.autograd.grad(together.sum(), (q, k, v)), want)


def test_a_query_without_an_answer_gives_nothing():
    leaves = [t.requires_grad_() for t in qkv(5, 3)]
    out = select_attention(*leaves, causal=True)
    assert (out[:, :2] == 0).all() and (out[:, 2:] != 0).all()
    for grad in torch.autograd.grad(select_attention(*leaves, theta=-1.0).sum(), leaves):
        assert (grad == 0).all()


WRONG = [
    ({"energy": "cosine"}, "energy must be .* got energy='cosine'"),
    ({"tau": 0.0}, "tau must be a finite number > 0"),
    ({"theta": math.nan}, "theta must be a finite number"),
    ({"scale": math.inf}, "scale must be a finite number"),
    ({"window_size": (-2, 0)}, "window_size must be"),
]


@pytest.mark.parametrize("options,message", WRONG)
def test_errors_name_argument_and_value(options, message):
    with pytest.raises(ValueError, match="select_attention: " + message):
        select_attention(*qkv(3, 3), **options)


def test_ste_is_a_bool():
    with pytest.raises(TypeError, match="select_attention: ste must be True or False"):
        select_attention(*qkv(3, 3), ste="no")
