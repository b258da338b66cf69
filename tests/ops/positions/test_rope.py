"""Tests of apply_rotary beyond its spec: positions, in-place calls, derivatives, bad input."""

import pytest
import torch

import omniattn.functional as F
from omniattn import reference, testing

THETA = F.rope_frequencies(6)
COS, SIN = F.rotary_tables(THETA, torch.arange(9))


def qk(*, grad=False, dtype=torch.float32):
    q, k = torch.randn(2, 5, 3, 8, dtype=dtype), torch.randn(2, 5, 1, 8, dtype=dtype)
    return q.requires_grad_(grad), k.requires_grad_(grad)


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(3, 1), (32, 15), (66, 33), (128, 64), (5, 0)])
def test_every_remainder(isa, interleaved, dim, half):
    cos, sin = torch.randn(2, 4, half).unbind()
    x = torch.randn(1, 4, 2, dim)
    with testing.isa(isa):
        got, _ = F.apply_rotary(x, None, cos, sin, interleaved=interleaved)
    expected, _ = reference.apply_rotary(x, None, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize(("dtype", "interleaved"), [(torch.float32, 0), (torch.bfloat16, 1)])
@pytest.mark.parametrize(("dim", "half"), [(256, 64), (256, 60)])
def test_large_results_are_written_past_the_caches(isa, dtype, interleaved, dim, half):
    tokens = (32 << 20) // (8 * dim * dtype.itemsize)
    q = torch.randn(1, tokens, 7, dim, dtype=dtype)
    k = torch.randn(1, tokens, 1, dim, dtype=dtype)
    tables = torch.randn(2, tokens, half).unbind()
    with testing.isa(isa):
        got = F.apply_rotary(q, k, *tables, rotary_start=32, interleaved=bool(interleaved))
        for x, turned in zip((q, k), got, strict=True):
            F.apply_rotary(
                x, None, *tables, rotary_start=32, interleaved=bool(interleaved), inplace=True
            )
            assert torch.equal(turned, x)


@pytest.mark.parametrize(
    "positions",
    [
        4,
        torch.tensor([8, 0, 3, 3, 1], dtype=torch.uint8),
        torch.randint(9, (2, 5)),
        torch.tensor([[7] * 5], dtype=torch.int32),
    ],
)
def test_positions_choose_rows(positions):
    q, k = qk()
    got = F.apply_rotary(q, k, COS, SIN, positions=positions)
    expected = reference.apply_rotary(q, k, COS, SIN, positions=positions)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_in_place_equals_out_of_place_with_its_gradients():
    leaves = qk(grad=True)
    expected = F.apply_rotary(*leaves, COS[:5], SIN[:5])
    views = [(x * 1)[:, :, :, :] for x in leaves]
    got = F.apply_rotary(*views, COS[:5], SIN[:5], inplace=True)
    grads = [torch.randn_like(x) for x in expected]
    for a, view, b in zip(got, views, expected, strict=True):
        assert a is view and torch.equal(a, b)
    for a, b in zip(
        torch.autograd.grad(got, leaves, grads),
        torch.autograd.grad(expected, leaves, grads),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_inverse_undoes_the_rotation_in_place_and_out_of_place():
    q, k = qk()
    options = dict(rotary_start=1, interleaved=True)
    turned = F.apply_rotary(q, k, COS[:5], SIN[:5], **options)
    back = F.apply_rotary(*turned, COS[:5], SIN[:5], inverse=True, inplace=True, **options)
    torch.testing.assert_close(back, (q, k))
    assert torch.equal(q[..., 7:], turned[0][..., 7:]) and torch.equal(q[..., 0], turned[0][..., 0])


def test_in_place_takes_empty_tensors_of_any_stride():
    q = torch.zeros(1, 5, 1, 6).expand(2, 5, 4, 6)[:, :, :0]
    assert F.apply_rotary(q, q, COS[:5], SIN[:5], inplace=True)[0] is q


def test_in_place_refuses_what_it_would_spoil():
    q, _ = qk()
    with pytest.raises(RuntimeError, match="expanded"):
        F.apply_rotary(q[:1].expand(2, -1, -1, -1), None, COS[:5], SIN[:5], inplace=True)
    with pytest.raises(RuntimeError, match="unit stride"):
        strided = torch.randn(2, 5, 3, 16)[..., ::2]
        F.apply_rotary(strided, None, COS[:5], SIN[:5], inplace=True)
    with pytest.raises(RuntimeError, match="q and k must not share memory to be rotated in place"):
        F.apply_rotary(q, q, COS[:5], SIN[:5], inplace=True)
    with pytest.raises(RuntimeError, match="leaf"):
        F.apply_rotary(q.requires_grad_(), None, COS[:5], SIN[:5], inplace=True)


def test_the_backward_is_differentiable_and_an_unused_k_costs_nothing():
    cos, sin = (t[:5].double() for t in (COS, SIN))
    q, k = qk(grad=True, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda q, k: F.apply_rotary(q, k, cos, sin), (q, k))
    q_out, _ = F.apply_rotary(q, k, cos, sin)
    dq, dk = torch.autograd.grad(q_out.sum(), (q, k), allow_unused=True)
    assert dk is None and dq is not None


def test_compiled_in_place():
    def f(q):
        q = q * 2
        return F.apply_rotary(q, None, COS[:5], SIN[:5], inplace=True)[0]

    q, _ = qk()
    assert torch.equal(torch.compile(f, fullgraph=True)(q), f(q))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(q=torch.ones(5, 3, 8)), ValueError, r"q must have shape \(B, T, H, D\)"),
        (dict(k=torch.ones(2, 4, 1, 8)), ValueError, r"k must have shape \(2, 5, Hkv, 8\)"),
        (dict(k=torch.ones(2, 5, 1, 8).half()), TypeError, "k must have the dtype of q"),
        (dict(cos=COS, sin=SIN), ValueError, "one row for each token"),
        (dict(cos=COS[:4], sin=SIN[:4]), ValueError, "one row for each token"),
        (dict(sin=SIN[:5, :1]), ValueError, "same shape"),
        (dict(cos=torch.ones(5, 5), sin=torch.ones(5, 5)), ValueError, "at most D / 2 columns"),
        (dict(cos=torch.ones(3, 5, 2), sin=torch.ones(3, 5, 2)), ValueError, "cos must have shape"),
        (dict(positions=-1), ValueError, "positions must start"),
        (dict(positions=1), ValueError, "end within the tables"),
        (dict(positions=torch.arange(4)), ValueError, "positions must have shape"),
        (dict(positions=torch.arange(5).float()), TypeError, "positions must be integers"),
        (dict(positions=torch.arange(5) > 1), TypeError, "positions must be integers"),
        (dict(rotary_start=-1), ValueError, r"rotary_start must be in \[0, D - Dr\]"),
        (dict(rotary_start=3), ValueError, r"rotary_start must be in \[0, D - Dr\]"),
        (dict(positions=torch.arange(1, 6)), RuntimeError, r"positions must be in \[0, [5P]\)"),
        (dict(positions=torch.arange(-1, 4)), RuntimeError, r"positions must be in \[0, [5P]\)"),
        (dict(cos=COS[:5].clone().requires_grad_()), NotImplementedError, "no gradient"),
    ],
)
def test_bad_input(arguments, error, message):
    valid = {"q": torch.ones(2, 5, 3, 8), "k": None, "cos": COS[:5], "sin": SIN[:5]}
    with pytest.raises(error, match=message):
        F.apply_rotary(**(valid | arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(rotary_dim=5), ValueError, "rotary_dim must be even"),
        (dict(rotary_dim=-2), ValueError, "rotary_dim must be even"),
        (dict(base=0.0), ValueError, "base must be a finite number > 0"),
        (dict(scaling="linear"), TypeError, "scaling must be"),
    ],
)
def test_bad_frequencies(arguments, error, message):
    with pytest.raises(error, match=f"rope_frequencies: {message}"):
        F.rope_frequencies(**({"rotary_dim": 4} | arguments))


def test_qk_norm_rotary_equals_qwen3():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    q, k = qk()
    norms = Qwen3RMSNorm(8), Qwen3RMSNorm(8)
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    cos, sin = F.rotary_tables(F.rope_frequencies(8), torch.arange(5))
    tables = (torch.cat((t, t), -1)[None] for t in (cos, sin))
    normed = (norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k), strict=True))
    expected = apply_rotary_pos_emb(*normed, *tables)
    got = F.qk_norm_rotary(q, k, cos, sin, q_weight=norms[0].weight, k_weight=norms[1].weight)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b.transpose(1, 2))


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_llama_casting_of_qk_norm_rotary_is_that_of_two_calls(dtype, interleaved, isa):
    """transformers' Qwen3 computes this with tables in fp32."""
    q, weight = torch.randn(2, 9, 3, 82).to(dtype), torch.randn(82).to(dtype)
    options = {"rotary_start": 5, "interleaved": interleaved}
    tables = F.rotary_tables(F.rope_frequencies(70), torch.arange(9))
    normed = F.rms_norm(q, weight, casting="llama")
    expected, _ = F.apply_rotary(normed, None, *tables, **options)

    def share_of_others(casting):
        options["casting"] = casting
        y, _ = F.qk_norm_rotary(q, None, *tables, q_weight=weight, **options)
        return (y != expected).double().mean().item()

    with testing.isa(isa):
        assert share_of_others("llama") < 2e-3  # sums in another order
        assert share_of_others("fp32") > 0.05


def test_qk_norm_rotary_says_what_does_not_fit():
    q, k = qk()
    with pytest.raises(ValueError, match="casting must be one of"):
        F.qk_norm_rotary(q, k, COS[:5], SIN[:5], casting="bf16")
    with pytest.raises(ValueError, match=r"q_weight must have shape \(8,\)"):
        F.qk_norm_rotary(q, k, COS[:5], SIN[:5], q_weight=torch.ones(7))
    with pytest.raises(ValueError, match="eps must be a finite number >= 0"):
        F.qk_norm_rotary(q, k, COS[:5], SIN[:5], eps=-1.0)
    with pytest.raises(RuntimeError, match=r"qk_norm_rotary: positions must be in \[0, [9P]\)"):
        F.qk_norm_rotary(q, k, COS, SIN, positions=torch.arange(5, 10))


@pytest.mark.parametrize("first", [-1, len(COS) - 4])
@pytest.mark.parametrize("function", [F.apply_rotary, F.qk_norm_rotary])
def test_definitions_refuse_positions_outside_the_tables(function, first):
    q, k = qk()
    positions = torch.arange(first, first + q.shape[1])
    with pytest.raises(RuntimeError, match=r"qk_norm_rotary: positions must be in \[0, P\)"):
        function(q, k, COS, SIN, positions=positions, backend="reference")
