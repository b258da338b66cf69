"""Recurrent layers and padding: the real tokens of a sequence give what they give alone."""

import pytest
import torch
from jagged_rows import DTYPE, RECURRENT, jagged, recurrent
from torch import nn

from omniattn.functional.masks import Causal, KeyLengths, KeyPadding
from omniattn.models import BlocksConfig
from omniattn.modules import (
    Attention,
    DecoderBlock,
    DeltaNet,
    GatedMLP,
    LayerNorm,
    RotaryEmbedding,
    RWKV6TimeMix,
    RWKVChannelMix,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


#: Padding at the end, at the beginning and in between.
REAL = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1, 1]]).bool()
AT_ENDS = torch.arange(7) < torch.tensor([[5], [7], [2]])


#: rwkv-quadratic is attention: padding counts in the distances between tokens.
@pytest.mark.parametrize("name", [name for name in RECURRENT if name != "rwkv-quadratic"])
def test_recurrences_go_on_past_padding(name):
    layer, call = recurrent(name)
    x = torch.randn(3, 7, 16, dtype=DTYPE, requires_grad=True)
    filled = torch.where(REAL[..., None], x, torch.nan)
    at, mask = torch.arange(7), REAL[:, None, None]
    options = {}
    if name == "retention":
        options["rope"] = RotaryEmbedding(RotaryEmbedding.Config(4))(at)
    y = layer(filled, mask=mask, **options)
    want = [call(row[None, real], at[real])[0] for row, real in zip(x, REAL, strict=True)]
    torch.testing.assert_close(y[REAL], torch.cat(want))
    assert y[~REAL].eq(0).all()
    for real, same in ((REAL, KeyPadding(REAL)), (AT_ENDS, KeyLengths(AT_ENDS.sum(1)))):
        found = layer(x, mask=same, **options)
        torch.testing.assert_close(found, layer(x, mask=real[:, None, None], **options))
    grads = [torch.autograd.grad(t.square().sum(), x)[0] for t in (y, torch.cat(want))]
    torch.testing.assert_close(*grads)
    if name.endswith("-both"):
        return
    with torch.no_grad():
        state, parts = layer.new_state(3, 7), []
        for a, b in ((0, 3), (3, 7)):
            if name == "retention":
                options["rope"] = RotaryEmbedding(RotaryEmbedding.Config(4))(at[a:b])
            seen = mask[..., :b] if a else KeyPadding(REAL[:, :b])
            parts.append(layer(filled[:, a:b], mask=seen, state=state, **options))
    torch.testing.assert_close(torch.cat(parts, 1), y)


#: A Performer takes the more sweeps for its running maximum the more tokens there are.
COMPILED = [name for name in RECURRENT if "performer" not in name]


#: A compilation takes seconds, and most layers reach the padding by the same code.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if i % 4 else ()) for i, n in enumerate(COMPILED)],
)
def test_recurrences_with_padding_compile_without_breaks(name):
    torch._dynamo.reset()  # or the layers of other tests count as compilations of this one
    layer, _ = recurrent(name)
    x, mask = torch.randn(3, 7, 16, dtype=DTYPE, requires_grad=True), REAL[:, None, None]
    options = {}
    if name == "retention":
        options["rope"] = RotaryEmbedding(RotaryEmbedding.Config(4))(torch.arange(7))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, want = (each(x, mask=mask, **options) for each in (compiled, layer))
    torch.testing.assert_close(found, want)
    leaves = [x, *layer.parameters()]
    grads = [torch.autograd.grad(t.square().sum(), leaves) for t in (found, want)]
    torch.testing.assert_close(*grads)
    if name.endswith("-both") or name in ("s4", "s4d"):  # these go through sequences one by one
        return
    with torch.no_grad():
        states = [layer.new_state(3, 7) for _ in range(2)]
        pairs = zip((compiled, layer), states, strict=True)
        torch.testing.assert_close(*(each(x, mask=mask, state=s, **options) for each, s in pairs))
        torch.testing.assert_close(*(state.state_dict() for state in states))


def test_a_hybrid_takes_padding():
    """Attention and recurrences, with a channel mix that sees the token before."""
    norm = LayerNorm.Config(16)
    blocks = (
        DecoderBlock.Config(RWKV6TimeMix.Config(16, head_dim=8), RWKVChannelMix.Config(16), norm),
        DecoderBlock.Config(Attention.Config(16, 4), GatedMLP.Config(16, 24), norm),
    )
    rope = RotaryEmbedding.Config(4)
    config = BlocksConfig(vocab_size=11, dim=16, num_layers=2, blocks=blocks, rope=rope)
    model, tokens = config.build(dtype=DTYPE), torch.randint(11, (3, 7))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    real = REAL[:2]
    y = model(tokens[:2], mask=real[:, None, None])
    torch.testing.assert_close(model(tokens[:2], mask=KeyPadding(real))[real], y[real])
    for row, found, kept in zip(tokens[:2], y, real, strict=True):
        at = torch.arange(7)[kept]
        torch.testing.assert_close(found[kept], model(row[None, kept], positions=at)[0])


@pytest.mark.parametrize(
    "mask",
    [
        REAL[:, None, None, :5],
        REAL[:, None, None].float(),
        torch.ones(7, 7).bool().tril(),
        KeyPadding(REAL[:, :5]),
        KeyPadding(REAL) & Causal(),
        KeyLengths(torch.tensor([1, 2])),
    ],
    ids=["size", "dtype", "pairs", "padding-size", "causal", "batch"],
)
def test_other_masks_are_not_those_of_padding(mask):
    x = torch.ones(3, 7, 16)
    with pytest.raises(ValueError, match=r"DeltaNet: mask must be None or boolean \(B, 1, 1, past"):
        DeltaNet(16, 2)(x, mask=mask)
    with pytest.raises(ValueError, match=r"DeltaNet: mask must be on the device of x, .*=meta"):
        DeltaNet(16, 2)(x, mask=KeyLengths(torch.tensor([5, 6, 7], device="meta")))
    with pytest.raises(ValueError, match=r"DeltaNet: mask must be None or boolean .*a nested x"):
        DeltaNet(16, 2)(jagged([row for row in x]), mask=REAL[:, None, None])
