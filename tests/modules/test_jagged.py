"""Blocks on jagged nested tensors equal themselves on each sequence alone."""

import pytest
import torch

from omniattn.modules import (
    MLP,
    Attention,
    Dropout,
    DropPath,
    GatedAttentionUnit,
    GatedMLP,
    GroupNorm,
    LayerNorm,
    MoE,
    ParallelResidual,
    Residual,
    RMSNorm,
    RMSNormGated,
    TransformerXLAttention,
)

LENGTHS = (5, 1, 9)
DTYPE = torch.float64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def sequences() -> list[torch.Tensor]:
    return [torch.randn(n, 16, dtype=DTYPE, requires_grad=True) for n in LENGTHS]


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def attention() -> Attention:
    return Attention(Attention.Config(16, 4, 2, qk_norm="rms", init_std=0.5), dtype=DTYPE)


def readme_block(norm: type, placement: str) -> torch.nn.Sequential:
    config = Residual.Config(norm.Config(16), placement=placement)
    mlp = GatedMLP(GatedMLP.Config(16, 24, init_std=0.5), dtype=DTYPE)
    layers = attention(), mlp
    return torch.nn.Sequential(*(Residual(layer, config, dtype=DTYPE) for layer in layers))


def parallel_block() -> torch.nn.Sequential:
    mlp = MLP(MLP.Config(16, 24, init_std=0.5), dtype=DTYPE)
    block = ParallelResidual([attention(), mlp], LayerNorm.Config(16), dtype=DTYPE)
    return torch.nn.Sequential(block, GroupNorm(GroupNorm.Config(16, 4), dtype=DTYPE))


@pytest.mark.parametrize(
    "new_block",
    [
        lambda: readme_block(RMSNorm, "pre"),
        lambda: readme_block(RMSNorm, "sandwich"),
        lambda: readme_block(LayerNorm, "post"),
        parallel_block,
    ],
    ids=["pre", "sandwich", "post", "parallel"],
)
def test_blocks_on_jagged_input_are_those_on_each_sequence_alone(new_block):
    block, rows = new_block(), sequences()
    x = jagged(rows).detach().requires_grad_()
    y = block(x)
    want = [block(row[None])[0] for row in rows]
    for a, w in zip(y.unbind(), want, strict=True):
        torch.testing.assert_close(a, w)
    grad = torch.randn_like(y.values())
    parameters = list(block.parameters())
    got = torch.autograd.grad(y.values(), [x, *parameters], grad)
    alone = torch.autograd.grad(torch.cat(want), [*rows, *parameters], grad)
    torch.testing.assert_close(got[0].values(), torch.cat(alone[: len(rows)]))
    for a, w in zip(got[1:], alone[len(rows) :], strict=True):
        torch.testing.assert_close(a, w)


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
        with pytest.raises(ValueError, match=f"{norm.__name__}: .* the boundaries of x"):
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_only_rows_of_tokens_are_taken():
    layer, x = Dropout(), jagged(sequences())
    strided = torch.nested.nested_tensor(sequences())
    dense = torch.ones(2, 3, 8)
    holes = torch.nested.narrow(
        dense, 1, torch.tensor([0, 1]), torch.tensor([2, 2]), layout=torch.jagged
    )
    columns = x.transpose(1, 2)
    numbers = jagged([row[:, 0] for row in sequences()])
    for wrong in (strided, holes, columns, numbers):
        with pytest.raises(ValueError, match="Dropout: x must be a jagged nested tensor"):
            layer(wrong)


@pytest.mark.parametrize(
    "layer",
    [
        GatedAttentionUnit(GatedAttentionUnit.Config(16)),
        TransformerXLAttention(TransformerXLAttention.Config(16, 4)),
        MoE(MoE.Config(16, 24, 4, 2)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_need_more_than_tokens_refuse_nested_tensors(layer):
    with pytest.raises(TypeError, match="must not be nested"):
        layer(jagged(sequences()).float())
