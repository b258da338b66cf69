"""Jagged nested tensors in losses, norms, dropout and experts."""

import pytest
import torch
from jagged_rows import DTYPE, LENGTHS, STD, jagged, rotated, sequences, sparse_latent

from omniattn.modules import (
    Dropout,
    DropPath,
    LayerNorm,
    MoBA,
    MoE,
    RMSNorm,
    RMSNormGated,
    RoutedBlockAttention,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ["dsa", "distill"])
def test_losses_of_layers_are_means_over_all_tokens(name):
    config = RoutedBlockAttention.Config(16, 4, block_size=2, topk=2, router_grad="distill", **STD)
    module, call = sparse_latent("sparse") if name == "dsa" else rotated(config)
    rows = sequences()
    call(jagged(rows).detach(), torch.cat([torch.arange(n) for n in LENGTHS]))
    got, losses = module.auxiliary, []
    for row in rows:
        call(row[None].detach(), torch.arange(len(row)))
        losses.append(module.auxiliary * len(row))
    torch.testing.assert_close(got, sum(losses) / sum(LENGTHS))


def test_sequences_without_tokens():
    layer = MoBA.Config(16, 4, 2, block_size=2, topk=2, **STD).build(dtype=DTYPE)
    rows = [torch.ones(0, 16, dtype=DTYPE), torch.ones(3, 16, dtype=DTYPE)]
    got = layer(jagged(rows))
    torch.testing.assert_close(got.values(), layer(rows[1][None])[0])
    assert [len(row) for row in got.unbind()] == [0, 3]
    assert layer(jagged(rows[:1])).values().shape == (0, 16)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm, RMSNormGated])
def test_a_second_tensor_is_jagged_like_the_first(norm):
    layer, x = norm(norm.Config(16), dtype=DTYPE), jagged(sequences())
    name = "gate" if norm is RMSNormGated else "residual"
    got = layer(x, **{name: 2 * x})
    want = layer(x.values(), 2 * x.values())
    for a, w in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want)), strict=True):
        assert a.shape == x.shape
        assert torch.equal(a.values(), w)
    for other in (jagged(sequences()[::-1]), x.values()):
        with pytest.raises(ValueError, match=f"{name} must be jagged with the boundaries of x"):
            layer(x, other)


def test_dropout_of_jagged_tensors():
    x = jagged([torch.ones(n, 16, dtype=DTYPE) for n in LENGTHS])
    torch.manual_seed(3)
    got = Dropout(0.5)(x)
    torch.manual_seed(3)
    assert torch.equal(got.values(), Dropout(0.5)(x.values()))
    torch.manual_seed(3)
    paths = DropPath(0.5)(x)
    torch.manual_seed(3)
    kept = DropPath(0.5)(torch.ones(len(LENGTHS), dtype=DTYPE))
    assert set(kept.tolist()) == {0.0, 2.0}
    for row, factor in zip(paths.unbind(), kept, strict=True):
        assert torch.equal(row, factor.expand_as(row))


@pytest.mark.parametrize("per_sequence", [False, True])
def test_experts_share_their_capacity_as_in_a_padded_batch(per_sequence):
    config = MoE.Config.of(16, 24, 4, 2, capacity_factor=1.0, capacity_per_sequence=per_sequence)
    layer, parts = MoE(config).double().train(), sequences()
    padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    tokens = torch.arange(padded.shape[1]) < torch.tensor([len(part) for part in parts])[:, None]
    expected = layer(padded, tokens)
    assert layer.state.dropped > 0
    for got, want, part in zip(layer(jagged(parts)).unbind(), expected, parts, strict=True):
        torch.testing.assert_close(got, want[: len(part)])
