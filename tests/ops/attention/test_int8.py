"""Keys and values in int8: rounding, error budgets and what the op refuses."""

from __future__ import annotations

import math

import pytest
import torch

from omniattn import functional as F
from omniattn import testing

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, torch.float16], ids=str)
def test_rows_are_rounded_to_the_nearest_of_255_steps(dtype):
    x = (torch.randn(5, 7, 3, 33) * torch.logspace(-4, 2, 7)[:, None, None]).to(dtype)
    codes, scale = F.quantize_int8(x)
    assert codes.dtype == torch.int8
    assert scale.dtype == (F64 if dtype == F64 else F32)
    assert scale.shape == x.shape[:-1]
    top = x.double().abs().amax(-1)
    torch.testing.assert_close(scale.double(), top / 127, rtol=1e-6, atol=0)
    assert (codes.abs().amax(-1) == 127).all()
    error = (codes.double() * scale[..., None].double() - x.double()).abs()
    assert (error <= 0.5001 * scale[..., None].double()).all()


def test_rows_at_the_ends_of_the_range():
    tiny = torch.finfo(F32).smallest_normal
    rows = torch.tensor([[0.0, -0.0], [1e-45, 0.0], [tiny, -tiny], [3e38, -1e38]])
    codes, scale = F.quantize_int8(rows)
    assert codes[0].tolist() == [0, 0]
    assert scale[0] == 0
    assert scale.isfinite().all()
    assert codes[1:].abs().amax(-1).tolist() == [127, 127, 127]
    for bad in (math.inf, math.nan):
        codes, scale = F.quantize_int8(torch.tensor([[1.0, bad]]))
        assert not (codes * scale).isfinite().all()
    assert F.quantize_int8(torch.zeros(2, 0))[1].tolist() == [0, 0]
    with pytest.raises(TypeError, match=r"quantize_int8: x must be float64"):
        F.quantize_int8(torch.ones(2, dtype=torch.int32))


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def cached(q, k, v, **options):
    """Attention to k and v in int8."""
    (k, k_scale), (v, v_scale) = F.quantize_int8(k), F.quantize_int8(v)
    lengths = torch.full((q.shape[0],), k.shape[1])
    return F.attention_int8(q, k, v, k_scale, v_scale, lengths, causal=True, **options)


#: Largest relative errors (Frobenius norms) of the page on caches, as a function of the inputs.
BUDGETS = {"normal": 0.015, "outlier key": 0.06, "outlier value": 0.06, "sharp": 0.03}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("tq", [1, 4, 48])
@pytest.mark.parametrize("name", BUDGETS)
def test_the_published_budgets(name, tq, dtype):
    """Errors against attention in fp64 to the keys and values before they are rounded."""
    q, k, v = (torch.randn(2, n, h, 64).to(dtype) for n, h in ((tq, 8), (700, 2), (700, 2)))
    if name == "outlier key":
        k[..., 5] *= 20
        q[..., 5] /= 20  # as trained models do: the logits stay in their range
    elif name == "outlier value":
        v[..., 5] *= 20
    elif name == "sharp":
        q = q * 4
    expected = F.attention(q.double(), k.double(), v.double(), causal=True)
    found = cached(q, k, v)
    if name == "outlier value":  # the other channels share the scale of the large one
        found, expected = (torch.cat((t[..., :5], t[..., 6:]), -1) for t in (found, expected))
    error = relative_error(found, expected)
    assert error < BUDGETS[name], error


def test_every_level_reads_the_bytes_alike():
    q, k, v = (torch.randn(2, n, h, 40) for n, h in ((1, 4), (300, 2), (300, 2)))
    (codes_k, k_scale), (codes_v, v_scale) = F.quantize_int8(k), F.quantize_int8(v)
    lengths = torch.tensor([300, 17])
    exact = F.attention_cached(
        q.double(),
        codes_k.double() * k_scale[..., None].double(),
        codes_v.double() * v_scale[..., None].double(),
        lengths,
    )
    for level in testing.isas():
        with testing.isa(level):
            found = F.attention_int8(q, codes_k, codes_v, k_scale, v_scale, lengths)
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def arguments(**changes):
    k, scale = F.quantize_int8(torch.randn(2, 6, 2, 8))
    made = {"q": torch.randn(2, 1, 4, 8), "k": k, "v": k, "k_scale": scale, "v_scale": scale}
    return {**made, "cache_seqlens": torch.tensor([6, 3]), **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": torch.zeros(2, 6, 2, 8)}, TypeError, "k must be int8, .*got k.dtype=torch.float32"),
        ({"v": torch.zeros(2, 6, 2, 8).to(BF16)}, TypeError, "v must be int8"),
        ({"k_scale": torch.ones(2, 6, 2).to(BF16)}, TypeError, "k_scale must be torch.float32"),
        ({"v_scale": torch.ones(2, 6, 2).double()}, TypeError, "v_scale must be torch.float32"),
        ({"k_scale": torch.ones(2, 6, 1)}, ValueError, r"k_scale must have shape \(2, 6, 2\)"),
        ({"q": torch.zeros(2, 1, 4, 8, dtype=torch.int8)}, TypeError, "q must be float64"),
        ({"dropout_p": 0.1}, TypeError, "dropout_p"),
        ({"q": torch.zeros(2, 1, 4, 8, requires_grad=True)}, RuntimeError, "inference only"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, RuntimeError, "inference only"),
        ({"cache_seqlens": torch.tensor([7, 3])}, RuntimeError, "cache_seqlens"),
    ],
)
def test_errors_name_the_argument(changes, error, message):
    with pytest.raises(error, match=f"attention_int8.*{message}"):
        F.attention_int8(**arguments(**changes))


def test_gradients_are_refused_in_every_form():
    given = arguments()
    q = given.pop("q")

    def loss(q):
        return F.attention_int8(q, **given).sum()

    with pytest.raises(RuntimeError, match="inference only"):
        torch.func.grad(loss)(q)
    with pytest.raises(RuntimeError, match="inference only"):
        torch.func.jvp(loss, (q,), (q,))
    with torch.no_grad():
        assert loss(q.requires_grad_()).isfinite()
