"""attention under autograd, torch.compile, torch.export, torch.func and autocast."""

import pytest
import torch
from attention_cases import BF16, F64, qkv
from torch._dynamo.testing import CompileCounterWithBackend

from omniattn import reference
from omniattn.encoding.masks import MaskKind
from omniattn.encoding.options import ScoreKind
from omniattn.functional import attention

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


def test_a_mask_of_fixed_size_compiles_with_a_symbolic_length():
    q = torch.randn(1, 5, 2, 8)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    torch._dynamo.maybe_mark_dynamic(q, 1)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, q, q, mask=mask), attention(q, q, q, causal=True))
