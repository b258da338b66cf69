"""Decoders with Engram in some layers: the definition, gradients, states, padding, errors."""

import copy
import re
from dataclasses import replace

import pytest
import torch

from omniattn import calculate
from omniattn.models import BlocksConfig, generate
from omniattn.modules import (
    Attention,
    DecoderBlock,
    Engram,
    GatedLinearAttention,
    GatedMLP,
    HyperConnections,
    RMSNorm,
    RotaryEmbedding,
)

F64 = torch.float64
NGRAMS = Engram.Config(16, 50, (23, 29), ngram_dim=8, num_heads=2, pad=3)
PLACEMENTS = ("pre", "sandwich", "parallel", "parallel_norms", "post")


def config(mixer=None, engram=NGRAMS, layers=(1, 2), **options):
    mixer = Attention.Config(16, 2) if mixer is None else mixer
    block = DecoderBlock.Config(mixer, GatedMLP.Config(16, 24), RMSNorm.Config(16), **options)
    more = {"rope": RotaryEmbedding.Config(8), "engram": engram, "engram_layers": layers}
    return BlocksConfig(vocab_size=50, dim=16, num_layers=3, blocks=(block,), **more)


def built(*args, **options):
    torch.manual_seed(0)
    model = config(*args, **options).build(dtype=F64).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def tokens_of(*shape):
    return torch.randint(50, shape)


def test_a_block_reads_what_engram_adds():
    """Transformer blocks of engram_demo_v1.py in deepseek-ai/Engram, commit 11a020e."""
    model, tokens = built(), tokens_of(2, 9)
    assert [layer.engram is None for layer in model.layers] == [True, False, False]
    first, second = (model.layers[n].engram for n in (1, 2))
    assert not set(first.sizes.flatten().tolist()) & set(second.sizes.flatten().tolist())
    h, rope = model.embed_tokens(tokens), model.rotary(torch.arange(9))
    for layer in model.layers:
        if layer.engram is not None:
            h = h + layer.engram(h, tokens)[0]
        h = h + layer.mixer(layer.input_layernorm(h), rope=rope)
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    torch.testing.assert_close(model(tokens), model.head(model.norm(h)))


def test_gradients_with_and_without_checkpointing():
    model, tokens = built(), tokens_of(2, 9)
    found = []
    for checkpointing in (False, True):
        same = replace(model.config, gradient_checkpointing=checkpointing).build(dtype=F64)
        same.load_state_dict(model.state_dict())
        loss = same(tokens, tokens.roll(-1, 1))
        found.append(torch.autograd.grad(loss, list(same.parameters())))
        assert all(gradient.abs().sum() > 0 for gradient in found[-1])
    torch.testing.assert_close(*found)
    table, step = model.layers[2].engram.table, 1e-5
    row = found[0][[id(p) for p in model.parameters()].index(id(table))].abs().sum(1).argmax()
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            table[row] += sign * step
            losses.append(model(tokens, tokens.roll(-1, 1)))
            table[row] -= sign * step
    gradient = found[0][[id(p) for p in model.parameters()].index(id(table))][row].sum()
    torch.testing.assert_close((losses[0] - losses[1]) / (2 * step), gradient, rtol=1e-6, atol=0)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mixer", [None, GatedLinearAttention.Config(16, 2)], ids=["mha", "gla"])
@torch.no_grad()
def test_steps_equal_the_sequence(mixer, placement):
    model, tokens = built(mixer, placement=placement, canon="A"), tokens_of(2, 12)
    state = model.new_state(2, 12)
    cuts = [(0, 4), (4, 5), (5, 6), (6, 6), (6, 12)]
    steps = [model(tokens[:, a:b], state=state) for a, b in cuts]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens))


@torch.no_grad()
def test_states_are_saved_reordered_and_marked_after_errors():
    model, tokens = built(), tokens_of(2, 9)
    state, other = model.new_state(2, 9), model.new_state(2, 9)
    model(tokens[:, :6], state=state)
    for own, new in zip(state, other, strict=True):
        new.load_state_dict(own.state_dict())
    swap = torch.tensor([1, 0])
    for own in state:
        own.reorder(swap)
    expected = model(tokens)[:, 6:]
    torch.testing.assert_close(model(tokens[swap, 6:], state=state), expected[swap])
    kept = copy.deepcopy(other)
    model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens[:, 6:], state=other)
    model.layers[2].mlp._forward_hooks.clear()
    with pytest.raises(ValueError, match="has read tokens of a call that failed"):
        model(tokens[:, 6:], state=other)
    torch.testing.assert_close(model(tokens[:, 6:], state=kept), expected)
    with pytest.raises(TypeError, match="state must be that of this block"):
        model(tokens, state=built(engram=None, layers=()).new_state(2, 9))
    saved = kept[1].state_dict()
    saved["engram"]["tokens"] = saved["engram"]["tokens"].double()
    with pytest.raises(TypeError, match="tokens must be integers"):
        kept[1].load_state_dict(saved)


@torch.no_grad()
def test_padding_and_nested_sequences():
    model, tokens = built(), tokens_of(2, 9)
    alone = model(tokens[:1, 4:])
    real = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    real[0, ..., :4] = False
    positions = (torch.arange(9) - torch.tensor([[4], [0]])).clamp(min=0)
    torch.testing.assert_close(model(tokens, mask=real, positions=positions)[:1, 4:], alone)
    state, steps = model.new_state(2, 9), []
    for a, b in ((0, 3), (3, 6), (6, 7), (7, 9)):
        given = {"mask": real[..., :b], "positions": positions[:, a:b]}
        steps.append(model(tokens[:, a:b], state=state, **given))
    torch.testing.assert_close(torch.cat(steps, 1)[:1, 4:], alone)
    nested = torch.nested.nested_tensor([tokens[0, 4:], tokens[1]], layout=torch.jagged)
    parts = model(nested).unbind()
    torch.testing.assert_close(parts[0][None], alone)
    torch.testing.assert_close(parts[1][None], model(tokens[1:]))


@torch.no_grad()
def test_generation():
    model, prompt = built(), tokens_of(2, 5)
    greedy = generate(model, prompt, 8)
    for length in range(5, 13):
        expected = model(greedy[:, :length])[:, -1].argmax(-1)
        assert torch.equal(greedy[:, length], expected)
    for row in prompt:  # as many beams as tokens find the best of all pairs
        every = torch.cat([row.expand(50, 5), torch.arange(50)[:, None]], 1)
        first = model(row[None])[0, -1].log_softmax(-1)
        best = int((first[:, None] + model(every)[:, -1].log_softmax(-1)).argmax())
        beams = generate(model, row[None], 2, num_beams=50)
        assert beams[0, 5:].tolist() == [best // 50, best % 50]


def test_counts():
    with_ngrams, without = config(), config(engram=None, layers=())
    found, plain = calculate.parameters(with_ngrams), calculate.parameters(without)
    layers = [layer.engram for layer in with_ngrams.build().layers if layer.engram is not None]
    more = sum(p.numel() for layer in layers for p in layer.parameters())
    idle = sum(layer.table.numel() - 4 * 4 for layer in layers)  # 4 hashes, rows of 4 numbers
    assert found.total == plain.total + more and found.active == plain.active + more - idle
    assert found.parts["embeddings"] == plain.parts["embeddings"] + more
    projections = calculate.flops(with_ngrams, 10).weights - calculate.flops(without, 10).weights
    assert projections == 2 * 10 * 2 * (16 * 16 + 16 * 16)
    states = [calculate.kv_bytes(each, 10) for each in (with_ngrams, without)]
    assert states[0] - states[1] == 2 * (8 * 2 + 2 * 16 * 9)  # int64, bfloat16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config(layers=(2, 1)), "engram_layers must be numbers of layers in their order"),
        (
            lambda: config(layers=(3,)),
            "got engram_layers=(3,), num_layers=3, engram=Engram.Config(",
        ),
        (lambda: config(layers=()), "given with engram, got engram_layers=()"),
        (lambda: config(engram=None), "got engram_layers=(1, 2), num_layers=3, engram=None"),
        (
            lambda: config(engram=replace(NGRAMS, dim=8)),
            "engram must have the dim of the model, got engram.dim=8, dim=16",
        ),
        (
            lambda: config(engram=replace(NGRAMS, vocab_size=49)),
            "engram must have the vocab_size of the model, got engram.vocab_size=49, vocab_size=50",
        ),
        (
            lambda: config(engram=replace(NGRAMS, num_streams=2)).build(),
            "engram needs num_streams=1 and a block without streams, got num_streams=2",
        ),
        (
            lambda: config(streams=HyperConnections.Config(16)).build(),
            "engram needs num_streams=1 and a block without streams, got num_streams=1, streams=Hy",
        ),
        (
            lambda: config().build().layers[1](torch.ones(1, 3, 16)),
            "DecoderBlock: shared must have the tokens with engram, got None",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
