"""Tests of the norms beyond the specs of test_specs.py: accuracy, bad input, derivatives."""

import functools
import importlib

import numpy as np
import pytest
import torch

import omniattn.functional as F
from omniattn import reference, testing

NORMS = {"rms_norm": F.rms_norm, "layer_norm": F.layer_norm}


@pytest.fixture(params=NORMS)
def op(request):
    return NORMS[request.param]


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 32, 33, 63, 127, 129, 257])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_remainder_of_rows_and_columns(op, isa, n, dtype):
    x, gy = (torch.randn(5, n).to(dtype) for _ in range(2))
    w = torch.randn(n).to(dtype).requires_grad_()
    x.requires_grad_()
    with testing.isa(isa):
        y = op(x, w)
        got = torch.autograd.grad(y, (x, w), gy)
    expected = op(x, w, backend="reference")
    torch.testing.assert_close(y, expected)
    tight = {} if dtype.itemsize > 2 else {"rtol": 2e-2, "atol": 2e-2}
    for a, b in zip(got, torch.autograd.grad(expected, (x, w), gy), strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 1e-4, "atol": 1e-5} | tight))


def test_the_variance_survives_a_large_mean():
    x = torch.randn(4, 1000, dtype=torch.float64) + 4096
    expected = reference.layer_norm(x.float().double())
    assert (F.layer_norm(x.float()) - expected).abs().max() < 2e-3


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_branch_joins_an_fp32_stream(op, dtype, isa):
    for n in (5, 16, 17, 31, 32, 63, 257):
        x, gy = (torch.randn(5, n).to(dtype) for _ in range(2))
        stream, gh = torch.randn(2, 5, n).unbind()
        leaves = [t.requires_grad_() for t in (x, torch.randn(n).to(dtype), stream)]
        with testing.isa(isa):
            y, h = op(x, leaves[1], residual=stream)
            got = torch.autograd.grad((y, h), leaves, (gy, gh))
        assert torch.equal(h, x + stream)
        expected = op(x, leaves[1], residual=stream, backend="reference")
        torch.testing.assert_close(y, expected[0])
        wanted = torch.autograd.grad(expected, leaves, (gy, gh))
        for a, b in zip(got, wanted, strict=True):
            tolerance = 2e-2 if a.dtype == dtype else 1e-5
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        with torch.autocast(x.device.type, dtype), testing.isa(isa):
            y_of_fp32_weight, _ = op(x, leaves[1].float(), residual=stream)
        assert torch.equal(y_of_fp32_weight, y)


def test_gradients_of_one_result_beside_a_stream(op):
    x = torch.randn(3, 8).bfloat16().requires_grad_()
    stream, grad = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    _, h = op(x, residual=stream)
    dx, dstream = torch.autograd.grad(h, (x, stream), grad)
    assert torch.equal(dx, grad.bfloat16()) and torch.equal(dstream, grad)
    (dx,) = torch.autograd.grad(op(x, residual=stream)[0].sum(), x)
    expected = op(x, residual=stream, backend="reference")[0]
    torch.testing.assert_close(dx, torch.autograd.grad(expected.sum(), x)[0])


def test_autocast_promotes_a_half_stream(op):
    x, residual = torch.randn(3, 8), torch.randn(3, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, h = op(x, residual=residual)
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(y, op(x + residual))


@pytest.mark.parametrize(
    ("dtype", "stream"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.float64),
        (torch.float64, torch.float32),
    ],
)
def test_streams_of_other_dtypes(op, dtype, stream):
    x, residual = torch.ones(2, 4, dtype=dtype), torch.ones(2, 4, dtype=stream)
    message = f"residual must have the dtype of x, or be float32 .* got residual.dtype={stream}"
    for backend in (None, "reference"):
        with pytest.raises(TypeError, match=message):
            op(x, residual=residual, backend=backend)
    raw = torch.ops.omniattn
    with pytest.raises(RuntimeError, match="rms_norm: residual must have the dtype of x"):
        raw.add_norm_only(x, residual, None, None, False, 1e-6, 0.0, False)
    stats = torch.ones(2, 2, dtype=torch.promote_types(dtype, torch.float32))
    for grad_h, h, name in ((None, residual, "h"), (residual, x, "grad_h")):
        message = f"rms_norm_backward: {name} must (have the dtype of grad_y, or )?be b?float"
        with pytest.raises(RuntimeError, match=message):
            raw.norm_backward(x, grad_h, h, None, stats, False, 0.0, False, False)


@pytest.mark.parametrize("name", ["opcheck", "compiled", "transforms"])
def test_a_half_branch_beside_an_fp32_stream_is_an_op_like_others(name):
    spec = testing.registry()["layer_norm"]
    testing.properties.PROPERTIES[name](spec, spec.case("stream"), torch.bfloat16)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 5)])
def test_empty(op, shape):
    x = torch.empty(shape, requires_grad=True)
    w = torch.ones(shape[-1], requires_grad=True)
    y = op(x, w)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert y.shape == dx.shape == x.shape
    assert torch.equal(dw, torch.zeros_like(w))


def test_without_gradients_equals_with(op):
    x, w, r = torch.randn(3, 40), torch.randn(40), torch.randn(3, 40)
    leaf = x.clone().requires_grad_()
    assert torch.equal(op(x, w), op(leaf, w))
    for a, b in zip(op(x, w, residual=r), op(leaf, w, residual=r), strict=True):
        assert torch.equal(a, b)


def test_second_derivatives(op):
    x, r = torch.randn(2, 2, 5, dtype=torch.float64).requires_grad_().unbind(0)
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(op, (x, w))

    def curvature(backend):
        def loss(x, r, w):
            y, h = op(x, w, residual=r, backend=backend)
            return (y**3 * h).sum()

        return torch.func.hessian(loss, argnums=(0, 1, 2))(x.detach(), r.detach(), w.detach())

    torch.testing.assert_close(curvature(None), curvature("reference"))


def test_forward_derivatives(op):
    x, w, t = (torch.randn(*size, dtype=torch.float64) for size in ((2, 5), (5,), (2, 5)))
    for f in (lambda x: op(x, w), lambda x: op(x, w, residual=t)[0]):
        assert_close = torch.testing.assert_close
        step = 1e-5 * t
        _, tangent = torch.func.jvp(f, (x,), (t,))
        assert_close(tangent, (f(x + step) - f(x - step)) / 2e-5, rtol=1e-5, atol=1e-6)


#: Class and module of a norm of transformers -> the call that rounds where it does.
CASTINGS = {
    "llama.LlamaRMSNorm": functools.partial(F.rms_norm, casting="llama"),
    "qwen3.Qwen3RMSNorm": functools.partial(F.rms_norm, casting="llama"),
    "deepseek_v3.DeepseekV3RMSNorm": functools.partial(F.rms_norm, casting="llama"),
    "gemma2.Gemma2RMSNorm": functools.partial(F.rms_norm, offset=1.0),
    "olmo2.Olmo2RMSNorm": F.rms_norm,
    "gpt_oss.GptOssRMSNorm": F.rms_norm,
    "mamba2.MambaRMSNormGated": functools.partial(
        F.rms_norm_gated, casting="llama", norm_before_gate=False, num_groups=4
    ),
    "qwen3_next.Qwen3NextRMSNormGated": functools.partial(F.rms_norm_gated, casting="llama"),
}


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASTINGS)
def test_half_inputs_are_rounded_where_transformers_rounds_them(name, dtype, isa):
    """Bit for bit, except where sums in another order meet a tie; other castings differ often."""
    module, _, kind = name.partition(".")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    gated = kind.endswith("Gated")
    sizes = {"group_size": 64} if module == "mamba2" else {}
    norm = getattr(models, kind)(256, eps=1e-5, **sizes).to(dtype)
    torch.nn.init.normal_(norm.weight)
    inputs = torch.randn(2, 40, 256).to(dtype)[: 2 if gated else 1]
    expected = norm(*inputs)

    def share_of_others(function):
        with testing.isa(isa):
            y = function(*inputs, norm.weight, eps=1e-5)
        torch.testing.assert_close(y, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        return (y != expected).double().mean().item()

    ours = CASTINGS[name]
    options = ours.keywords if isinstance(ours, functools.partial) else {}
    other = "fp32" if options.get("casting") == "llama" else "llama"
    function = F.rms_norm_gated if gated else F.rms_norm
    assert share_of_others(ours) < 2e-3
    assert share_of_others(functools.partial(function, **(options | {"casting": other}))) > 0.05


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(x=torch.ones(3).long()), TypeError, "x must be float64"),
        (dict(x=[1.0]), TypeError, "x must be a torch.Tensor"),
        (dict(x=torch.tensor(1.0)), ValueError, "at least 1 dimension"),
        (dict(weight=torch.ones(3)), ValueError, r"weight must have shape \(4,\)"),
        (dict(weight=torch.ones(1, 4)), ValueError, r"weight must have shape \(4,\)"),
        (dict(weight=torch.ones(4).double()), TypeError, "weight must have the dtype of x"),
        (dict(weight=1.0), TypeError, "weight must be a torch.Tensor"),
        (dict(weight=torch.ones(4, device="meta")), ValueError, "weight must be on the device"),
        (dict(eps=-1.0), ValueError, "eps must be a finite number >= 0"),
        (dict(eps=np.True_), TypeError, "eps must be a finite number >= 0"),
        (dict(eps=torch.tensor(True)), TypeError, "eps must be a finite number >= 0"),
        (dict(eps=float("nan")), ValueError, "eps must be a finite number >= 0"),
        (dict(residual=torch.ones(4)), ValueError, r"residual must have shape \(2, 4\)"),
        (dict(backend="tpu"), ValueError, "backend must be one of"),
    ],
)
def test_bad_input(op, arguments, error, message):
    with pytest.raises(error, match=f"{op.__name__}: .*{message}"):
        op(**({"x": torch.ones(2, 4)} | arguments))


def test_bad_casting():
    x = torch.ones(2, 4)
    with pytest.raises(TypeError, match="norm_before_gate must be True or False"):
        F.rms_norm_gated(x, x, norm_before_gate="no")
    with pytest.raises(ValueError, match=r"rms_norm: casting must be one of .*got casting='bf16'"):
        F.rms_norm(torch.ones(2, 4), casting="bf16")


def test_tensor_subclasses_keep_their_class():
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(2, 4).as_subclass(Tagged)
    y = F.rms_norm(x.requires_grad_())
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert type(F.rms_norm(x.detach())) is type(y) is type(grad) is Tagged


@pytest.mark.parametrize("groups", [2, 2**63 - 1])
def test_an_empty_row_is_one_group(groups):
    """Every number divides 0, and kernels would count as many groups as they are told."""
    x = torch.zeros(3, 0)
    with pytest.raises(ValueError, match=f"group_norm: num_groups must divide .*={groups}"):
        F.group_norm(x, num_groups=groups)
    with pytest.raises(RuntimeError, match=f"groups must divide .*got groups={groups}"):
        torch.ops.omniattn.gated_norm_only(x, *[None] * 3, groups, 0, 2, False, 1e-6, False)
    assert F.group_norm(x, num_groups=1).shape == x.shape
