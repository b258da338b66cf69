"""The references against torch, Hugging Face and published known answers."""

import math

import pytest
import torch
import torch.nn.functional as F

from omniattn import reference
from omniattn.reference.layers import philox


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    words = philox.philox4x32(
        tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key)
    )
    assert tuple(int(w) for w in words) == expected


def test_philox_masks_depend_on_position_only():
    seed = torch.tensor([-5, 3])
    whole = philox.attention_keep(2, 3, 9, 13, 0.3, seed)
    assert torch.equal(whole[:, :, :4, :6], philox.attention_keep(2, 3, 4, 6, 0.3, seed))
    assert 0.6 < whole.double().mean() < 0.8
    assert not philox.elementwise_keep(torch.Size([5]), 1.0, seed).any()
    assert philox.elementwise_keep(torch.Size([5]), 0.0, seed).all()
    assert philox.uniform(1001, seed).min() >= 0
    assert philox.uniform(1001, seed).max() < 1


@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_torch(causal):
    q, k, v = randn(2, 7, 4, 5), randn(2, 7, 2, 5), randn(2, 7, 2, 3)
    bias = randn(1, 4, 7, 7)
    out, lse = reference.attention(q, k, v, causal=causal, bias=bias, return_lse=True)
    allowed = torch.ones(7, 7).tril().log() if causal else torch.zeros(7, 7)
    expected = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), bias + allowed, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / math.sqrt(5)
    torch.testing.assert_close(lse, (scores + bias + allowed).logsumexp(-1))
    grad = torch.randn_like(out)
    for a, e in zip(
        torch.autograd.grad(out, (q, k, v, bias), grad),
        torch.autograd.grad(expected, (q, k, v, bias), grad),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


def test_attention_of_a_row_without_keys_is_zero_with_zero_gradients():
    q, k, v = randn(1, 4, 1, 2), randn(1, 2, 1, 2), randn(1, 2, 1, 2)
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :2] == 0).all()
    assert (lse[..., :2] == -math.inf).all()
    grads = torch.autograd.grad(out.sum() + lse[..., 2:].sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :2] == 0).all()
    assert reference.attention(q, k[:, :0], v[:, :0]).eq(0).all()


def test_attention_window_softcap_and_dropout():
    q, k, v = randn(1, 5, 1, 2), randn(1, 8, 1, 2), randn(1, 8, 1, 2)
    position = torch.arange(5)[:, None] + 3
    mask = (torch.arange(8) >= position - 2) & (torch.arange(8) <= position + 1)
    options = {"softcap": 0.5, "dropout_p": 0.4, "seed": torch.tensor([7, 1])}
    torch.testing.assert_close(
        reference.attention(q, k, v, window_size=(2, 1), **options),
        reference.attention(q, k, v, mask=mask, **options),
    )
    scores = 0.5 * torch.tanh((q[0, :, 0] @ k[0, :, 0].T) / math.sqrt(2) / 0.5)
    p = scores.masked_fill(~mask, -math.inf).softmax(-1)
    keep = philox.attention_keep(1, 1, 5, 8, 0.4, options["seed"])[0, 0]
    torch.testing.assert_close(
        reference.attention(q, k, v, window_size=(2, 1), **options)[0, :, 0],
        (p * keep / 0.6) @ v[0, :, 0],
    )


def test_sdpa_aligns_causal_top_left_like_torch():
    q, k, v = randn(1, 2, 3, 4), randn(1, 2, 5, 4), randn(1, 2, 5, 4)
    torch.testing.assert_close(
        reference.scaled_dot_product_attention(q, k, v, is_causal=True),
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )


def test_norms_equal_torch():
    x, w, b, r = randn(3, 5), randn(5), randn(5), randn(3, 5)
    torch.testing.assert_close(reference.rms_norm(x, w), F.rms_norm(x, (5,), w, 1e-6))
    torch.testing.assert_close(reference.layer_norm(x, w, b), F.layer_norm(x, (5,), w, b))
    torch.testing.assert_close(
        reference.rms_norm(x, w, offset=1.0), F.rms_norm(x, (5,), 1 + w, 1e-6)
    )
    y, h = reference.rms_norm(x.bfloat16(), w.bfloat16(), residual=r.bfloat16())
    torch.testing.assert_close(h, x.bfloat16() + r.bfloat16())
    torch.testing.assert_close(y, reference.rms_norm(h, w.bfloat16()))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_depends_on_relative_position_only(interleaved):
    theta = reference.rope_frequencies(6)
    q, k = randn(1, 1, 1, 8), randn(1, 1, 1, 8)

    def score(m: int, n: int) -> torch.Tensor:
        tables = zip(
            *(reference.rotary_tables(theta, torch.tensor([p]), torch.float64) for p in (m, n)),
            strict=True,
        )
        cos, sin = (torch.stack(pair) for pair in tables)  # a batch of the two positions
        rotated = reference.apply_rotary(
            q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), cos, sin, interleaved=interleaved
        )
        return (rotated[0][0] * rotated[1][1]).sum()

    torch.testing.assert_close(score(3, 1), score(100003, 100001))
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_rotary_worked_number_and_layouts():
    cos, sin = torch.tensor([[math.cos(2.0)]]), torch.tensor([[math.sin(2.0)]])
    x = torch.tensor([0.5, 0.8]).view(1, 1, 1, 2)
    for interleaved in (False, True):
        q, _ = reference.apply_rotary(x, x, cos, sin, interleaved=interleaved)
        torch.testing.assert_close(q.flatten(), torch.tensor([-0.9355, 0.1217]), atol=1e-4, rtol=0)
    copy = x.clone()
    assert reference.apply_rotary(copy, x.clone(), cos, sin, inplace=True)[0] is copy
    torch.testing.assert_close(copy, q)


def test_glu_family():
    g, u = randn(3, 4), randn(3, 4)
    packed = torch.cat([g, u], -1)
    for op, act in [
        (reference.swiglu, F.silu),
        (reference.geglu, F.gelu),
        (reference.reglu, F.relu),
        (reference.bilinear, lambda x: x),
    ]:
        torch.testing.assert_close(op(g, u), act(g) * u)
        torch.testing.assert_close(op(packed), act(g) * u)
    torch.testing.assert_close(
        reference.geglu(g, u, approximate="tanh"), F.gelu(g, approximate="tanh") * u
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_equals_torch(reduction):
    x, w, b = randn(6, 3), randn(9, 3), randn(9)
    target = torch.tensor([0, 8, -100, 3, 3, -100])
    expected = F.cross_entropy(F.linear(x, w, b), target, label_smoothing=0.1, reduction=reduction)
    actual = reference.linear_cross_entropy(
        x, w, target, bias=b, label_smoothing=0.1, reduction=reduction
    )
    torch.testing.assert_close(actual, expected)
    nothing = torch.full_like(target, -100)
    assert reference.cross_entropy(F.linear(x, w), nothing, z_loss=1e-3).sum() == 0


def test_half_inputs_round_once():
    x, w = torch.randn(64, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    exact = x.double() @ w.double().T
    torch.testing.assert_close(reference.linear(x, w), exact.bfloat16(), rtol=2**-8, atol=2**-12)
    assert reference.linear_cross_entropy(x, w, torch.zeros(64).long()).dtype == torch.float32
