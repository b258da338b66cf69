"""Layers of MesaNet and Gated KalmaNet: formulas, decoding, parameters."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.modules import GatedKalmaNet, MesaNet

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


@torch.no_grad()
@pytest.mark.parametrize("decay", ["both", "values", "none"])
@pytest.mark.parametrize("gated", [True, False])
def test_the_formula_of_kalmanet(gated, decay):
    """The parameters of its layer in fla give fla's results: heads of 4, ridges of 0.02 |H|."""
    torch.manual_seed(0)
    options = {} if gated else {"weighted": False, "mixed": False, "gate": None}
    layer = GatedKalmaNet(DIM, 2, decay=decay, **options, init_std=0.5, dtype=torch.float64)
    x = torch.randn(2, 7, DIM, dtype=torch.float64)

    def part(name):
        y = nnf.linear(x, getattr(layer, f"{name}_proj").weight)
        weight = getattr(layer, f"{name}_conv1d").weight
        y = nnf.silu(nnf.conv1d(nnf.pad(y.mT, (3, 0)), weight, groups=DIM).mT).unflatten(-1, (2, 6))
        return y if name == "v" else y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)

    q, k, v = map(part, "qkv")
    beta = layer.b_proj(x).sigmoid() + 1e-6 if gated else torch.ones(2, 7, 2)
    alpha = layer.alpha_proj(x).sigmoid() if gated else torch.ones(2, 7, 2)
    keep = 1.0
    if decay != "none":
        keep = torch.exp(-layer.A_log.exp() * nnf.softplus(layer.a_proj(x) + layer.dt_bias))
        keep = keep[..., None, None]
    kk, kv, out = torch.zeros(2, 2, 6, 6).double(), torch.zeros(2, 2, 6, 6).double(), []
    for t in range(7):
        key, value = ((beta[:, t, :, None] * y[:, t])[..., None] for y in (k, v))
        kk = (keep[:, t] if decay == "both" else 1.0) * kk + key * key.mT
        kv = (1.0 if decay == "none" else keep[:, t]) * kv + key * value.mT
        ridge = 0.02 * torch.linalg.matrix_norm(kk)[..., None, None] * torch.eye(6).double()
        w = torch.linalg.solve(kk + ridge, q[:, t])
        w = q[:, t] + alpha[:, t, :, None] * (w - q[:, t])
        out.append((w[..., None] * kv).sum(-2) / 6**0.5)
    o = torch.stack(out, 1)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-6)
    if gated:
        o = o * nnf.silu(layer.g_proj(x).unflatten(-1, (2, 6)))
    torch.testing.assert_close(layer(x), nnf.linear(o.flatten(-2), layer.o_proj.weight))


def test_options_of_kalmanet():
    """Names and shapes as in fla; without a part of the gates their parameters are absent."""
    shapes = {name: tuple(p.shape) for name, p in GatedKalmaNet(12, 2).named_parameters()}
    assert shapes["alpha_proj.bias"] == shapes["b_proj.bias"] == shapes["A_log"] == (2,)
    assert shapes["a_proj.weight"] == (2, 12) and "a_proj.bias" not in shapes
    assert shapes["v_conv1d.weight"] == (12, 1, 4) and shapes["o_norm.weight"] == (6,)
    bare = GatedKalmaNet(12, 2, weighted=False, mixed=False, decay="none", gate=None)
    names = {name.split(".")[0] for name, _ in bare.named_parameters()}
    assert not names & {"a_proj", "b_proj", "alpha_proj", "A_log", "dt_bias", "g_proj"}
    for wrong in ({"decay": "keys"}, {"ridge_ratio": 0.0}, {"num_v_heads": 4}):
        with pytest.raises(ValueError, match=f"GatedKalmaNet: {next(iter(wrong))} must be"):
            GatedKalmaNet(12, 2, **wrong)
