"""linear beyond what tests/ops/test_specs.py runs for every op: the choice of the kernel."""

import pytest
import torch

from omniattn.functional import linear
from omniattn.ops import gemm_choice

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def inputs(dtype, m=70, n=300, k=280):
    generator = torch.Generator().manual_seed(0)
    make = [torch.randn(s, generator=generator).to(dtype) for s in ((m, k), (n, k), (n,))]
    return [t.requires_grad_() for t in make]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_kernels_agree(dtype):
    results = []
    for backend in ("cpu", None, "reference"):
        x, weight, bias = inputs(dtype)
        y = linear(x, weight, bias, backend=backend)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            tolerance = 20 * torch.finfo(dtype).eps * float(b.detach().abs().max())
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_free_choice_follows_the_table(monkeypatch):
    x, weight, _ = inputs(torch.float32)
    for native, expected in ((True, "_EagerOp"), (False, "MmBackward")):
        rule = next(r for r in gemm_choice.RULES if r.native is native)
        monkeypatch.setitem(gemm_choice.CHOICE, torch.float32, rule)
        assert expected in type(linear(x, weight).grad_fn).__name__.replace("T", "")
    assert len(gemm_choice.describe()) == len(DTYPES)


def test_a_free_choice_compiles_into_one_graph():
    x, weight, bias = inputs(torch.bfloat16)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, bias), linear(x, weight, bias))


def test_autocast_casts_like_torch():
    x, weight, bias = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, weight, bias, backend="cpu")
    assert y.dtype == torch.bfloat16
    low = [t.detach().bfloat16() for t in (x, weight, bias)]
    torch.testing.assert_close(y, linear(*low, backend="cpu"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.ones(3, 5)}, ValueError, r"weight \(N, K\), got .*weight.shape=\(3, 5\)"),
        ({"weight": torch.ones(3, 4).double()}, TypeError, r"weight must have the dtype of x"),
        ({"bias": torch.ones(4)}, ValueError, r"bias must have shape \(3,\)"),
        ({"x": torch.ones(2, 4).int()}, TypeError, "x must be float64, float32"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x.shape=\(\)"),
        ({"backend": "mkl"}, ValueError, "backend must be one of"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {"x": torch.ones(2, 4), "weight": torch.ones(3, 4), "bias": torch.ones(3)}
    with pytest.raises(error, match=f"linear: .*{message}"):
        linear(**(arguments | change))
