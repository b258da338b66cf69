"""MesaNet's layer: its formula, decoding, parameters."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.modules import MesaNet

DIM = 12


def made(gate=None):
    torch.manual_seed(0)
    layer = MesaNet(DIM, 2, head_dim=4, gate=gate, init_std=0.3, dtype=torch.float64)
    return layer, torch.randn(2, 7, DIM, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("gate", [None, "silu"])
def test_formula_and_decoding(gate):
    layer, x = made(gate)

    def part(name):
        y = nnf.linear(x, getattr(layer, f"{name}_proj").weight)
        if name != "v":
            weight = getattr(layer, f"{name}_conv1d").weight
            y = nnf.silu(nnf.conv1d(nnf.pad(y.mT, (3, 0)), weight, groups=8).mT)
        y = y.unflatten(-1, (2, 4))
        return y if name == "v" else y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)

    q, k, v = map(part, "qkv")
    decay, beta = layer.a_proj(x).sigmoid(), layer.b_proj(x).sigmoid()
    lamb = (nnf.softplus(layer.lambda_params) + 0.25).view(2, 4)
    kk, kv, out = 0.0, 0.0, []
    for t in range(7):
        key = (beta[:, t, :, None] * k[:, t])[..., None]
        kk = decay[:, t, :, None, None] * kk + key * k[:, t, :, None]
        kv = decay[:, t, :, None, None] * kv + key * v[:, t, :, None]
        w = torch.linalg.solve(kk + torch.diag_embed(lamb), q[:, t])
        out.append((w[..., None] * kv).sum(-2))
    o = torch.stack(out, 1)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5)
    if gate is not None:
        o = o * nnf.silu(layer.g_proj(x).unflatten(-1, (2, 4)))
    y = layer(x)
    torch.testing.assert_close(y, nnf.linear(o.flatten(-2), layer.o_proj.weight))
    state = layer.new_state(2, 7)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 3), (3, 4), (4, 5), (5, 7))]
    torch.testing.assert_close(torch.cat(parts, 1), y)


@torch.no_grad()
def test_decoding_has_steps_of_its_own():
    layer, x = made()
    config = layer.config
    few = MesaNet.Config(DIM, 2, head_dim=4, init_std=0.3, max_cg_step_decoding=1)
    other = few.build(dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    assert config.max_cg_step_decoding == 30 and torch.equal(other(x), layer(x))
    ours, theirs = layer.new_state(2, 7), other.new_state(2, 7)
    assert torch.equal(layer(x[:, :6], state=ours), other(x[:, :6], state=theirs))
    assert not torch.allclose(layer(x[:, 6:], state=ours), other(x[:, 6:], state=theirs))


def test_parameters_have_the_shapes_of_fla():
    """Names and shapes of its layer with hidden_size=12, num_heads=2, head_dim=4."""
    layer = MesaNet(12, 2, head_dim=4)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["a_proj.bias"] == shapes["b_proj.bias"] == (2,)
    assert shapes["lambda_params"] == (8,) and "v_conv1d.weight" not in shapes
    assert shapes["q_conv1d.weight"] == (8, 1, 4) and shapes["o_norm.weight"] == (4,)
    lamb = nnf.softplus(layer.lambda_params) + layer.config.lambda_lower_bound
    torch.testing.assert_close(lamb, torch.ones(8))
    with pytest.raises(ValueError, match="MesaNet: num_v_heads must be num_heads"):
        MesaNet(12, 2, num_v_heads=4)
    with pytest.raises(ValueError, match="MesaNet: lambda_lower_bound must be in"):
        MesaNet(12, 2, lambda_lower_bound=1.0)
