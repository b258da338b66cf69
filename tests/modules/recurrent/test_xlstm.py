"""The layers of xLSTM: their formulas, steps and how their parameters begin."""

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn.models import BlocksConfig, generate
from omniattn.modules import MLSTM, SLSTM, DecoderBlock, GatedMLP, LayerNorm

DIM, HEADS = 24, 3
CONFIGS = {
    "m": MLSTM.Config(DIM, HEADS, inner_dim=36, eps=0.0),
    "m, no convolution": MLSTM.Config(DIM, HEADS, conv_size=0, inner_dim=12, block_size=2),
    "s": SLSTM.Config(DIM, HEADS),
    "s, no convolution": SLSTM.Config(DIM, HEADS, conv_size=0),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    layer = CONFIGS[name].build(dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def inputs(steps: int = 9) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, steps, DIM, dtype=torch.float64)


def convolved(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if layer.conv1d is None:
        return x
    conv = layer.conv1d
    y = nnf.conv1d(nnf.pad(x.mT, (3, 0)), conv.weight, conv.bias, groups=x.shape[-1])
    return nnf.silu(y).mT


def blocks(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nnf.linear(x, torch.block_diag(*part.weight))


def heads(t: torch.Tensor) -> torch.Tensor:
    return t.unflatten(-1, (HEADS, -1))


def normed(layer: nn.Module, out: list[torch.Tensor]) -> torch.Tensor:
    h = torch.stack(out, 1)
    h = nnf.layer_norm(h, h.shape[-1:], eps=layer.config.norm_eps)
    return h.flatten(2) * (1 + layer.norm_weight)


def mlstm(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Without a stabiliser."""
    u, z = nnf.linear(x, layer.proj_up.weight).chunk(2, -1)
    c = convolved(layer, u)
    q, k, v = blocks(layer.q_proj, c), blocks(layer.k_proj, c), blocks(layer.v_proj, u)
    gates = torch.cat((q, k, v), -1)
    i = nnf.linear(gates, layer.igate.weight, layer.igate.bias).exp()
    f = nnf.linear(gates, layer.fgate.weight, layer.fgate.bias).sigmoid()
    q, k, v = heads(q), heads(k) / (q.shape[-1] // HEADS) ** 0.5, heads(v)
    matrix, n, out = 0, 0, []
    for t in range(x.shape[1]):
        new = i[:, t, :, None] * k[:, t]
        matrix = f[:, t, :, None, None] * matrix + new[..., None] * v[:, t, :, None]
        n = f[:, t, :, None] * n + new
        den = (n * q[:, t]).sum(-1).abs().clamp(min=1)
        out.append(torch.einsum("bhkv,bhk->bhv", matrix, q[:, t]) / den[..., None])
    mixed = (normed(layer, out) + layer.learnable_skip * c) * nnf.silu(z)
    return nnf.linear(mixed, layer.proj_down.weight)


def slstm(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Without a stabiliser."""
    conv = convolved(layer, x)
    inner = {"i": conv, "f": conv, "z": x, "o": x}
    w = [heads(blocks(getattr(layer, f"{name}gate"), y)) for name, y in inner.items()]
    c, n, out = 0, 0, []
    h = torch.zeros_like(w[0][:, 0])
    for t in range(x.shape[1]):
        i, f, z, o = (
            part[:, t] + b + torch.einsum("bhd,hde->bhe", h, r)
            for part, b, r in zip(w, layer.bias, layer.recurrent, strict=True)
        )
        c = f.sigmoid() * c + i.exp() * z.tanh()
        n = f.sigmoid() * n + i.exp()
        h = o.sigmoid() * c / n
        out.append(h)
    return normed(layer, out)


@pytest.mark.parametrize("name", CONFIGS)
def test_formula(name):
    layer, x = made(name), inputs()
    expected = (mlstm if name.startswith("m") else slstm)(layer, x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)  # eps of mlstm


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_goes_on_from_a_state(name):
    layer, x = made(name), inputs()
    state = layer.new_state(2, 9)
    parts = [layer(part, state=state) for part in x.split([2, 1, 0, 5, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    assert state.length == 9 and state.nbytes == layer.new_state(2, 10_000).nbytes
    saved, again = state.state_dict(), layer.new_state(2, 9)
    again.load_state_dict(saved)
    for other in (state, again):
        other.reorder(torch.tensor([1, 0]))
    assert layer(x, state=state).equal(layer(x, state=again))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_a_gradient(name):
    layer, x = made(name), inputs().requires_grad_()
    layer(x).pow(3).sum().backward()
    for parameter, value in [("x", x), *layer.named_parameters()]:
        assert value.grad is not None and value.grad.abs().max() > 0, parameter


@pytest.mark.parametrize("layer", [MLSTM, SLSTM])
def test_half_states_are_fp32(layer):
    half = layer(8, 2, dtype=torch.bfloat16)
    state = half.new_state(1, 4)
    assert state["c" if layer is MLSTM else "s"].dtype == torch.float32
    assert state["conv"].dtype == torch.bfloat16
    with torch.no_grad():
        assert half(torch.randn(1, 3, 8).bfloat16(), state=state).dtype == torch.bfloat16


def test_parameters_begin_as_in_the_paper():
    torch.manual_seed(0)
    m, s = MLSTM(256, 4, 0, 2), SLSTM(64, 2, 1, 3)
    assert m.config.inner == 512 and MLSTM.Config(40, 2).inner == 128
    torch.testing.assert_close(m.fgate.bias, torch.tensor([3.0, 4.0, 5.0, 6.0]))
    assert not m.fgate.weight.any() and not m.igate.weight.any() and m.igate.bias.std() < 0.5
    assert m.proj_up.weight.std().item() == pytest.approx((0.4 / 256) ** 0.5, rel=0.05)
    assert m.proj_down.weight.std().item() == pytest.approx(1 / 16, rel=0.05)
    n = torch.arange(32) / 31
    torch.testing.assert_close(s.bias[1, 0], 5 - 12 * n ** (0.3 + 1.3 * 0.5))
    assert not s.recurrent.any() and not s.bias[[0, 2, 3]].any()


@torch.no_grad()
def test_a_decoder_generates():
    torch.manual_seed(0)
    mlp, norm = GatedMLP.Config(DIM, 32, "geglu"), LayerNorm.Config(DIM, bias=False)
    parts = (
        DecoderBlock.Config(CONFIGS["m"], None, norm),
        DecoderBlock.Config(CONFIGS["s"], mlp, norm),
    )
    config = BlocksConfig(vocab_size=31, dim=DIM, num_layers=2, blocks=parts, init_std=0.5)
    model, prompt = config.build(dtype=torch.float64), torch.randint(31, (2, 4))
    tokens = generate(model, prompt, 5)
    for length in range(4, 9):
        expected = model(tokens[:, :length])[:, -1].argmax(-1)
        assert tokens[:, length].equal(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLSTM(8, 3), "inner_dim must be a multiple of num_heads, got inner_dim=64"),
        (lambda: MLSTM(8, 2, block_size=5), "inner_dim must be a multiple of block_size"),
        (lambda: SLSTM(8, 3), "dim must be a multiple of num_heads, got dim=8"),
        (lambda: SLSTM(8, 2, 2, 2), "layer_idx must be below num_layers, got layer_idx=2"),
        (lambda: MLSTM(8, 2)(torch.ones(1, 2, 8), mask=torch.ones(1)), "mask must be None"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gates_keep_what_their_layer_drew():
    """Also where parts are reset after the layer, as on the way from the meta device."""
    layer = MLSTM(8, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert layer.fgate.bias.tolist() == [3, 6] and not layer.igate.weight.any()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
