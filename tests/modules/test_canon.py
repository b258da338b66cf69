"""Canon layers: the public form, states, padding and nested tensors, at every place of a block."""

import re

import pytest
import torch
from torch.nn import functional as F

from omniattn import functional
from omniattn.modules import (
    MLP,
    Attention,
    DecoderBlock,
    GatedLinearAttention,
    GatedMLP,
    HyperConnections,
    RMSNorm,
    ShortConvolution,
)

F64 = torch.float64
GATED, PLAIN = GatedMLP.Config(16, 24), MLP.Config(16, 24, "relu")


def block(mixer=None, mlp=GATED, **options):
    torch.manual_seed(0)
    mixer = Attention.Config(16, 4, 2) if mixer is None else mixer
    return DecoderBlock.Config(mixer, mlp, RMSNorm.Config(16), **options).build(dtype=F64)


def summed(layer, x, **options):
    """Calls a block; returns the sum of its output and residual."""
    y, residual = layer(x, **options)
    return y if residual is None else y + residual


def convolved(t, weight):
    """Computes t + conv(t) as `apply_canon` of huggingface/canon_helper.py in PhysicsLM4 does."""
    taps = weight.shape[-1]
    y = F.conv1d(t.mT, weight, groups=t.shape[-1], padding=taps - 1)[..., : t.shape[1]]
    return t + y.mT


def norm(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def test_the_public_block():
    """LlamaCanonDecoderLayer of facebookresearch/PhysicsLM4, commit 7580696, without rotation."""
    layer, x = block(canon="ABCD"), torch.randn(2, 7, 16, dtype=F64)
    filters = {place: part.weight for place, part in layer.canon.named_children()}
    a, m = layer.mixer, layer.mlp
    u = convolved(norm(x), filters["A"])
    qkv = torch.cat([u @ p.weight.T for p in (a.q_proj, a.k_proj, a.v_proj)], -1)
    parts = convolved(qkv, filters["B"]).split([16, 8, 8], -1)
    q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in parts)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    h = x + out.transpose(1, 2).flatten(-2) @ a.o_proj.weight.T
    u = convolved(norm(h), filters["C"])
    hidden = torch.cat([u @ m.gate_proj.weight.T, u @ m.up_proj.weight.T], -1)
    gate, up = convolved(hidden, filters["D"]).chunk(2, -1)
    expected = h + (F.silu(gate) * up) @ m.down_proj.weight.T
    torch.testing.assert_close(summed(layer, x), expected)


@pytest.mark.parametrize("streams", [None, HyperConnections.Config(16)], ids=["plain", "streams"])
@pytest.mark.parametrize("mlp", [GATED, PLAIN, None], ids=["gated", "mlp", "none"])
@pytest.mark.parametrize("mixer", ["attention", "gla"])
def test_steps_equal_the_sequence(mixer, mlp, streams):
    config = GatedLinearAttention.Config(16, 2) if mixer == "gla" else None
    canon = ("AB" if config is None else "A") + ("" if mlp is None else "CD")
    layer, x = block(config, mlp, canon=canon, streams=streams), torch.randn(2, 9, 16, dtype=F64)
    with torch.no_grad():
        state = layer.new_state(2, 9)
        cuts = [(0, 4), (4, 5), (5, 6), (6, 6), (6, 9)]
        steps = [summed(layer, x[:, a:b], state=state) for a, b in cuts]
        torch.testing.assert_close(torch.cat(steps, 1), summed(layer, x))


@pytest.mark.parametrize("placement", ["pre", "sandwich", "parallel", "parallel_norms", "post"])
def test_padding_and_nested_sequences(placement):
    layer, x = block(canon="ABCD", placement=placement), torch.randn(2, 9, 16, dtype=F64)
    alone = summed(layer, x[:1, 4:])
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., :4] = False
    torch.testing.assert_close(summed(layer, x, mask=mask)[:1, 4:], alone)
    nested = torch.nested.nested_tensor([x[0, 4:], x[1]], layout=torch.jagged)
    parts = summed(layer, nested).unbind()
    torch.testing.assert_close(parts[0][None], alone)
    torch.testing.assert_close(parts[1][None], summed(layer, x[1:]))


def test_states():
    layer, x = block(canon="ABCD"), torch.randn(2, 6, 16, dtype=F64)
    with torch.no_grad():
        state, other = layer.new_state(2, 9), layer.new_state(2, 9)
        layer(x[:, :5], state=state)
        other.load_state_dict(state.state_dict())
        state.reorder(torch.tensor([1, 0]))
        expected = summed(layer, x)[:, 5:]
        torch.testing.assert_close(summed(layer, x[[1, 0], 5:], state=state), expected[[1, 0]])
        torch.testing.assert_close(summed(layer, x[:, 5:], state=other), expected)
        with pytest.raises(ValueError, match="a recurrence cannot forget tokens"):
            other.crop(3)
        assert other.length == 6
        with pytest.raises(TypeError, match="state must be that of this block"):
            layer(x, state=block().new_state(2, 9))
        with pytest.raises(TypeError, match="state must be that of this block"):
            block()(x, state=other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"canon": "BA"}, "canon must have letters of ABCD in order, got canon='BA'"),
        ({"canon": "E"}, "canon must have letters of ABCD in order, got canon='E'"),
        ({"canon": "C", "mlp": None}, "canon must have B only with Attention, C only with an mlp"),
        ({"canon": "A", "canon_size": 0}, "canon_size must be an integer >= 1, got canon_size=0"),
        (
            {"canon": "B", "mixer": GatedLinearAttention.Config(16, 2)},
            "got canon='B', mixer=GatedLinearAttention",
        ),
        (
            {"canon": "B", "mixer": Attention.Config(16, 4, ranks=(2, 2, 2))},
            "got canon='B', mixer=Attention",
        ),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        block(**options)


def test_a_function_needs_keys_of_its_own():
    with pytest.raises(ValueError, match="Attention: convolve needs self-attention"):
        Attention(dim=16, num_heads=4, ranks=(2, 2, 2))(torch.ones(1, 2, 16), convolve=torch.relu)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_residual_of_a_short_convolution(activation):
    conv = ShortConvolution(6, 3, bias=True, activation=activation, residual=True).double()
    x = torch.randn(2, 7, 6, dtype=F64)
    plain = functional.causal_conv1d(x, conv.weight[:, 0], conv.bias, activation=activation)
    torch.testing.assert_close(conv(x)[0], x + plain)
    assert torch.autograd.gradcheck(
        lambda w: torch.func.functional_call(conv, {"weight": w}, (x,))[0],
        conv.weight.detach().requires_grad_(),
    )
    with torch.no_grad():
        _, state = conv(x[:, :6])
        last, _ = conv(x[:, 6:], state, taps=conv.step_taps(conv.weight))
    torch.testing.assert_close(last, (x + plain)[:, 6:].detach())
