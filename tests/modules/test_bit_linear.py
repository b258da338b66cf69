"""BitLinear: the formula of fla, its straight-through gradients, in blocks, and its errors."""

import pytest
import torch

from omniattn import functional
from omniattn.modules import MLP, BitLinear

F64 = torch.float64


def by_fla(x, weight, norm_weight, eps):
    """Computes BitLinear.forward of fla-org/flash-linear-attention, commit bc3b101d."""
    u = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * norm_weight
    scale = 127.0 / u.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
    rounded = (u * scale).round().clamp(-128, 127) / scale
    scale = 1.0 / weight.abs().mean().clamp(min=1e-5)
    ternary = (weight * scale).round().clamp(-1, 1) / scale
    return (u + (rounded - u).detach()) @ (weight + (ternary - weight).detach()).T


def layer(**options):
    torch.manual_seed(0)
    made = BitLinear(in_features=12, out_features=5, dtype=F64, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_formula_of_fla(backend):
    ours, x = layer(backend=backend), torch.randn(2, 7, 12, dtype=F64, requires_grad=True)
    leaves, grad = [x, ours.weight, ours.norm.weight], torch.randn(2, 7, 5, dtype=F64)
    y, want = ours(x), by_fla(*leaves, 1e-8)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(
        torch.autograd.grad(y, leaves, grad), torch.autograd.grad(want, leaves, grad)
    )


def test_values():
    ours = layer(bias=True)
    x = torch.randn(9, 12, dtype=F64)
    torch.testing.assert_close(ours(x) - ours.bias, by_fla(x, ours.weight, ours.norm.weight, 1e-8))
    weights = functional.bit_linear(torch.eye(12, dtype=F64), ours.weight)
    assert len(weights.detach().round(decimals=9).unique()) == 3
    torch.testing.assert_close(ours(0 * x), ours.bias.expand(9, 5))
    nested = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)
    torch.testing.assert_close(torch.cat(ours(nested).unbind()), ours(x))
    assert ours(x[:0]).shape == (0, 5)


def test_layers_call_it():
    mlp, x = MLP(dim=12, hidden_dim=5, bias=False, dtype=F64), torch.randn(3, 12, dtype=F64)
    mlp.up_proj = layer()
    hidden = torch.nn.functional.gelu(mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), hidden @ mlp.down_proj.weight.T)


def test_errors():
    with pytest.raises(TypeError, match=r"^bit_linear: x must be"):
        functional.bit_linear(torch.ones(2, 3, dtype=torch.int64), torch.ones(4, 3))
    with pytest.raises(ValueError, match="norm_eps must be"):
        layer(norm_eps=-1.0)
