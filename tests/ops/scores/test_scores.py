"""Terms of the logits: tables read in the kernel, sinks, factors, weights other than softmax."""

from __future__ import annotations

import math

import pytest
import torch

from omniattn import functional, reference
from omniattn.encoding.options import t5_bucket
from omniattn.functional import attention, masks, scores
from omniattn.testing import isa, isas, poisoned_memory, threads

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
TOLERANCE = {F64: 1e-10, F32: 2e-5, BF16: 3e-2}
HEADS = 4

D = 16


def distance_rows(keys, queries):
    """Options of rows (rows, HEADS, D) with these rows of distance 0, None for no such term."""
    zeros = {"relative_keys": keys, "relative_queries": queries}
    return lambda t: {n: scores.DistanceRows(t, z) for n, z in zeros.items() if z is not None}


#: shape of the table, the options with that table, Tq and Tk (None: any)
TABLES = {
    "t5": ((32, HEADS), lambda t: {"relative": scores.T5Bias(t)}, None),
    "t5 causal": (
        (12, HEADS),
        lambda t: {"relative": scores.T5Bias(t, bidirectional=False, max_distance=50)},
        None,
    ),
    "toeplitz": ((599, HEADS), lambda t: {"relative": scores.DistanceBias(t, 299)}, None),
    "clipped": ((9, HEADS), lambda t: {"relative": scores.DistanceBias(t, -3)}, None),
    "swin": ((13 * 13, HEADS), lambda t: {"relative": scores.WindowBias(t, (7, 7))}, 49),
    "flat window": ((5 * 39, HEADS), lambda t: {"relative": scores.WindowBias(t, (3, 20))}, 60),
    "keys": ((599, HEADS, D), distance_rows(299, None), None),
    "queries": ((77, HEADS, D), distance_rows(None, -1), None),
    "keys and queries": ((9, HEADS, D), distance_rows(3, 6), None),
}


def inputs_for(name, dtype, tq, tk, batch=3):
    shape, make, length = TABLES[name]
    tq, tk = (length, length) if length else (tq, tk)
    random = torch.Generator().manual_seed(0)
    shapes = ((batch, tq, HEADS, D), (batch, tk, 2, D), (batch, tk, 2, 8), shape)
    return [torch.randn(s, generator=random, dtype=F64).to(dtype) for s in shapes], make


def gradients(function, inputs, make, **options):
    leaves = [t.detach().requires_grad_() for t in inputs]
    *qkv, table = leaves
    out = function(*qkv, **make(table), **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=F64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def assert_close(got, want, dtype):
    for a, w in zip(got, want, strict=True):
        atol = TOLERANCE[dtype] * max(1.0, w.abs().max().item())
        torch.testing.assert_close(a.double(), w.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("tq,tk", [(100, 130), (2, 300)])
def test_tables_match_fp64(name, dtype, tq, tk):
    inputs, make = inputs_for(name, dtype, tq, tk)
    for options in ({"causal": True, "softcap": 4.0}, {"normalizer": "relu2", "scale": 0.1}):
        got = gradients(attention, inputs, make, **options)
        want = gradients(reference.attention, [t.double() for t in inputs], make, **options)
        assert got[4].shape == inputs[3].shape and got[4].dtype == dtype
        assert_close(got, want, dtype)


@pytest.mark.parametrize("end", [-1.0, -0.3, 0.3, 1.0])
@pytest.mark.parametrize("name", ["t5", "swin"])
def test_tables_at_the_ends_of_the_range(name, end):
    """One head reads such a number for all keys, another one for some."""
    inputs, make = inputs_for(name, F32, 100, 130, batch=1)
    for table in (inputs[3][:, 0], inputs[3][::2, 1]):
        table.fill_(end * torch.finfo(F32).max)
    want = gradients(reference.attention, [t.double() for t in inputs], make)
    assert_close(gradients(attention, inputs, make), want, F32)


@pytest.mark.parametrize("name", isas())
def test_every_isa(name):
    with isa(name):
        for term in ("t5", "swin", "keys and queries"):
            inputs, make = inputs_for(term, F32, 100, 130)
            want = gradients(reference.attention, [t.double() for t in inputs], make)
            assert_close(gradients(attention, inputs, make), want, F32)


@pytest.mark.parametrize("name", TABLES)
def test_threads_and_memory_do_not_change_a_bit(name):
    inputs, make = inputs_for(name, F32, 200, 300)
    results = []
    for count in (1, 2):
        with threads(count), poisoned_memory():
            results.append(gradients(attention, inputs, make, causal=True))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_planes_of_the_table_gradient():
    """Many windows share a few; where each entry has a table of its own it has its own plane."""
    inputs, make = inputs_for("swin", F32, 49, 49, batch=37)
    results = []
    for count in (1, 2):
        with threads(count), poisoned_memory():
            results.append(gradients(attention, inputs, make))
    want = gradients(reference.attention, [t.double() for t in inputs], make)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert_close(results[0], want, F32)

    shapes = ((3, 50, HEADS, 8), (3, 60, 2, 8), (3, 60, 2, 8), (3, HEADS), (1, 1, 50, 60))
    leaves = [torch.randn(s, dtype=F64, requires_grad=True) for s in shapes]

    def slopes_and_bias(function):
        q, k, v, slopes, bias = leaves
        out = function(q, k, v, alibi_slopes=slopes, bias=bias)
        return torch.autograd.grad(out.square().sum(), leaves)

    assert_close(slopes_and_bias(attention), slopes_and_bias(reference.attention), F64)


@pytest.mark.parametrize("name", ["t5", "keys and queries"])
def test_derivatives(name):
    inputs, _ = inputs_for(name, F64, 3, 4, batch=1)
    inputs = [t[..., :2].contiguous() if t.dim() > 2 else t[:8] for t in inputs]
    inputs = [t.requires_grad_() for t in inputs]
    sinks, head_scale = (torch.randn(HEADS, dtype=F64, requires_grad=True) for _ in range(2))
    rest = {"sinks": sinks, "head_scale": head_scale} if name == "t5" else {"sinks": sinks}

    def call(q, k, v, table, *rest_of_call):
        if name == "t5":
            term = {"relative": scores.T5Bias(table, max_distance=3)}
        else:
            term = distance_rows(3, 6)(table)
        options = dict(zip(rest, rest_of_call, strict=True))
        return attention(q, k, v, **term, **options, return_lse=True)

    assert torch.autograd.gradcheck(call, (*inputs, *rest.values()), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (*inputs, *rest.values()))


def test_distances_and_positions_of_t5_agree_with_transformers():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distance = torch.arange(-2000, 2000)
    for both in (True, False):
        want = t5._relative_position_bucket(distance, both, 32, 128)
        assert torch.equal(t5_bucket(distance, both, 32, 128), want)


def test_alibi_is_its_bias():
    q, k, v = (torch.randn(2, n, 4, 8, dtype=F64) for n in (70, 90, 90))
    slopes = functional.alibi_slopes(4).double()
    bias = functional.alibi_bias(slopes, 70, 90)
    torch.testing.assert_close(
        attention(q, k, v, alibi_slopes=slopes), attention(q, k, v, bias=bias)
    )


@pytest.mark.parametrize("tq", [70, 2])
def test_a_sink_is_a_key_without_a_value(tq):
    q, k, v = (torch.randn(2, n, 4, 8, dtype=F64) for n in (tq, 90, 90))
    sinks = torch.randn(4, dtype=F64)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    got, got_lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    keep = torch.sigmoid(lse - sinks[:, None])
    torch.testing.assert_close(got, out * keep.transpose(1, 2)[..., None])
    torch.testing.assert_close(got_lse, torch.logaddexp(lse, sinks[:, None].expand_as(lse)))
    nothing = masks.KeyLengths(torch.tensor([0, 0]))
    got, got_lse = attention(q, k, v, mask=nothing, sinks=sinks, return_lse=True)
    assert (got == 0).all()
    torch.testing.assert_close(got_lse, sinks[:, None].expand_as(lse))
    off = torch.full((4,), -math.inf, dtype=F64)
    torch.testing.assert_close(attention(q, k, v, causal=True, sinks=off), out)
    got, got_lse = attention(q, k, v, mask=nothing, sinks=off, return_lse=True)
    assert (got == 0).all() and (got_lse == -math.inf).all()


def test_masked_weights_are_exactly_zero():
    q, k = torch.randn(1, 40, 2, 8), torch.randn(1, 64, 2, 8)
    v = torch.eye(64).expand(1, 2, 64, 64).transpose(1, 2)
    seen = masks.Causal().dense(40, 64)
    for normalizer in ("sigmoid", "relu2"):
        weights = attention(q, k, v, causal=True, normalizer=normalizer).transpose(1, 2)
        assert (weights[..., ~seen] == 0).all()


WRONG = [
    (
        {"sinks": torch.zeros(3)},
        ValueError,
        r"sinks must have shape \(4,\), got sinks.shape=\(3,\)",
    ),
    (
        {"alibi_slopes": torch.zeros(3, 4)},
        ValueError,
        r"\(4,\) or \(2, 4\), got alibi_slopes.shape=",
    ),
    ({"head_scale": torch.zeros(4).int()}, TypeError, "head_scale must be float64"),
    ({"normalizer": "sparsemax"}, ValueError, "got normalizer='sparsemax'"),
    ({"normalizer": "relu2", "sinks": torch.zeros(4)}, ValueError, "sinks need softmax"),
    ({"normalizer": "sigmoid", "return_lse": True}, ValueError, "return_lse needs softmax"),
    ({"relative": torch.zeros(3)}, TypeError, "relative must be a RelativeBias"),
    ({"relative_keys": torch.zeros(3)}, TypeError, "relative_keys must be DistanceRows"),
    (
        {"relative_keys": scores.T5Bias(torch.zeros(32, 4))},
        TypeError,
        r"relative_keys must be DistanceRows \(a RelativeBias is for relative\)",
    ),
    (
        {"relative": scores.DistanceRows(torch.zeros(3, 4, 8), 1)},
        TypeError,
        r"relative must be a RelativeBias \(DistanceRows are for relative_keys",
    ),
    (
        {"relative_queries": scores.DistanceRows(torch.zeros(9, 4, 7), 3)},
        ValueError,
        r"the rows of relative_queries must have shape \(9, 4, 8\)",
    ),
    (
        {
            "relative_queries": scores.DistanceRows(torch.zeros(9, 4, 8), 3),
            "head_scale": torch.ones(4),
        },
        ValueError,
        "head_scale must be None",
    ),
    ({"relative": scores.T5Bias(torch.zeros(32, 3))}, ValueError, r"shape \(1, 32, 4\)"),
    ({"relative": scores.WindowBias(torch.zeros(9, 4), (2, 2))}, ValueError, "tokens of a window"),
    (
        {"relative": scores.T5Bias(torch.zeros(32, 4)), "alibi_slopes": torch.zeros(4)},
        ValueError,
        "alibi_slopes must be None",
    ),
]


@pytest.mark.parametrize("options,error,message", WRONG)
def test_errors_name_argument_and_value(options, error, message):
    q = torch.zeros(2, 5, 4, 8)
    with pytest.raises(error, match="attention: .*" + message):
        attention(q, q, q, **options)


def test_tables_without_a_meaning():
    for make in (
        lambda: scores.T5Bias(torch.zeros(3, 4)),
        lambda: scores.T5Bias(torch.zeros(32, 4), max_distance=8),
        lambda: scores.DistanceBias(torch.zeros(0, 4), 0),
        lambda: scores.WindowBias(torch.zeros(10, 4), (2, 2)),
        lambda: scores.DistanceRows(torch.zeros(10, 4), 2),
    ):
        with pytest.raises(ValueError, match=r"(table|num_buckets|rows) must"):
            make()
    with pytest.raises(ValueError, match=r"zero must be an int >= -7 and <= 6, got zero=7"):
        scores.DistanceBias(torch.zeros(7, 4), 7)
