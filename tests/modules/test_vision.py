"""Swin and PVT against transformers' modules with the same weights."""

import pytest
import torch
import transformers
from torch import nn
from transformers.models.pvt.modeling_pvt import PvtEfficientSelfAttention
from transformers.models.swin.modeling_swin import SwinLayer, SwinPatchMerging

from omniattn.modules import PatchMerging, SpatialReductionAttention, SwinBlock, WindowAttention


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randomise(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module


def assert_same(ours, theirs, inputs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)
    grad = torch.randn_like(ours)
    for a, e in zip(
        torch.autograd.grad(ours, inputs, grad, retain_graph=True),
        torch.autograd.grad(theirs, inputs, grad, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("size", [(8, 8), (7, 10)], ids=["fits", "padded"])
def test_swin_block_is_that_of_transformers(shift, size):
    config = transformers.SwinConfig(window_size=4, drop_path_rate=0.0)
    config._attn_implementation = "eager"
    theirs = randomise(SwinLayer(config, 12, size, 3, shift_size=shift)).eval()
    ours = SwinBlock(SwinBlock.Config(WindowAttention.Config(12, 3, window=4, shift=shift)))
    state = theirs.state_dict()
    weights, biases = (
        torch.cat([state[f"attention.{name}_proj.{kind}"] for name in "qkv"])
        for kind in ("weight", "bias")
    )
    table = next(w for name, w in state.items() if name.endswith("bias_table"))
    ours.load_state_dict(
        {
            "norm1.weight": state["layernorm_before.weight"],
            "norm1.bias": state["layernorm_before.bias"],
            "norm2.weight": state["layernorm_after.weight"],
            "norm2.bias": state["layernorm_after.bias"],
            "attn.qkv.weight": weights,
            "attn.qkv.bias": biases,
            "attn.proj.weight": state["attention.o_proj.weight"],
            "attn.proj.bias": state["attention.o_proj.bias"],
            "attn.relative_position_bias_table": table,
            **{name: w for name, w in state.items() if name.startswith("mlp.")},
        }
    )
    x = torch.randn(2, *size, 12, requires_grad=True)
    expected, _ = theirs(x.flatten(1, 2), size)
    their_table = next(p for n, p in theirs.named_parameters() if n.endswith("bias_table"))
    actual = ours(x)
    torch.testing.assert_close(actual, expected.view_as(actual), rtol=1e-4, atol=1e-3)
    grad = torch.randn_like(actual)
    for a, e in zip(
        torch.autograd.grad(actual, [x, ours.attn.relative_position_bias_table], grad),
        torch.autograd.grad(expected.view_as(actual), [x, their_table], grad),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3 * e.abs().max().item())


def test_an_image_no_larger_than_a_window_is_one_window():
    layer = WindowAttention(WindowAttention.Config(8, 2, window=7, shift=3, init_std=0.5))
    nn.init.normal_(layer.relative_position_bias_table)
    small = WindowAttention(WindowAttention.Config(8, 2, window=5, init_std=0.5))
    state = layer.state_dict()
    table = state["relative_position_bias_table"].view(13, 13, 2)[2:11, 2:11].reshape(-1, 2)
    small.load_state_dict({**state, "relative_position_bias_table": table})
    x = torch.randn(1, 5, 5, 8)
    torch.testing.assert_close(layer(x), small(x))
    layer(x).sum().backward()
    assert layer.relative_position_bias_table.grad.count_nonzero() <= 9 * 9 * 2


def test_dropped_paths_leave_the_residual():
    config = SwinBlock.Config(WindowAttention.Config(8, 2, window=4), drop_path_p=0.999999)
    x = torch.randn(3, 4, 4, 8)
    assert torch.equal(SwinBlock(config)(x), x)
    assert not torch.equal(SwinBlock(config).eval()(x), x)


@pytest.mark.parametrize("size", [(6, 4), (5, 7)])
def test_patch_merging_is_that_of_transformers(size):
    theirs = randomise(SwinPatchMerging(6))
    ours = PatchMerging(PatchMerging.Config(6))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, *size, 6, requires_grad=True)
    actual = ours(x)
    assert_same(actual, theirs(x.flatten(1, 2), size).view_as(actual), [x])


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_spatial_reduction_is_that_of_pvt(ratio):
    config = transformers.PvtConfig(qkv_bias=True, layer_norm_eps=1e-5)
    theirs = randomise(PvtEfficientSelfAttention(config, 8, 2, ratio)).eval()
    ours = SpatialReductionAttention(SpatialReductionAttention.Config(8, 2, ratio, bias=True))
    state = theirs.state_dict()
    mapped = {
        "proj.weight": torch.eye(8),
        "proj.bias": torch.zeros(8),
        "q.weight": state["query.weight"],
        "q.bias": state["query.bias"],
        "kv.weight": torch.cat([state["key.weight"], state["value.weight"]]),
        "kv.bias": torch.cat([state["key.bias"], state["value.bias"]]),
    }
    if ratio > 1:
        mapped |= {f"sr.{n}": state[f"sequence_reduction.{n}"] for n in ("weight", "bias")}
        mapped |= {f"norm.{n}": state[f"layer_norm.{n}"] for n in ("weight", "bias")}
    ours.load_state_dict(mapped)
    x = torch.randn(2, 7, 6, 8, requires_grad=True)
    actual = ours(x)
    assert_same(actual, theirs(x.flatten(1, 2), 7, 6)[0].view_as(actual), [x])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WindowAttention.Config(9, 2), "dim=9"),
        (lambda: WindowAttention.Config(8, 2, window=4, shift=4), "shift=4"),
        (lambda: SpatialReductionAttention.Config(8, 2, sr_ratio=0), "sr_ratio=0"),
    ],
)
def test_configs_name_the_wrong_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
