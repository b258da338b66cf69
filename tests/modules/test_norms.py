"""Gated and per-head norms as modules, and placements on the residual stream."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from omniattn.modules import (
    MLP,
    Attention,
    DecoderBlock,
    DropPath,
    GroupNorm,
    LayerNorm,
    LayerScale,
    ParallelResidual,
    Residual,
    RMSNorm,
    RMSNormGated,
)


def test_group_norm_equals_torch():
    norm, theirs = GroupNorm(GroupNorm.Config(12, 3)), nn.GroupNorm(3, 12)
    for p in (*norm.parameters(), *theirs.parameters()):
        torch.nn.init.normal_(p)
    theirs.load_state_dict(norm.state_dict())
    x = torch.randn(5, 12)
    torch.testing.assert_close(norm(x), theirs(x))
    rms = GroupNorm(GroupNorm.Config(12, 3, center=False))
    assert [n for n, _ in rms.named_parameters()] == ["weight"]
    expected = F.rms_norm(x.view(5, 3, 4), (4,), eps=1e-5).view(5, 12)
    torch.testing.assert_close(rms(x), expected)


@pytest.mark.parametrize("groups", [1, 4])
def test_gated_norm_equals_mamba2(groups):
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    config = RMSNormGated.Config(16, norm_before_gate=False, num_groups=groups)
    ours = RMSNormGated(config)
    theirs = Zamba2RMSNormGated(16, 16 // groups)
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    x, gate = torch.randn(2, 3, 5, 16).unbind()
    torch.testing.assert_close(ours(x, gate), theirs(x, gate))


def test_gated_norm_equals_qwen3_next():
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    ours, theirs = RMSNormGated(RMSNormGated.Config(16)), Qwen3NextRMSNormGated(16)
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    x, gate = torch.randn(2, 3, 5, 16).unbind()
    torch.testing.assert_close(ours(x, gate), theirs(x, gate))


def f(x):
    return x.tanh() * 3


class Layer(nn.Module):
    def forward(self, x):
        return f(x)


@pytest.mark.parametrize("norm", [RMSNorm.Config(8), LayerNorm.Config(8)])
def test_placements(norm):
    x = torch.randn(2, 3, 8)
    n = LayerNorm(norm) if isinstance(norm, LayerNorm.Config) else RMSNorm(norm)
    expected = {
        "pre": x + f(n(x)),
        "post": n(x + f(x)),
        "sandwich": x + n(f(n(x))),
        "post_in_residual": x + n(f(x)),
    }
    for placement, y in expected.items():
        block = Residual(Layer(), Residual.Config(norm, placement))
        torch.testing.assert_close(block(x), y)
        assert ("post_norm.weight" in block.state_dict()) == (placement == "sandwich")
    parallel = ParallelResidual([Layer(), nn.Identity()], norm)
    torch.testing.assert_close(parallel(x), x + f(n(x)) + n(x))


@pytest.mark.parametrize("placement", ["pre", "sandwich", "post_in_residual"])
def test_residual_keeps_an_fp32_stream_around_half_layers(placement):
    config = Residual.Config(RMSNorm.Config(8), placement, residual_in_fp32=True)
    block, x = Residual(Layer(), config, dtype=torch.bfloat16), torch.randn(3, 8)
    half, n = x.bfloat16(), block.norm
    branch = {"pre": f(n(half)), "sandwich": n(f(n(half))), "post_in_residual": n(f(half))}
    assert torch.equal(block(x), x + branch[placement])
    assert torch.equal(block(half), half.float() + branch[placement])


@pytest.mark.parametrize("norm", [RMSNorm.Config(8), LayerNorm.Config(8)])
def test_a_stream_of_norms_stays_in_fp32_under_autocast(norm):
    block, x = Residual(nn.Linear(8, 8), Residual.Config(norm, "post")), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
        assert block.layer(x).dtype == torch.bfloat16
        torch.testing.assert_close(y, block.norm(x + block.layer(x)))
    assert y.dtype == torch.float32


def test_drop_path_keeps_or_drops_whole_samples():
    drop, x = DropPath(0.25), torch.ones(400, 2, 3)
    torch.manual_seed(1)
    y = drop(x)
    assert torch.equal(y, y[:, :1, :1].expand_as(y))
    assert set(y[:, 0, 0].tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert 0.68 < (y[:, 0, 0] > 0).float().mean() < 0.82
    torch.manual_seed(1)
    assert torch.equal(drop(x), y)
    assert drop.eval()(x) is x


@torch.no_grad()
def test_blocks_scale_and_drop_their_branches():
    config = DecoderBlock.Config(
        Attention.Config(8, 2), MLP.Config(8, 16), LayerNorm.Config(8), layer_scale=0.25
    )
    block, x = DecoderBlock(config).double(), torch.randn(50, 3, 8, dtype=torch.float64)
    block.mixer_scale.weight.copy_(torch.arange(8.0))
    assert block.mlp_scale.weight.tolist() == [0.25] * 8
    h = x + torch.arange(8) * block.mixer(block.input_layernorm(x))
    want = h + block.mlp(block.post_attention_layernorm(h)) / 4
    torch.testing.assert_close(sum(block(x)), want)
    dropping = DecoderBlock(replace(config, drop_path_p=0.5)).double()
    dropping.load_state_dict(block.state_dict())
    torch.testing.assert_close(sum(dropping.eval()(x)), want)
    same = (sum(dropping.train()(x)) == x).all(-1).all(-1)
    assert 2 <= same.sum() <= 25  # both branches left out: a quarter


def test_residual_dropout_acts_on_the_branch_only():
    config = Residual.Config(RMSNorm.Config(8), dropout_p=0.5, drop_path_p=0.5)
    block, x = Residual(Layer(), config), torch.zeros(3, 8)
    assert torch.equal(block(x), x)  # f(0) = 0
    torch.testing.assert_close(block.eval()(x + 1), x + 1 + f(RMSNorm(config.norm)(x + 1)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GroupNorm.Config(10, 3), "num_groups must divide dim"),
        (lambda: RMSNormGated.Config(10, num_groups=3), "num_groups must divide dim"),
        (lambda: Residual.Config(RMSNorm.Config(2), "around"), "placement='around'"),
        (
            lambda: Residual.Config(RMSNorm.Config(2), "post", residual_in_fp32=True),
            "residual_in_fp32 must be False",
        ),
        (lambda: RMSNormGated.Config(4, activation="relu"), "activation must be one of"),
        (lambda: LayerScale(2, 0.0), "LayerScale: value must be a finite number > 0, got value=0"),
        (
            lambda: DecoderBlock.Config(
                *(Attention.Config(8, 2), MLP.Config(8, 16), LayerNorm.Config(8)),
                placement="parallel",
                layer_scale=0.1,
            ),
            "layer_scale must be None with placement='parallel', got layer_scale=0.1",
        ),
        (lambda: DropPath(1.0), "p must be a finite number >= 0 and < 1, got p=1.0"),
    ],
)
def test_bad_config(call, message):
    with pytest.raises(ValueError, match=message):
        call()
