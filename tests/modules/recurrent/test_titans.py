"""Titans' layer: its formula, decoding, bounded memory, parameters."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.modules import TitansLinear, TitansMLP

DIM, C = 12, 3
MODES = {"silu": {}, "residual": {"gate": None, "residual_norm": True, "max_step": 0.5}}


def made(mode):
    torch.manual_seed(0)
    options = {"mini_batch_size": C, "init_std": 0.4, "dtype": torch.float64}
    layer = TitansLinear(DIM, 2, head_dim=4, **MODES[mode], **options)
    for name in ("memory_norm_weight", "memory_norm_bias", "alpha_proj.bias"):
        if name in dict(layer.named_parameters()):
            torch.nn.init.normal_(layer.get_parameter(name))
    return layer, torch.randn(2, 8, DIM, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_formula_and_decoding(mode):
    """By the gradients of autograd, one token after another."""
    layer, x = made(mode)

    def part(name):
        rows = nnf.linear(x, getattr(layer, f"{name}_proj").weight)
        weight = getattr(layer, f"{name}_conv1d").weight
        rows = nnf.silu(nnf.conv1d(nnf.pad(rows.mT, (3, 0)), weight, groups=8).mT)
        rows = rows.unflatten(-1, (2, 4))
        return rows if name == "v" else rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def applied(rows, memory, base):
        z = torch.einsum("bhk,bhkv->bhv", rows, memory)
        if layer.memory_norm_weight is None:
            return z
        normed = nnf.layer_norm(z, (4,), eps=1e-6) * layer.memory_norm_weight
        return (rows if base == "key" else z) + normed + layer.memory_norm_bias

    q, k, v = map(part, "qkv")
    alpha, eta, share = (
        getattr(layer, f"{name}_proj")(x).sigmoid()[..., None, None]
        for name in ("alpha", "eta", "theta")
    )
    theta = layer.config.max_step * (1 - eta) * share / C
    memory = layer.M.detach().expand(2, -1, -1, -1)
    surprise, out = torch.zeros_like(memory), []
    for t in range(8):
        if t % C == 0:
            start = memory.clone()
        with torch.enable_grad():
            at = start.clone().requires_grad_()
            loss = (applied(k[:, t], at, "key") - v[:, t]).square().sum()
            (slope,) = torch.autograd.grad(loss, at)
        surprise = eta[:, t] * surprise - theta[:, t] * slope
        memory = (1 - alpha[:, t]) * memory + surprise
        out.append(applied(q[:, t], memory, "output"))
    o = torch.stack(out, 1)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    if layer.config.gate is not None:
        o = o * nnf.silu(layer.g_proj(x).unflatten(-1, (2, 4)))
    y = layer(x)
    torch.testing.assert_close(y, nnf.linear(o.flatten(-2), layer.o_proj.weight))
    state = layer.new_state(2, 8)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 2), (2, 3), (3, 7), (7, 8))]
    torch.testing.assert_close(torch.cat(parts, 1), y)
    assert state["position"].tolist() == [8, 8]


def test_gradients_reach_all_parameters():
    for mode in MODES:
        layer, x = made(mode)
        layer(x).square().sum().backward()
        assert [n for n, p in layer.named_parameters() if p.grad is None] == []


@torch.no_grad()
@pytest.mark.parametrize(("max_step", "bound"), [(1.0, 1.1), (0.5, 0.1)])
@pytest.mark.parametrize("eta", [-4.0, 0.0, 4.0])
def test_equal_keys_do_not_diverge(eta, max_step, bound):
    """A key is seen 1024 times: memory is bounded for the largest steps, and learns with half."""
    layer = TitansLinear(4, 1, conv_size=0, mini_batch_size=16, max_step=max_step)
    for name, value in (("theta", 50.0), ("alpha", -50.0), ("eta", eta)):
        proj = layer.get_submodule(f"{name}_proj")
        proj.weight.zero_()
        proj.bias.fill_(value)
    key = torch.tensor([1.0, 0, 0, 0]).expand(1, 1024, 1, 4)
    o, _ = layer.recur(key, key, key, key[:, :, 0], cu_seqlens=None, initial_state=None)
    assert float((o - key).abs().max()) < 1.1 and float((o - key)[:, -64:].abs().max()) < bound


def test_sizes_and_errors():
    layer = TitansLinear(12, 2, head_dim=4, v_head_dim=6)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["M"] == (2, 4, 6) and "memory_norm_weight" not in shapes
    assert all(shapes[f"{name}_proj.bias"] == (2,) for name in ("theta", "alpha", "eta"))
    for options, message in (
        ({"num_v_heads": 4}, "num_v_heads must be num_heads"),
        ({"max_step": 1.5}, r"max_step must be in \(0, 1\]"),
        ({"v_head_dim": 8, "residual_norm": True}, "v_head_dim must be head_dim"),
    ):
        with pytest.raises(ValueError, match=f"TitansLinear: {message}"):
            TitansLinear(12, 2, **options)


@torch.no_grad()
@pytest.mark.parametrize("depth", [2, 3])
def test_the_layer_of_a_deep_memory(depth):
    """q, k and the gates are those of the linear layer, M is learned, and the state continues."""
    torch.manual_seed(0)
    options = {"conv_size": 0, "mini_batch_size": 3, "init_std": 0.4, "dtype": torch.float64}
    layer = TitansMLP(12, 2, depth=depth, memory_dim=5, **options)
    x = torch.randn(2, 8, 12, dtype=torch.float64)
    q, k, v = (nnf.silu(getattr(layer, f"{n}_proj")(x)).unflatten(-1, (2, 6)) for n in "qkv")
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    alpha, eta = layer.alpha_proj(x).sigmoid(), layer.eta_proj(x).sigmoid()
    theta = layer.theta_proj(x).sigmoid() * (1 - eta) / 3
    first = layer.M.expand(2, -1, -1)
    o, _ = functional.titans_mlp(
        *(q, k, v, theta, alpha, eta),
        initial_state=(first, 0 * first, first),
        hidden=[5] * (depth - 1),
        mini_batch_size=3,
    )
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    o = o * nnf.silu(layer.g_proj(x).unflatten(-1, (2, 6)))
    y = layer(x)
    torch.testing.assert_close(y, nnf.linear(o.flatten(-2), layer.o_proj.weight))
    state = layer.new_state(2, 8)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 2), (2, 3), (3, 7), (7, 8))]
    torch.testing.assert_close(torch.cat(parts, 1), y)


def test_a_deep_memory_learns_a_key():
    """The output approaches a value that comes again and again."""
    layer = TitansMLP(8, 1, conv_size=0, mini_batch_size=4, max_step=0.5)
    with torch.no_grad():
        for name, value in (("theta", 50.0), ("alpha", -50.0), ("eta", 0.0)):
            proj = layer.get_submodule(f"{name}_proj")
            proj.weight.zero_()
            proj.bias.fill_(value)
    key = torch.eye(8)[0].expand(1, 256, 1, 8)
    o, _ = layer.recur(key, key, key, key[:, :, 0], cu_seqlens=None, initial_state=None)
    assert (o - key)[:, -16:].abs().max() < 0.01
    assert TitansMLP(8, 2).M.shape == (2, 64) and TitansMLP(8, 2, depth=3).M.shape == (2, 128)
    assert 0.8 < TitansMLP(64, 1).M[0, : 64 * 128].std() * 8 < 1.2
    with pytest.raises(ValueError, match="TitansMLP: depth must be at least 2"):
        TitansMLP(8, 2, depth=1)
