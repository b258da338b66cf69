"""attention: what the registry's generic properties do not cover."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as torch_F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from omniattn import reference
from omniattn.encoding.masks import MaskKind
from omniattn.encoding.scores import ScoreKind
from omniattn.functional import attention, attention_weights, masks, scaled_dot_product_attention
from omniattn.reference import philox
from omniattn.testing import isa, isas, poisoned_memory, threads

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F64: 1e-11, F32: 1e-5, BF16: 2e-2, F16: 3e-3}


def qkv(b, tq, tk, h, g, d, dv=None, dtype=F32, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = ((b, tq, h, d), (b, tk, g, d), (b, tk, g, d if dv is None else dv))
    return [torch.randn(s, generator=make, dtype=F64).to(dtype) for s in shapes]


def gradients(function, inputs, **options):
    """Outputs and gradients of `inputs` for fixed random gradients of O and of the finite lse."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = function(
        *leaves[:3], **dict(zip(("bias",), leaves[3:], strict=False)), return_lse=True, **options
    )
    make = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=make, dtype=F64).to(out.dtype)
    finite = lse.isfinite()
    grad_lse = torch.randn(lse.shape, generator=make, dtype=F64).to(lse.dtype) * finite
    grads = torch.autograd.grad((out, lse), leaves, (grad, grad_lse))
    return [out.detach(), lse.detach(), *grads]


def assert_matches_fp64(inputs, **options):
    got = gradients(attention, inputs, **options)
    want = gradients(reference.attention, [t.double() for t in inputs], **options)
    for a, w in zip(got, want, strict=True):
        scale = max([1.0, *w[w.isfinite()].abs().flatten().tolist()])
        torch.testing.assert_close(
            a.double(), w, rtol=0, atol=TOLERANCE[inputs[0].dtype] * scale, msg=str(options)
        )


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


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 7)},
    "softcap": {"softcap": 3.0, "scale": 0.4},
    "negative-scale": {"scale": -0.3},
    "dropout": {"dropout_p": 0.3, "seed": torch.tensor([-5, 7])},
    "lengths": {"mask": masks.KeyLengths(torch.tensor([0, 70]))},
    "all": {
        "mask": masks.Causal(top_left=True) & masks.SlidingWindow(40, 40),
        "softcap": 5.0,
        "dropout_p": 0.5,
        "seed": torch.tensor([1, 2]),
    },
}


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
def test_hidden_keys_may_hold_nan(tq):
    q, k, v = qkv(2, tq, 200, 4, 2, 32)
    lengths = torch.tensor([50, 131])
    want = gradients(attention, [q, k, v], mask=masks.KeyLengths(lengths))
    for b, n in enumerate(lengths):
        k[b, n:], v[b, n:] = math.nan, math.nan
    got = gradients(attention, [q, k, v], mask=masks.KeyLengths(lengths))
    for a, w in zip(got, want, strict=True):
        torch.testing.assert_close(a, w, rtol=0, atol=0)


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


def assert_sdpa_is_torch_s(inputs, **options):
    """Outputs and all gradients, of a float mask too."""
    mask, causal = options.get("attn_mask"), options.get("is_causal", False)
    # torch's one kernel that joins is_causal and a mask gives the mask no gradient.
    learnt = type(mask) is torch.Tensor and mask.is_floating_point() and not causal
    results = []
    for function in (scaled_dot_product_attention, torch_F.scaled_dot_product_attention):
        leaves = [t.detach().clone().requires_grad_() for t in (*inputs, mask)[: 3 + learnt]]
        out = function(*leaves[:3], **(options | ({"attn_mask": leaves[3]} if learnt else {})))
        grad = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    dtype = inputs[0].dtype
    for a, w in zip(*results, strict=True):
        torch.testing.assert_close(
            a, w, rtol=2e-2 if dtype == BF16 else 1e-4, atol=TOLERANCE[dtype] * 2
        )


@pytest.mark.parametrize("shape", [(2, 4, 33, 8), (3, 33, 8), (2, 3, 4, 33, 8)], ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_sdpa_is_torch_s(shape, dtype):
    q = torch.randn(shape, dtype=F64).to(dtype)
    k, v = (torch.randn(*shape[:-2], 50, 8, dtype=F64).to(dtype) for _ in range(2))
    for options in (
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(33, 50) < 0.7},
        {"attn_mask": torch.randn(33, 50, dtype=F64).to(dtype), "scale": 0.2},
    ):
        assert_sdpa_is_torch_s((q, k, v), **options)


# Everything before (T, D) of query, key and value.
SDPA_SHAPES = {
    "one-head": ((), (), ()),
    "keys-of-one-sequence": ((2, 4), (1, 4), (1, 4)),
    "values-of-one-sequence": ((2, 4), (2, 4), (1, 4)),
    "queries-of-one-sequence": ((1, 4), (2, 4), (2, 4)),
    "one-kv-head": ((2, 4), (2, 1), (2, 1)),
    "one-key-head": ((2, 4), (2, 1), (2, 4)),
    "one-value-head": ((2, 4), (2, 4), (2, 1)),
    "one-query-head": ((2, 1), (2, 4), (2, 4)),
    "3d-queries": ((4,), (2, 4), (2, 4)),
    "3d-keys-and-values": ((2, 4), (4,), (4,)),
    "3d-values": ((2, 4), (2, 4), (4,)),
    "2d-keys-and-values": ((2, 4), (), ()),
    "5d": ((3, 2, 4), (3, 2, 4), (3, 2, 4)),
    "5d-broadcast": ((3, 1, 4), (1, 2, 1), (2, 4)),
    "7d": ((1, 2, 1, 3, 4), (1, 2, 1, 3, 4), (1, 2, 1, 3, 4)),
    "no-sequence": ((0, 4), (1, 4), (1, 4)),
    "no-head": ((2, 0), (2, 0), (2, 1)),
}
SDPA_GROUPED = {
    "grouped": ((2, 4), (2, 2), (2, 2)),
    "grouped-3d": ((4,), (2,), (2,)),
    "grouped-3d-keys": ((2, 4), (2,), (2,)),
    "grouped-keys-of-one-sequence": ((2, 4), (1, 2), (1, 2)),
    "grouped-differently": ((2, 8), (2, 4), (2, 2)),
    "grouped-keys-only": ((2, 4), (2, 2), (2, 4)),
    "grouped-5d": ((3, 2, 4), (3, 1, 2), (3, 1, 1)),
}


@pytest.mark.parametrize("name", [*SDPA_SHAPES, *SDPA_GROUPED])
def test_sdpa_broadcasts_as_torch_s(name):
    grouped = name in SDPA_GROUPED
    lead_q, lead_k, lead_v = (SDPA_SHAPES | SDPA_GROUPED)[name]
    q, k = torch.randn(*lead_q, 6, 8), torch.randn(*lead_k, 9, 8)
    v = torch.randn(*lead_v, 9, 5)
    for options in (
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(6, 9) < 0.7},
        {"attn_mask": torch.randn(*lead_q, 6, 9), "scale": -0.2},
        {"attn_mask": torch.randn(6, 1)},
        {"attn_mask": causal_upper_left(6, 9)},
        {"attn_mask": causal_lower_right(6, 9)},
    ):
        assert_sdpa_is_torch_s((q, k, v), enable_gqa=grouped, **options)


def test_sdpa_broadcasts_where_there_is_no_query():
    q, k, v = torch.zeros(1, 1, 0, 8), torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 3)
    for backend in (None, "reference"):
        assert scaled_dot_product_attention(q, k, v, backend=backend).shape == (2, 4, 0, 3)


@pytest.mark.parametrize("sizes", [(6, 6), (6, 9), (9, 6), (1, 9), (9, 1)], ids=str)
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_bias_of_torch(sizes):
    """It is a tensor whose memory nobody has written."""
    q, k = torch.randn(2, 4, sizes[0], 8), torch.randn(2, 4, sizes[1], 8)
    for bias in (causal_upper_left(*sizes), causal_lower_right(*sizes)):
        assert_sdpa_is_torch_s((q, k, k), attn_mask=bias)
        want = torch_F.scaled_dot_product_attention(q, k, k, bias)
        got = attention(*(t.transpose(1, 2) for t in (q, k, k)), mask=bias).transpose(1, 2)
        torch.testing.assert_close(got, want)


def test_sdpa_joins_mask_and_is_causal():
    """As torch's CPU kernel does, which takes calls of these shapes."""
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 9, 8)
    for mask in (torch.rand(6, 9) < 0.7, torch.randn(6, 9)):
        assert_sdpa_is_torch_s((q, k, k), attn_mask=mask, is_causal=True)


@pytest.mark.parametrize(
    "scale,softcap", [(1e38, 0), (1e-45, 0), (1, 1e-38), (1, 1e38), (-1e20, 1e-18)]
)
def test_extreme_factors_do_not_make_nan(scale, softcap):
    for tq in (1, 40):
        q, k, v = qkv(1, tq, 70, 1, 1, 4)
        out = attention(0 * q, k, v, scale=scale, softcap=softcap)
        torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out))


DERIVATIVES = {
    "causal": {"causal": True},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.4, "seed": torch.tensor([3, 4])},
}


@pytest.mark.parametrize("options", DERIVATIVES.values(), ids=DERIVATIVES.keys())
def test_first_and_second_derivatives(options):
    inputs = [t.requires_grad_() for t in qkv(1, 3, 4, 2, 1, 3, 2, dtype=F64)]
    inputs.append(torch.randn(1, 2, 1, 4, dtype=F64, requires_grad=True))

    def call(q, k, v, bias):
        return attention(q, k, v, bias=bias, return_lse=True, **options)

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_derivative_of_lse_alone():
    q, k, v = (t.requires_grad_() for t in qkv(1, 3, 4, 1, 1, 3, dtype=F64))
    assert torch.autograd.gradcheck(lambda q, k: attention(q, k, v, return_lse=True)[1], (q, k))


def test_opcheck():
    q, k, v = qkv(1, 4, 6, 2, 1, 8)
    bias = torch.randn(1, 2, 1, 6)
    leaves = [t.requires_grad_() for t in (q, k, v, bias)]
    op = torch.ops.omniattn.attention.default
    mask, score = [MaskKind.WINDOW, -1, 0, -1], [ScoreKind.SOFTCAP, -1, 2, ScoreKind.BIAS, 0, -1]
    args = (*leaves[:3], [bias], None, mask, score, [0.5, 0.0, 3.0])
    torch.library.opcheck(op, args)
    torch.library.opcheck(op, (q, k, v, [], None, [], [], [0.5, 0.0]))


def test_none_is_an_empty_list():  # which AOTInductor's runner makes None
    q, k, v = qkv(1, 4, 6, 2, 1, 8)
    for mask in ([], [MaskKind.WINDOW, -1, 0, -1]):
        for name in ("attention", "attention_raw"):
            op = getattr(torch.ops.omniattn, name)
            want = op(q, k, v, [], None, mask, [], [0.5, 0.0])
            got = op(q, k, v, None, None, mask or None, None, [0.5, 0.0])
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])


def test_one_graph_for_all_windows():
    torch._dynamo.reset()
    q, k, v = (t.requires_grad_() for t in qkv(1, 20, 20, 2, 1, 8))

    def model(window):
        return attention(q, k, v, causal=True, window_size=window)

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for left in (3, 4, 5, 9):
        got, want = (
            (out, torch.autograd.grad(out.square().sum(), (q, k, v)))
            for out in (f((left, -1)) for f in (compiled, model))
        )
        torch.testing.assert_close(got, want)
    assert graphs.frame_count == 2  # the first window is a constant


def test_compile_export_checkpoint():
    q, k, v = (t.requires_grad_() for t in qkv(1, 20, 30, 2, 1, 8))
    bias = torch.randn(2, 20, 30, requires_grad=True)

    def model(q, k, v, bias):
        return attention(q, k, v, causal=True, bias=bias, softcap=3.0).sin().sum()

    want = torch.autograd.grad(model(q, k, v, bias), (q, k, v, bias))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v, bias), (q, k, v, bias))
    torch.testing.assert_close(got, want)

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, window_size=(3, 3))

    program = torch.export.export(Module(), (q, k, v))
    torch.testing.assert_close(program.module()(q, k, v), Module()(q, k, v))

    def dropping(q, k, v):
        return attention(q, k, v, dropout_p=0.5).sin().sum()

    torch.manual_seed(0)
    want = torch.autograd.grad(dropping(q, k, v), (q, k, v))
    torch.manual_seed(0)
    out = torch.utils.checkpoint.checkpoint(dropping, q, k, v, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v)), want, rtol=0, atol=0)


def test_function_transforms():
    q, k, v = qkv(3, 5, 6, 2, 1, 8, dtype=F64)

    def loss(q, k, v):
        return attention(q, k, v, causal=True).square().sum()

    want = torch.func.grad(lambda *x: reference.attention(*x, causal=True).square().sum())(q, k, v)
    torch.testing.assert_close(torch.func.grad(loss)(q, k, v), want)
    stacked = [torch.stack((t, 2 * t)) for t in (q, k, v)]
    got = torch.func.vmap(lambda *x: attention(*x, causal=True))(*stacked)
    each = [attention(*(t[i] for t in stacked), causal=True) for i in range(2)]
    torch.testing.assert_close(got, torch.stack(each))
    grads = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacked)
    leaves = [t.clone().requires_grad_() for t in stacked]
    total = sum(loss(*(t[i] for t in leaves)) for i in range(2))
    torch.testing.assert_close(grads, torch.autograd.grad(total, leaves))


def test_autocast_casts_to_its_dtype():
    q, k, v = qkv(1, 20, 20, 2, 2, 8)
    with torch.autocast("cpu", dtype=BF16):
        out = attention(q, k, v)
    assert out.dtype == BF16
    torch.testing.assert_close(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


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


def test_the_gradient_of_a_parameter_is_wanted_once():
    q, bias = torch.zeros(1, 3, 1, 4), torch.zeros(1, 1, 3, 3)
    rules = ([], [0, 0, -1], [0.5, 0.0])
    out, *stats = torch.ops.omniattn.attention(q, q, q, [bias], None, *rules)
    with pytest.raises(RuntimeError, match="wanted must hold each index once, got two of 0"):
        torch.ops.omniattn.attention_backward(
            out, None, q, q, q, [bias], None, out, *stats, *rules, [0, 0]
        )


BAD_CALLS = [
    ({"q": (2, 3, 4)}, {}, ValueError, r"q must have 4 dimensions .* got q.shape=\(2, 3, 4\)"),
    ({"q": (2, 3, 4, 9)}, {}, ValueError, "q and k must have the same B and D"),
    ({"v": (2, 6, 2, 8)}, {}, ValueError, "k and v must have the same B, Tk and Hkv"),
    ({"q": (2, 3, 5, 8)}, {}, ValueError, "Hq must be a multiple of Hkv, got Hq=5, Hkv=2"),
    ({}, {"softcap": -1.0}, ValueError, "softcap must be a finite number >= 0, got softcap=-1.0"),
    (
        {},
        {"dropout_p": 1.5},
        ValueError,
        "dropout_p must be a finite number >= 0 and <= 1, got dropout_p=1.5",
    ),
    ({}, {"dropout_p": 0.5, "seed": torch.zeros(3)}, ValueError, "seed must be an int64 tensor"),
    ({}, {"scale": math.nan}, ValueError, "scale must be a finite number, got scale=nan"),
    ({}, {"window_size": (-2, 0)}, ValueError, "window_size must be"),
    ({}, {"mask": torch.zeros(3, 5)}, TypeError, "mask must be bool"),
    ({}, {"mask": torch.ones(3, 4) > 0}, ValueError, r"got mask.shape=\(3, 4\)"),
    (
        {},
        {"mask": masks.KeyLengths(torch.tensor([1, 1, 1]))},
        ValueError,
        r"got lengths.shape=\(3,\)",
    ),
    ({}, {"bias": torch.zeros(5, 3, 5)}, ValueError, r"got bias.shape=\(5, 3, 5\)"),
    ({}, {"bias": torch.zeros(3, 5, dtype=F64)}, TypeError, "bias must not be float64"),
    ({}, {"backend": "cuda"}, ValueError, "backend must match"),
]


@pytest.mark.parametrize("shapes,options,error,message", BAD_CALLS)
def test_errors_name_argument_and_value(shapes, options, error, message):
    sizes = {"q": (2, 3, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8)} | shapes
    with pytest.raises(error, match="attention: .*" + message):
        attention(*(torch.zeros(sizes[n]) for n in "qkv"), **options)


sizes = st.integers(0, 70)
few = st.integers(0, 3)
dtypes = st.sampled_from([F64, F32, BF16, F16, torch.int64, torch.bool])
numbers = st.integers(-3, 5) | st.integers(-(2**63), 2**63 - 1)


@st.composite
def raw_calls(draw):
    """Arguments of the raw op: each part right or, now and then, wrong."""
    b, h, tq, tk, d, dv = (draw(s) for s in (few, few, sizes, sizes, few, few))
    dtype = draw(st.sampled_from([F64, F32, BF16]))
    shapes = [[b, tq, h, d], [b, tk, h, d], [b, tk, h, dv]]
    if draw(st.integers(0, 3)) == 0:
        shapes[draw(st.integers(0, 2))][draw(st.integers(0, 3))] = draw(sizes)
    q, k, v = (
        torch.randn(s).to(draw(dtypes) if draw(st.integers(0, 9)) == 0 else dtype) for s in shapes
    )
    side = [draw(st.sampled_from([1, n])) for n in (b, h, tq)]
    aux = [
        torch.randn(*side, tk).to(dtype),
        torch.rand(*side, draw(st.sampled_from([tk, tk, tk, 1]))) < 0.5,
        torch.randint(-(2**40), 2**40, (b,)),
    ]
    mask = draw(
        st.sampled_from(
            [
                [],
                [MaskKind.WINDOW, -1, 0, -1],
                [MaskKind.TENSOR, 0, 0, 1],
                [MaskKind.KEY_LENGTHS, 0, 0, 2],
                [MaskKind.WINDOW_TOP_LEFT, 3, 4, -1, MaskKind.KEY_LENGTHS, 0, 0, 2],
            ]
        )
        | st.lists(numbers, max_size=8)
    )
    score = draw(
        st.sampled_from(
            [
                [],
                [ScoreKind.BIAS, 0, -1],
                [ScoreKind.SOFTCAP, -1, 2],
                [ScoreKind.SOFTCAP, -1, 2, ScoreKind.BIAS, 0, -1],
            ]
        )
        | st.lists(numbers, max_size=6)
    )
    params = draw(
        st.sampled_from([[0.5, 0.0, 3.0], [1.0, 0.5, 1.0]]) | st.lists(st.floats(), max_size=4)
    )
    seed = draw(st.sampled_from([torch.tensor([1, 2]), torch.tensor([1]), None]))
    return q, k, v, aux, seed, mask, score, params


@settings(max_examples=300, deadline=None)
@given(raw_calls())
def test_raw_op_raises_or_is_right(args):
    q, k, v, aux, seed, mask, score, params = args
    try:
        out, lse, tail = torch.ops.omniattn.attention_raw(*args)
    except (RuntimeError, TypeError) as error:
        assert "attention: " in str(error) or "expected" in str(error).lower(), error
        return
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == (
        q.shape[0],
        q.shape[2],
        q.shape[1],
    )
    wanted = [i for kind, i, _ in zip(*[iter(score)] * 3, strict=True) if kind == ScoreKind.BIAS]
    grads = torch.ops.omniattn.attention_backward(
        torch.ones_like(out), None, q, k, v, aux, seed, out, lse, tail, mask, score, params, wanted
    )
    assert [g.shape for g in grads[:3]] == [q.shape, k.shape, v.shape]
    assert [g.shape for g in grads[3]] == [aux[i].shape for i in wanted]


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
