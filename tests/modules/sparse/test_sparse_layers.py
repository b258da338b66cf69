"""Layers with sparse attention: their formulas, options and errors."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from omniattn import functional
from omniattn.functional import bigbird_attention, bigbird_random_blocks
from omniattn.models import BlocksConfig
from omniattn.modules import (
    NSA,
    BigBirdAttention,
    BlockSparseAttention,
    DecoderBlock,
    DeterministicSparseAttention,
    DualChunkAttention,
    GatedMLP,
    HubSpokeAttention,
    LocalStridedAttention,
    LongformerAttention,
    MoBA,
    NeighborhoodAttention1D,
    NeighborhoodAttention2D,
    NeighborhoodAttention3D,
    RMSNorm,
    RoutedBlockAttention,
)
from omniattn.modules.base.state import parts_of


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
@pytest.mark.parametrize("inside", [False, True])
@torch.no_grad()
def test_near_and_strided_keys_are_mixed_by_a_learned_gate(gate, inside):
    torch.manual_seed(0)
    sizes = {"window": 4, "stride": 3, "gate": gate, "residual_inside": inside}
    layer = LocalStridedAttention(dim=12, num_heads=3, init_std=0.5, **sizes).double()
    x = torch.randn(2, 11, 12, dtype=torch.float64)
    q, k, v = (p(x).unflatten(-1, (3, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    i, j = torch.arange(11)[:, None], torch.arange(11)

    def attend(seen):
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2
        p = scores.masked_fill(~(seen & (j <= i)), -torch.inf).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", p, v)

    g = torch.sigmoid(x @ layer.l_proj.weight.T + math.log(4)).unflatten(-1, (3, -1))
    assert g.shape[-1] == (4 if gate == "elementwise" else 1)
    mixed = (g * attend(j > i - 4) + (1 - g) * attend(j % 3 == 0)).flatten(-2)
    assert hasattr(layer, "o_proj") != inside
    torch.testing.assert_close(layer(x), x + mixed if inside else layer.o_proj(mixed))


def test_gates_of_local_and_strided_attention_begin_at_four_fifths():
    layer = LocalStridedAttention(dim=8, num_heads=2, window=2, stride=2)
    torch.testing.assert_close(layer.l_proj.bias.sigmoid(), torch.full((8,), 0.8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "LocalStridedAttention: window must be an integer >= 1, got window=0"),
        ({"stride": 0}, "LocalStridedAttention: stride must be an integer >= 1, got stride=0"),
        ({"gate": "tokenwise"}, "LocalStridedAttention: gate must be one of"),
        (
            {"residual_inside": True, "head_dim": 3},
            "LocalStridedAttention: residual_inside needs num_heads * head_dim = dim, "
            "got num_heads=2, head_dim=3, dim=8",
        ),
    ],
)
def test_wrong_fields_of_local_and_strided_attention(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LocalStridedAttention(dim=8, num_heads=2, **fields)


@pytest.mark.parametrize(
    "config",
    [
        BigBirdAttention.Config(8, 2, block=2, n_random=1),
        DeterministicSparseAttention.Config(8, 2, window=3, stride=4),
        LocalStridedAttention.Config(8, 2, window=3, stride=4),
        LongformerAttention.Config(8, 2, window=2),
        NSA.Config(8, 2, 1, None, 4, 2, 4, 2, 3),
        DualChunkAttention.Config(8, 2, chunk_size=6, local_window=2),
        HubSpokeAttention.Config(8, 2, window=3, global_every=4),
        HubSpokeAttention.Config(8, 2, window=3, global_every=4, dual="disjoint"),
        MoBA.Config(8, 2, block_size=4, topk=2),
        RoutedBlockAttention.Config(8, 2, block_size=4, topk=2),
    ],
    ids=lambda config: config.layer.__name__,
)
@torch.no_grad()
def test_layers_with_dropout_and_softcap(config):
    torch.manual_seed(0)
    config = replace(config, init_std=0.5)
    plain, x = config.build(), torch.randn(2, 20, 8)
    want = plain(x)
    drops = replace(config, dropout_p=0.5).build()
    drops.load_state_dict(plain.state_dict())
    first, second = drops(x), drops(x)
    assert not torch.allclose(first, second) and not torch.allclose(first, want)
    torch.testing.assert_close(drops.eval()(x), want)
    capped = replace(config, softcap=1e-4).build()
    capped.load_state_dict(plain.state_dict())
    level = replace(config, scale=1e-6).build()
    level.load_state_dict(plain.state_dict())
    torch.testing.assert_close(capped(x), level(x), rtol=0, atol=1e-2)
    assert not torch.allclose(capped(x), want, rtol=0, atol=1e-1)


@torch.no_grad()
def test_bigbird_takes_padding_random_blocks_and_global_tokens():
    torch.manual_seed(0)
    sizes = {"block": 2, "n_random": 1, "count_duplicates": True, "num_global_tokens": 3}
    layer = BigBirdAttention(dim=8, num_heads=2, init_std=0.5, **sizes)
    x, real = torch.randn(2, 27, 8), torch.rand(2, 27) < 0.8
    drawn = bigbird_random_blocks(12, 2, 2, seed=3)
    drawn[:, :, 1] = 0  # which counts twice
    q, k, v = (p(x).unflatten(-1, (2, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    given = {"key_padding": real, "rand_blocks": drawn}
    want = layer.o_proj(bigbird_attention(q, k, v, **sizes, **given).flatten(-2))
    torch.testing.assert_close(layer(x, **given), want)
    assert not torch.allclose(layer(x, key_padding=real), want)
    with pytest.raises(ValueError, match="a state must have num_global_tokens=0, got num_global_"):
        layer.new_state(1, 8)
    causal = BigBirdAttention(dim=8, num_heads=2, causal=True, max_length=40)
    with pytest.raises(ValueError, match="key_padding must be None with a state"):
        causal(x, state=causal.new_state(2, 40), key_padding=real)


@pytest.mark.parametrize("csr", [False, True])
def test_blocks_of_a_mask_in_place_of_the_pattern(csr):
    torch.manual_seed(0)
    layer = BlockSparseAttention(dim=8, num_heads=2, block_size=4, init_std=0.5).double()
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    blocks = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool()
    rows = torch.tensor([0, 1, 2, 4]), torch.tensor([0, 1, 0, 2])
    i, j = torch.arange(11)[:, None], torch.arange(11)

    def want(seen):
        q, k, v = (p(x).unflatten(-1, (2, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2
        p = scores.masked_fill(~(seen & (j <= i)), -torch.inf).softmax(-1)
        return layer.o_proj(torch.einsum("bhij,bjhd->bihd", p, v).flatten(-2))

    own = (i // 4 == j // 4) | (j == 0) | (i == 0)
    listed = blocks[i // 4, j // 4]
    given = layer(x, block_mask=rows if csr else blocks[None, None])
    for got, expected in ((layer(x), want(own)), (given, want(listed))):
        torch.testing.assert_close(got, expected)
        grad = torch.randn_like(got)
        weights = list(layer.parameters())
        grads = (torch.autograd.grad(y, weights, grad) for y in (got, expected))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="block_mask must be None with a state"):
        layer(x, state=layer.new_state(2, 11), block_mask=blocks[None, None])
    with pytest.raises(TypeError, match=r"must be a bool tensor or \(row_ptr, col_idx\), got "):
        layer(x, block_mask=rows[:1])


@pytest.mark.parametrize(
    ("kind", "grid", "options"),
    [
        (NeighborhoodAttention1D, (9,), {"kernel_size": 4, "stride": 2}),
        (NeighborhoodAttention2D, (5, 6), {"kernel_size": (3, 2), "dilation": (1, 3)}),
        (
            *(NeighborhoodAttention3D, (2, 4, 3)),
            {"kernel_size": (2, 3, 1), "is_causal": (True, False, False), "qk_scale": 0.3},
        ),
    ],
)
def test_neighborhood_layers_have_the_parameters_of_natten(kind, grid, options):
    torch.manual_seed(0)
    layer = kind(dim=8, num_heads=2, init_std=0.5, **options).double()
    assert sorted(layer.state_dict()) == ["proj.bias", "proj.weight", "qkv.bias", "qkv.weight"]
    x = torch.randn(2, *grid, 8, dtype=torch.float64, requires_grad=True)
    function = getattr(functional, f"na{len(grid)}d")
    named = {"scale" if name == "qk_scale" else name: value for name, value in options.items()}
    q, k, v = torch.nn.functional.linear(x, layer.qkv.weight).unflatten(-1, (3, 2, 4)).unbind(-3)
    want = layer.proj(function(q, k, v, **named).flatten(-2))
    torch.testing.assert_close(layer(x), want)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (layer(x), want)]
    torch.testing.assert_close(*grads)
    drops = kind(dim=8, num_heads=2, attn_drop=0.5, **options).double()
    assert not torch.allclose(drops(x), drops(x))


@torch.no_grad()
def test_texts_shorter_than_a_neighborhood():
    layer = NeighborhoodAttention1D(dim=8, num_heads=2, kernel_size=5, is_causal=True)
    x = torch.randn(1, 9, 8)
    torch.testing.assert_close(layer(x[:, :3]), layer(x)[:, :3])
    with pytest.raises(ValueError, match="kernel_size must be an int >= 1 and <= 3, got"):
        NeighborhoodAttention1D(dim=8, num_heads=2, kernel_size=5)(x[:, :3])
    with pytest.raises(ValueError, match="a state must have is_causal=True and stride=1"):
        NeighborhoodAttention1D(dim=8, num_heads=2, kernel_size=5).new_state(1, 4)
    with pytest.raises(ValueError, match="NeighborhoodAttention3D: kernel_size must be one value"):
        NeighborhoodAttention3D(dim=8, num_heads=2, kernel_size=(3, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind,options",
    [
        (MoBA, {"block_size": 4, "topk": 2}),
        (NSA, {"block_size": 4, "topk": 3, "compress_size": 4, "compress_stride": 2, "window": 3}),
        (RoutedBlockAttention, {"block_size": 4, "topk": 2}),
        (LocalStridedAttention, {"window": 2, "stride": 3}),
        (DeterministicSparseAttention, {"window": 2, "stride": 3}),
    ],
)
@torch.no_grad()
def test_one_exported_graph_for_all_batches_and_lengths(kind, options):
    layer = kind(dim=8, num_heads=2, init_std=0.5, **options)
    length = torch.export.Dim("T", min=9)
    if kind is RoutedBlockAttention:  # for multiples of its blocks
        length = 4 * torch.export.Dim("blocks", min=3)
    shapes = {"x": {0: torch.export.Dim("B", min=1), 1: length}}
    example = (torch.randn(2, 24, 8),)
    program = torch.export.export(layer, example, dynamic_shapes=shapes).module()
    for batch, n in ((1, 12), (3, 64)):
        x = torch.randn(batch, n, 8)
        torch.testing.assert_close(program(x), layer(x))


@torch.no_grad()
@pytest.mark.parametrize("how", ["fails", "forgets"])
def test_compressed_keys_of_removed_tokens_are_removed(how, monkeypatch):
    """After a call that failed, and where generation takes tokens back."""
    torch.manual_seed(0)
    config = NSA.Config(8, 2, 1, None, 2, 1, 2, 3, 3, "mean", init_std=0.5)
    model = BlocksConfig(
        dim=8,
        num_layers=1,
        blocks=(DecoderBlock.Config(config, GatedMLP.Config(8, 8), RMSNorm.Config(8)),),
        vocab_size=9,
        init_std=0.5,
    ).build(dtype=torch.float64)
    tokens = torch.randint(9, (1, 12))
    state = model.new_state(1, 12)
    parts = [model(tokens[:, :4], state=state)]
    if how == "fails":
        with monkeypatch.context() as broken, pytest.raises(ArithmeticError):
            broken.setattr(model.layers[0].mlp, "forward", lambda x: 1 // 0)
            model((tokens[:, 4:] + 1) % 9, state=state)
    else:
        model((tokens[:, 4:] + 1) % 9, state=state)
        for part in parts_of(state[0]):
            part.crop(4)
    parts.append(model(tokens[:, 4:], state=state))
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))
    with pytest.raises(ValueError, match=r"state must have room for the new .*max_length=12"):
        model(tokens[:, :1], state=state)
