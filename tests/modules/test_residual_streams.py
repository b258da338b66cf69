"""Hyper-connections, mHC and attention residuals: their papers' forms, in blocks and in models."""

from dataclasses import replace

import pytest
import torch

from omniattn.models import BlocksConfig
from omniattn.modules import (
    Attention,
    AttentionResiduals,
    DecoderBlock,
    GatedMLP,
    HyperConnections,
    ManifoldHyperConnections,
    RMSNorm,
)

F64 = torch.float64
FORMS = [
    HyperConnections.Config(24, streams=3),
    ManifoldHyperConnections.Config(24, streams=3),
    AttentionResiduals.Config(24),
    AttentionResiduals.Config(24, block_size=3),
]
NAMES = ["hyper", "mhc", "attention", "blocks"]


def drawn(layer):
    """Gives every parameter random values, those that start at 0 among them."""
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def test_hyper_connections_by_hand():
    torch.manual_seed(0)
    layer = drawn(HyperConnections(dim=5, streams=3)).double()
    h, y = torch.randn(2, 4, 3, 5, dtype=F64), torch.randn(2, 4, 5, dtype=F64)
    x, found = layer.read(h.flatten(-2))
    got = layer.write(h.flatten(-2), y, found).unflatten(-1, (3, 5))
    norm = torch.nn.functional.layer_norm(h, (5,), layer.norm_weight)
    alpha = layer.static_alpha + layer.scale[0] * torch.tanh(norm @ layer.alpha_weight)
    beta = layer.static_beta + layer.scale[1] * torch.tanh(norm @ layer.beta_weight)
    mixed = alpha.transpose(-1, -2) @ h
    torch.testing.assert_close(x, mixed[..., 0, :])
    torch.testing.assert_close(got, mixed[..., 1:, :] + beta[..., None] * y[..., None, :])
    torch.testing.assert_close(
        HyperConnections(dim=5, streams=3, head=True)(h.flatten(-2)), h.sum(2)
    )


def test_mhc_is_that_of_deepseek_v4():
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    torch.manual_seed(0)
    config = v4.DeepseekV4Config(hidden_size=8, hc_mult=4, rms_norm_eps=1e-6)
    theirs, their_head = (
        drawn(v4.DeepseekV4HyperConnection(config)),
        drawn(v4.DeepseekV4HyperHead(config)),
    )
    sizes = {"streams": 4, "iterations": config.hc_sinkhorn_iters, "eps": config.hc_eps}
    ours = ManifoldHyperConnections(8, **sizes)
    head = ManifoldHyperConnections(8, head=True, **sizes)
    pairs = [(ours.weight, theirs.fn), (ours.bias, theirs.base), (ours.scale, theirs.scale)]
    pairs += [(head.weight, their_head.hc_fn), (head.bias, their_head.hc_base)]
    with torch.no_grad():
        for to, given in [*pairs, (head.scale, their_head.hc_scale)]:
            to.copy_(given)
    h, y = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 8)
    post, mix, want = theirs(h)
    x, found = ours.read(h.flatten(-2))
    torch.testing.assert_close(x, want)
    want = post[..., None] * y[..., None, :] + mix.transpose(-1, -2) @ h
    torch.testing.assert_close(ours.write(h.flatten(-2), y, found), want.flatten(-2))
    torch.testing.assert_close(head(h.flatten(-2)), their_head(h))
    torch.testing.assert_close(found[1].sum(-2), torch.ones(2, 3, 4), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].sum(-1), torch.ones(2, 3, 4), rtol=1e-3, atol=1e-3)


def layers_of(block):
    """The layers of a block in turn, each with its norm and its residual form."""
    for streams, norm, layer in (
        (block.mixer_streams, block.input_layernorm, block.mixer),
        (block.mlp_streams, block.post_attention_layernorm, block.mlp),
    ):
        yield streams, lambda x, norm=norm, layer=layer: layer(norm(x))


@pytest.mark.parametrize("size", [1, 3])
def test_attention_residuals_by_hand(size):
    """The paper's loop over lists: sums of finished blocks, and the one in progress."""
    whole = model(AttentionResiduals.Config(24, block_size=size))
    tokens = torch.randint(256, (1, 6))
    blocks, part, place = [], whole.embed_tokens(tokens), 0

    def attend(query, sources):
        v = torch.stack(sources)
        keys = torch.nn.functional.rms_norm(v, (24,), eps=1e-6)
        return ((keys @ query).softmax(0)[..., None] * v).sum(0)

    for block in whole.layers:
        for streams, layer in layers_of(block):
            y = layer(attend(streams.query, [*blocks, part]))
            if place % size == 0:
                blocks, part = [*blocks, part], y
            else:
                part = part + y
            place += 1
    want = whole.head(whole.norm(attend(whole.collapse.query, [*blocks, part])))
    torch.testing.assert_close(whole(tokens), want)


def model(streams, layers=3, **options):
    torch.manual_seed(0)
    block = DecoderBlock.Config(
        Attention.Config(24, 4, 2, init_std=0.3),
        GatedMLP.Config(24, 32, init_std=0.3),
        RMSNorm.Config(24),
        streams=streams,
    )
    config = BlocksConfig(dim=24, num_layers=layers, blocks=(block,), init_std=1.0, **options)
    built = config.build(dtype=F64)
    torch.manual_seed(1)
    for name, parameter in built.named_parameters():
        if "streams" in name or "collapse" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return built.double()


@pytest.mark.parametrize("streams", FORMS, ids=NAMES)
def test_models_train_and_decode(streams):
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = model(streams)
    want = whole(tokens)
    with torch.no_grad():
        state = whole.new_state(2, 9)
        parts = [whole(tokens[:, a:b], state=state) for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), want)
    nested = torch.nested.nested_tensor_from_jagged(tokens.flatten(), torch.tensor([0, 9, 18]))
    torch.testing.assert_close(whole(nested).values(), want.flatten(0, 1))
    again = model(streams, gradient_checkpointing=True)
    for one in (whole, again):
        one(tokens, tokens).backward()
    grads = [{n: p.grad for n, p in one.named_parameters()} for one in (whole, again)]
    torch.testing.assert_close(*grads)
    # The first layer reads the embeddings alone, whatever its query is.
    still = {name for name, grad in grads[0].items() if not grad.any()}
    assert still <= {"layers.0.mixer_streams.query"}
    copy = BlocksConfig.from_dict(whole.config.to_dict())
    assert copy == whole.config


def test_hyper_connections_start_as_the_plain_stream():
    """With n streams the output is n times as large, which the last norm removes."""
    torch.manual_seed(0)
    plain = DecoderBlock.Config(
        Attention.Config(24, 4), GatedMLP.Config(24, 32), RMSNorm.Config(24, eps=1e-12)
    )
    config = BlocksConfig(dim=24, num_layers=3, blocks=(plain,))
    tokens = torch.randint(256, (1, 5))
    one = config.build(dtype=F64)
    other = replace(config, blocks=(replace(plain, streams=HyperConnections.Config(24)),))
    two = other.build(dtype=F64)
    assert not two.load_state_dict(one.state_dict(), strict=False).unexpected_keys
    torch.testing.assert_close(two(tokens), one(tokens))


def test_errors():
    parts = Attention.Config(8, 2), GatedMLP.Config(8, 16), RMSNorm.Config(8)
    streams = HyperConnections.Config(8)
    with pytest.raises(ValueError, match=r"streams needs placement=.pre. .*got placement='post'"):
        DecoderBlock.Config(*parts, placement="post", streams=streams)
    with pytest.raises(TypeError, match="streams must be the Config of AttentionResiduals, Hyper"):
        DecoderBlock.Config(*parts, streams=parts[0])
    blocks = DecoderBlock.Config(*parts, streams=streams), DecoderBlock.Config(*parts)
    with pytest.raises(ValueError, match="all blocks must have the same streams"):
        BlocksConfig(dim=8, blocks=blocks)
    with pytest.raises(ValueError, match="HyperConnections: place must be"):
        HyperConnections.Config(8, place=-1)
