"""Linear layers, MLPs, norms before them and blocks of flash-attn and mamba-ssm."""

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn.compat import flash_attn, mamba_ssm

ACTS = {
    "gelu_approx": lambda x: nnf.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "sqrelu": lambda x: x.relu().square(),
}


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def same(found, wanted, leaves):
    torch.testing.assert_close(found, wanted)
    pairs = [
        torch.autograd.grad(t.square().sum(), leaves, retain_graph=True) for t in (found, wanted)
    ]
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("checkpoint_lvl", [0, 2])
@pytest.mark.parametrize("activation", ACTS)
def test_mlps(activation, checkpoint_lvl):
    x, layer = (
        draw(2, 5, 4),
        flash_attn.FusedMLP(
            4, 6, 3, activation=activation, checkpoint_lvl=checkpoint_lvl, return_residual=True
        ),
    )
    layer = layer.double()
    y, residual = layer(x)
    assert residual is x
    same(y, layer.fc2(ACTS[activation](layer.fc1(x))), (x, *layer.parameters()))
    if activation == "sqrelu":
        other = flash_attn.FusedDenseSqreluDense(4, 6, 3).double()
        other.load_state_dict(layer.state_dict())
        torch.testing.assert_close(other(x), y)
    with pytest.raises(ValueError, match="fused_mlp_func: activation must be"):
        flash_attn.fused_mlp_func(x, layer.fc1.weight, layer.fc2.weight, activation="silu")
    with pytest.raises(NotImplementedError, match="fused_mlp_func: process_group must be None"):
        layer(x, process_group=object())


def test_linear_layers_and_activations():
    x, layer = draw(2, 5, 4), flash_attn.FusedDense(4, 3, return_residual=True).double()
    y, residual = layer(x)
    assert residual is x
    same(y, nnf.linear(x, layer.weight, layer.bias), (x, *layer.parameters()))
    bias = draw(4, seed=1)
    same(flash_attn.swiglu(x, x + 1), nnf.silu(x) * (x + 1), (x,))
    same(flash_attn.bias_gelu(x, bias), ACTS["gelu_approx"](x + bias), (x, bias))


@pytest.mark.parametrize("library", [flash_attn, mamba_ssm])
@pytest.mark.parametrize("rms", [False, True])
def test_a_norm_and_a_linear_layer(library, rms):
    x, residual, w, b = draw(2, 5, 4), draw(2, 5, 4, seed=1), draw(4, seed=2), draw(4, seed=3)
    weight, bias = draw(3, 4, seed=4), draw(3, seed=5)
    y, h = library.layer_norm_linear_fn(
        x, w, b, weight, bias, residual, 0.1, prenorm=True, is_rms_norm=rms
    )
    total = x + residual
    normed = (
        nnf.rms_norm(total, (4,), w, 0.1) + b if rms else nnf.layer_norm(total, (4,), w, b, 0.1)
    )
    torch.testing.assert_close(h, total)
    same(y, nnf.linear(normed, weight, bias), (x, residual, w, b, weight, bias))
    alone = library.layer_norm_linear_fn(x, w, None, weight, None, eps=0.1, is_rms_norm=True)
    torch.testing.assert_close(alone, nnf.rms_norm(x, (4,), w, 0.1) @ weight.T)


@pytest.mark.parametrize("rms", [False, True])
def test_norms_of_parallel_residuals(rms):
    x0, x1, residual = (draw(2, 5, 4, seed=n) for n in range(3))
    w0, b0, w1, b1 = (draw(4, seed=n) for n in range(3, 7))
    kind = "rms_norm" if rms else "layer_norm"
    function = getattr(flash_attn, f"dropout_add_{kind}_parallel_residual")

    def norm(h, w, b):
        return nnf.rms_norm(h, (4,), w, 0.1) + b if rms else nnf.layer_norm(h, (4,), w, b, 0.1)

    h = x0 + x1 + residual
    found = function(x0, x1, residual, w0, b0, w1, b1, 0.0, 0.1, prenorm=True)
    torch.testing.assert_close(found, (norm(h, w0, b0), norm(h, w1, b1), h))
    y, none = function(x0, None, None, w0, b0, None, None, 0.0, 0.1)
    assert none is None
    torch.testing.assert_close(y, norm(x0, w0, b0))


def test_inverse_rotations():
    x, angles = draw(2, 5, 3, 6), draw(9, 3, seed=1).detach()
    cos, sin = angles.cos(), angles.sin()
    turned = flash_attn.apply_rotary(x, cos, sin, 2, interleaved=True)
    torch.testing.assert_close(turned, flash_attn.apply_rotary_emb(x, cos, sin, True, False, 2))
    back = flash_attn.apply_rotary(turned, cos, sin, 2, interleaved=True, conjugate=True)
    torch.testing.assert_close(back, x)
    with pytest.raises(ValueError, match="apply_rotary: x must have shape"):
        flash_attn.apply_rotary(x[0], cos, sin)


def test_mlp_of_mamba():
    layer, x = mamba_ssm.GatedMLP(6, multiple_of=5).double(), draw(2, 5, 6)
    assert layer.fc1.weight.shape == (40, 6) and layer.fc1.bias is None
    y, gate = layer.fc1(x).chunk(2, -1)
    same(layer(x), layer.fc2(y * nnf.silu(gate)), (x, *layer.parameters()))


class Scale(nn.Module):
    """A mixer of tests."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 3.0))

    def forward(self, x, inference_params=None, factor=1.0):
        return x * self.weight * factor

    def allocate_inference_cache(self, *sizes, dtype=None):
        return sizes, dtype


@pytest.mark.parametrize("norm", [nn.LayerNorm, mamba_ssm.RMSNorm])
@pytest.mark.parametrize("mlp", [nn.Identity, mamba_ssm.GatedMLP])
def test_blocks(norm, mlp):
    x, former = draw(2, 5, 6), draw(2, 5, 6, seed=1)
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        block = mamba_ssm.Block(6, Scale, mlp, norm, fused_add_norm=fused).double()
        results.append(block(x, former, factor=2.0))
        torch.testing.assert_close(block(x)[1] if mlp is nn.Identity else x, x)
    torch.testing.assert_close(*results)
    total = x + former
    wanted = 6 * block.norm(total)
    if mlp is not nn.Identity:
        total = total + wanted
        wanted = block.mlp(block.norm2(total))
    torch.testing.assert_close(results[0], (wanted, total))
    assert block.allocate_inference_cache(2, 5) == ((2, 5), None)
    half = mamba_ssm.Block(6, Scale, mlp, norm, residual_in_fp32=True).bfloat16()
    assert half(x.bfloat16())[1].dtype == torch.float32
    with pytest.raises(ValueError, match="Block: norm_cls must be LayerNorm or RMSNorm"):
        mamba_ssm.Block(6, Scale, mlp, Scale, fused_add_norm=True)
