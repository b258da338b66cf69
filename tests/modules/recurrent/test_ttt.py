"""TTT-Linear's layer: its formula, decoding, parameters.

It equals `TTTLinear` of test-time-training/ttt-lm-pytorch, commit cd831db1, with its weights, to
5e-8 in fp64, where that code rounds its rotary tables to fp32.
"""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn.modules import TTTLinear

DIM, HEADS, C = 12, 2, 4
MODES = {"transformer": {}, "mamba": {"use_gate": True, "share_qk": True}}


def made(mode):
    torch.manual_seed(0)
    layer = TTTLinear(DIM, HEADS, C, init_std=0.3, dtype=torch.float64, **MODES[mode])
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer, torch.randn(2, 11, DIM, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_formula_and_decoding(mode):
    layer, x = made(mode)

    def convolved(name):
        conv = getattr(layer, name)
        rows = nnf.pad(layer.q_proj(x).mT, (3, 0))
        return nnf.conv1d(rows, conv.weight, conv.bias, groups=DIM).mT

    shared = mode == "mamba"
    q, k = (convolved(f"conv_{n}") if shared else getattr(layer, f"{n}_proj")(x) for n in "qk")
    q, k, v = (t.unflatten(-1, (HEADS, 6)) for t in (q, k, layer.v_proj(x)))
    place = torch.arange(11) % C
    angle = place[:, None] * 10000.0 ** -(torch.arange(3).double() / 3)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (3, 2)).contiguous()) * turn)
        for t in (q, k)
    )
    eta = (1 / (place + 1) + layer.learnable_token_idx[place]).clamp(min=0)
    lr = torch.einsum("btc,hdc->bth", x, layer.learnable_ttt_lr_weight)
    lr = (lr + layer.learnable_ttt_lr_bias[:, 0]).sigmoid() / 6
    first = layer.W1.expand(2, -1, -1, -1), layer.b1[:, 0].expand(2, -1, -1)
    o, _ = F.ttt_linear(
        *(q.flatten(-2), k.flatten(-2), v, layer.ttt_norm_weight, layer.ttt_norm_bias),
        *(eta[:, None].expand(2, 11, HEADS), lr),
        scale=1.0,
        mini_batch_size=C,
        residual="query",
        initial_state=(*first, 0 * first[0], 0 * first[1]),
        backend="reference",
    )
    norm = layer.post_norm
    y = nnf.layer_norm(o.flatten(-2), (DIM,), norm.weight, norm.bias, 1e-6)
    if shared:
        y = nnf.gelu(layer.g_proj(x), approximate="tanh") * y
    whole = layer(x)
    torch.testing.assert_close(whole, layer.o_proj(y))
    state = layer.new_state(2, 11)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 3), (3, 4), (4, 9), (9, 11))]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_gradients_reach_all_parameters():
    for mode in MODES:
        layer, x = made(mode)
        layer(x).square().sum().backward()
        assert [n for n, p in layer.named_parameters() if p.grad is None] == []


def test_parameters_have_the_shapes_of_ttt_lm():
    layer = TTTLinear(DIM, HEADS, C, share_qk=True)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["learnable_ttt_lr_weight"] == (2, 1, 12) and shapes["W1"] == (2, 6, 6)
    assert shapes["learnable_ttt_lr_bias"] == (2, 1) and shapes["b1"] == (2, 1, 6)
    assert shapes["conv_q.weight"] == (12, 1, 4) and shapes["conv_k.bias"] == (12,)
    assert "k_proj.weight" not in shapes and shapes["learnable_token_idx"] == (4,)
    with pytest.raises(ValueError, match="TTTLinear: dim must be a multiple of 2 num_heads"):
        TTTLinear(6, 2)
