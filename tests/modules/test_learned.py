"""DyT, xIELU and PolyNorm: their papers' forms, in blocks and in MLPs."""

import pytest
import torch
import torch.nn.functional as F

from omniattn.modules import (
    MLP,
    XIELU,
    Attention,
    DecoderBlock,
    DynamicTanh,
    PolyNorm,
)

F64 = torch.float64


def drawn(layer):
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def test_dynamic_tanh():
    norm = drawn(DynamicTanh(6, dtype=F64))
    x, residual = torch.randn(2, 3, 6, dtype=F64), torch.randn(2, 3, 6, dtype=F64)
    want = norm.weight * torch.tanh(norm.alpha * (x + residual)) + norm.bias
    y, h = norm(x, residual)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(norm(x + residual), want)
    torch.testing.assert_close(h, x + residual, rtol=0, atol=0)
    assert DynamicTanh(6, bias=False).bias is None
    block = DecoderBlock(
        Attention.Config(6, 2), MLP.Config(6, 12), DynamicTanh.Config(6), dtype=F64
    )
    x, residual = block(x)
    assert (x + residual).shape == (2, 3, 6)


def test_xielu_is_that_of_transformers():
    theirs = pytest.importorskip("transformers.activations").XIELUActivation(dtype=torch.float32)
    ours, x = XIELU(), torch.linspace(-4, 4, 33, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x))
    grads = [
        torch.autograd.grad(act(x).square().sum(), [x, act.alpha_p, act.alpha_n])
        for act in (ours, theirs)
    ]
    torch.testing.assert_close(*grads)
    assert ours(torch.zeros(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="XIELU: alpha_n must be"):
        XIELU(alpha_n=0.4)


def test_poly_norm_and_mlp():
    layer = drawn(MLP(6, 10, learned=PolyNorm.Config(), dtype=F64))
    x = torch.randn(2, 3, 6, dtype=F64)
    up = F.linear(x, layer.up_proj.weight, layer.up_proj.bias)
    norms = [F.rms_norm(up**power, (10,), eps=1e-6) for power in (3, 2, 1)]
    hidden = sum(w * norm for w, norm in zip(layer.act.weight, norms, strict=True)) + layer.act.bias
    want = F.linear(hidden, layer.down_proj.weight, layer.down_proj.bias)
    torch.testing.assert_close(layer(x), want)
    again = MLP(6, 10, learned=PolyNorm.Config(), recompute=True, dtype=F64)
    again.load_state_dict(layer.state_dict())
    grads = [torch.autograd.grad(m(x).sum(), [*m.parameters()]) for m in (layer, again)]
    torch.testing.assert_close(*grads)
