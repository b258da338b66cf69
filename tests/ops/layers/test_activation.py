"""Tests of the GLU family beyond its specs: remainders, packing, extremes, bad input."""

import pytest
import torch

import omniattn.functional as F
from omniattn import reference, testing
from omniattn.ops.activation import ACTIVATIONS, CLAMPED, encode

FAMILY = ["swiglu", "geglu", "reglu", "bilinear", "clamped_swiglu"]


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("n", [1, 17, 31, 32, 33, 65, 4096, 4097])
@pytest.mark.parametrize("name", FAMILY)
def test_every_remainder_packed_and_not(name, n, isa):
    for dtype in (torch.float32, torch.bfloat16):
        packed = torch.randn(3, 2 * n).to(dtype).requires_grad_()
        gate, up = (t.detach().clone().requires_grad_() for t in packed.chunk(2, -1))
        grad = torch.randn(3, n).to(dtype)
        with testing.isa(isa):
            y, y_packed = getattr(F, name)(gate, up), getattr(F, name)(packed)
            halves = torch.autograd.grad(y, (gate, up), grad)
            (whole,) = torch.autograd.grad(y_packed, packed, grad)
        torch.testing.assert_close(y, getattr(reference, name)(gate, up))
        assert torch.equal(y, y_packed)
        torch.testing.assert_close(whole, torch.cat(halves, -1), rtol=0, atol=0)


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("name", FAMILY)
def test_extremes(name, isa):
    gate = torch.tensor([-1e30, -200.0, -88.0, -30.0, 0.0, 30.0, 88.0, 200.0, 1e30])
    gate.requires_grad_()
    with testing.isa(isa):
        y = getattr(F, name)(gate, torch.ones(9))
        (slope,) = torch.autograd.grad(y.sum(), gate)
    expected = getattr(reference, name)(gate, torch.ones(9))
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=1e-30)
    assert slope.isfinite().all()
    nan = getattr(F, name)(torch.full((20,), float("nan")), torch.ones(20))
    assert nan.isnan().all()


@pytest.mark.parametrize("name", FAMILY)
def test_second_derivatives(name):
    gate = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    up = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(getattr(F, name), (gate, up))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(gate=torch.ones(3)), ValueError, "even last size"),
        (dict(gate=torch.ones(2).int()), TypeError, "gate must be float64"),
        (dict(gate=torch.tensor(1.0)), ValueError, "at least 1 dimension"),
        (dict(up=torch.ones(3)), ValueError, r"up must have shape \(2,\)"),
        (dict(up=torch.ones(2).half()), TypeError, "up must have the dtype of gate"),
        (dict(up=2.0), TypeError, "up must be a torch.Tensor"),
    ],
)
@pytest.mark.parametrize("name", FAMILY)
def test_bad_input(name, arguments, error, message):
    with pytest.raises(error, match=f"{name}: .*{message}"):
        getattr(F, name)(**({"gate": torch.ones(2)} | arguments))


def test_bad_approximation():
    with pytest.raises(ValueError, match='approximate must be one of "none", "tanh"'):
        F.geglu(torch.ones(2), approximate="erf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ACTIVATIONS, CLAMPED])
def test_gradients_written_over_others_are_the_same(name, dtype):
    ops = torch.ops.omniattn
    act, clamp = encode(name, 1.702, 0.7)
    grad, gate, up = torch.randn(3, 9, 83, dtype=dtype).unbind()
    dgate, dup = ops.glu_backward(grad, gate, up, act, clamp)
    over_grad, spare = grad.clone(), torch.full_like(gate, torch.nan)
    ops.glu_backward_(over_grad, gate, up, act, clamp, spare)
    assert torch.equal(spare, dgate) and torch.equal(over_grad, dup)
    ones = torch.ones_like(gate)
    assert torch.equal(ops.activate(gate, act), ops.glu(gate, ones, act, []))
    over_grad = grad.clone()
    ops.activate_backward_(over_grad, gate, act)
    assert torch.equal(over_grad, ops.glu_backward(grad, gate, ones, act, [])[0])


def test_clamped_inputs_have_no_gradient_and_the_others_that_of_gpt_oss():
    gate = torch.tensor([-9.0, -1.0, 6.9, 7.1, 0.5, 2.0], requires_grad=True)
    up = torch.tensor([0.5, -7.5, 7.5, 1.0, -6.5, 0.0], requires_grad=True)
    y = F.clamped_swiglu(gate, up)
    g, u = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = g * torch.sigmoid(1.702 * g) * (u + 1)  # GptOssExperts of transformers
    torch.testing.assert_close(y, expected)
    got, want = (torch.autograd.grad(t.sum(), (gate, up)) for t in (y, expected))
    torch.testing.assert_close(got, want)
    assert got[0][3] == 0 and got[1][1] == got[1][2] == 0
    for wrong in ({"alpha": 0.0}, {"limit": -1.0}):
        with pytest.raises(ValueError, match=f"clamped_swiglu: {next(iter(wrong))} must be"):
            F.clamped_swiglu(gate, up, **wrong)
