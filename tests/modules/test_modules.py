"""Linear, norms, rotary tables, gated MLP and decoder block."""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F

from omniattn import reference
from omniattn.modules import (
    MLP,
    Attention,
    DecoderBlock,
    GatedMLP,
    LayerNorm,
    Linear,
    RMSNorm,
    RotaryEmbedding,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_linear():
    layer = Linear(Linear.Config(5, 3, bias=True))
    x = torch.randn(2, 4, 5)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert list(Linear(Linear.Config(5, 3)).state_dict()) == ["weight"]


def test_norms_with_and_without_residual():
    x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    rms, layer = RMSNorm(RMSNorm.Config(8)), LayerNorm(LayerNorm.Config(8))
    torch.testing.assert_close(rms(x), F.rms_norm(x, (8,), eps=1e-6))
    torch.testing.assert_close(layer(x), F.layer_norm(x, (8,)))
    for norm in (rms, layer):
        y, h = norm(x, residual)
        torch.testing.assert_close(h, x + residual)
        torch.testing.assert_close(y, norm(x + residual))
    gemma = RMSNorm(RMSNorm.Config(8, offset=1.0))
    assert (gemma.weight == 0).all()
    torch.testing.assert_close(gemma(x), rms(x))
    assert LayerNorm(LayerNorm.Config(8, bias=False)).bias is None


def test_rotary_angles_survive_a_cast_of_the_module():
    rotary = RotaryEmbedding(RotaryEmbedding.Config(8)).to(torch.bfloat16)
    positions = torch.tensor([[0, 1], [5, 1_000_003]])
    cos, sin = rotary(positions)
    angle = positions[..., None].double() * reference.rope_frequencies(8)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos.double(), angle.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin.double(), angle.sin(), rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match="rotary_dim=7"):
        RotaryEmbedding.Config(7)


@pytest.mark.parametrize(
    ("activation", "act"),
    [
        ("swiglu", F.silu),
        ("geglu", F.gelu),
        ("geglu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("reglu", F.relu),
        ("glu", torch.sigmoid),
        ("bilinear", lambda x: x),
    ],
)
def test_gated_mlp(activation, act):
    mlp = GatedMLP(GatedMLP.Config(6, 10, activation, init_std=1.0, out_init_std=1.0))
    x = torch.randn(3, 6)
    hidden = act(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)
    torch.testing.assert_close(mlp(x), hidden @ mlp.down_proj.weight.T, rtol=1e-4, atol=1e-4)


def test_gated_mlp_of_gpt_oss():
    config = GatedMLP.Config(
        6, 10, "clamped_swiglu", bias=True, clamp=(1.5, 0.9), init_std=1.0, out_init_std=1.0
    )
    mlp, x = GatedMLP(config), torch.randn(3, 6)
    for linear in mlp.children():
        torch.nn.init.normal_(linear.bias)
    gate, up = mlp.gate_proj(x).clamp(max=0.9), mlp.up_proj(x).clamp(-0.9, 0.9)
    expected = mlp.down_proj(gate * torch.sigmoid(1.5 * gate) * (up + 1))
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="GatedMLP: clamp must be"):
        GatedMLP(6, 10, clamp=(1.0,))
    with pytest.raises(ValueError, match="GatedMLP: limit of clamp must be"):
        GatedMLP(6, 10, clamp=(1.0, 0.0))


def test_mlp_equals_torch_and_drops_in_training_only():
    mlp = MLP(MLP.Config(6, 10, "relu", init_std=1.0, out_init_std=1.0, dropout_p=0.5))
    x = torch.randn(3, 6)
    expected = mlp.down_proj(F.relu(mlp.up_proj(x)))
    assert not torch.allclose(mlp(x), expected)
    torch.testing.assert_close(mlp.eval()(x), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="activation='mish'"):
        MLP.Config(6, 10, "mish")


def test_gated_mlp_names_an_unknown_activation():
    with pytest.raises(ValueError, match="activation='swish'"):
        GatedMLP.Config(6, 10, "swish")


def test_modules_survive_copies_and_pickle():
    layer = RMSNorm(RMSNorm.Config(3), dtype=torch.float64)
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same.config == layer.config
        assert torch.equal(same.weight, layer.weight)


def block_config() -> DecoderBlock.Config:
    return DecoderBlock.Config(
        Attention.Config(12, 3, 1, init_std=0.5), GatedMLP.Config(12, 20), RMSNorm.Config(12)
    )


def test_blocks_hand_the_residual_on():
    first, second = DecoderBlock(block_config()), DecoderBlock(block_config())
    x = torch.randn(2, 5, 12)
    h = x
    for block in (first, second):
        h = h + block.mixer(block.input_layernorm(h))
        h = h + block.mlp(block.post_attention_layernorm(h))
    out, residual = second(*first(x))
    torch.testing.assert_close(out + residual, h)


def test_a_block_keeps_the_residual_in_fp32():
    config = dataclasses.replace(block_config(), residual_in_fp32=True)
    block, x = DecoderBlock(config, dtype=torch.bfloat16), torch.randn(2, 5, 12).bfloat16()
    out, residual = block(x)
    branch = block.mixer(block.input_layernorm(x))
    assert torch.equal(residual, x.float() + branch)
    y, _ = block.post_attention_layernorm(branch, x.float())
    assert torch.equal(out, block.mlp(y)) and out.dtype == torch.bfloat16
    _, second = block(out, residual)
    y, h = block.input_layernorm(out, residual)
    assert torch.equal(second, h + block.mixer(y))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_take_device_and_dtype(dtype):
    block = DecoderBlock(block_config(), dtype=dtype)
    assert {p.dtype for p in block.parameters()} == {dtype}
    assert block(torch.randn(1, 3, 12, dtype=dtype))[0].dtype == dtype
    meta = DecoderBlock(block_config(), device="meta")
    assert all(p.is_meta for p in meta.parameters())
