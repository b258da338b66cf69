"""Transformer-XL against its definition; memories and states continue a text."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, layer_norm

from omniattn.models import TransformerXLConfig, generate, load_model, save_model

CONFIG = TransformerXLConfig(
    vocab_size=97, dim=48, num_layers=2, num_heads=3, head_dim=10, hidden_dim=40, memory_length=64
)


def build(**changes):
    torch.manual_seed(0)
    model = replace(CONFIG, **changes).build(dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model, torch.randint(97, (2, 24))


def attention(layer, x, memory):
    """Attention of x (T, dim) to [memory; x], pair by pair of positions."""
    source = torch.cat([memory, x])
    q, k, v = (t.unflatten(-1, (3, 10)) for t in layer.qkv_net(source).chunk(3, -1))
    first = len(memory)
    angle = torch.arange(len(source), dtype=torch.float64)[:, None]
    angle = angle * 10000.0 ** (-torch.arange(0, 48, 2, dtype=torch.float64) / 48)
    r = layer.r_net(torch.cat([angle.sin(), angle.cos()], -1)).unflatten(-1, (3, 10))
    rows = []
    for i in range(first, len(source)):
        content = torch.einsum("hd,jhd->hj", q[i] + layer.r_w_bias, k[: i + 1])
        distances = torch.arange(i, -1, -1)
        position = torch.einsum("hd,jhd->hj", q[i] + layer.r_r_bias, r[distances])
        weights = ((content + position) / 10**0.5).softmax(-1)
        rows.append(torch.einsum("hj,jhd->hd", weights, v[: i + 1]).flatten())
    return layer.o_net(torch.stack(rows))


@torch.no_grad()
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_a_segment_after_a_memory_is_that_of_the_definition(placement):
    model, tokens = build(placement=placement)
    _, memory = model.segment(tokens[:, :9])
    found = model(tokens[:, 9:], memory=memory)
    for row in range(2):
        x = model.embed_tokens.weight[tokens[row, 9:]] * 48**0.5
        for i, (attend, mlp) in enumerate(zip(model.attentions, model.mlps, strict=True)):
            assert attend.layer.r_w_bias is model.attentions[0].layer.r_w_bias
            norms = [
                lambda t, n=n: layer_norm(t, (48,), n.weight, n.bias)
                for n in (attend.norm, mlp.norm)
            ]
            up, down = mlp.layer.up_proj, mlp.layer.down_proj
            if placement == "post":
                x = norms[0](x + attention(attend.layer, x, memory[i][row]))
                x = norms[1](x + down(up(x).relu()))
            else:
                x = x + attention(attend.layer, norms[0](x), norms[0](memory[i][row]))
                x = x + down(up(norms[1](x)).relu())
        wanted = x @ model.embed_tokens.weight.T + model.head_bias
        torch.testing.assert_close(found[row], wanted)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"placement": "pre"}, {"cutoffs": (20, 60)}])
def test_segments_and_states_are_the_full_pass(changes):
    model, tokens = build(**changes, share_biases=False)
    memory, parts = None, []
    for segment in tokens.split([9, 1, 14], 1):
        part, memory = model.segment(segment, memory)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))
    state = model.new_state(2, 24)
    parts = [model(part, state=state) for part in tokens.split([9, 1, 14], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))
    found = generate(model, tokens, 6)
    assert torch.equal(found[:, 24:], model(found[:, :-1]).argmax(-1)[:, 23:])


@torch.no_grad()
def test_the_memory_ends_where_the_window_of_equal_lengths_ends():
    model, tokens = build(memory_length=5, same_length=True)
    memory, parts = None, []
    for token in tokens.split(1, 1):
        part, memory = model.segment(token, memory)
        parts.append(part)
    assert all(m.shape == (2, 5, 48) for m in memory)
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))


def test_losses_of_both_softmaxes():
    for cutoffs in ((), (20, 60)):
        model, tokens = build(cutoffs=cutoffs)
        targets = tokens.roll(-1, 1)
        targets[0, :7] = -100
        loss = model(tokens, targets)
        torch.testing.assert_close(
            loss, cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        )
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        assert model(tokens, torch.full_like(tokens, -100)).item() == 0
        _, memory = model.segment(tokens)
        assert not any(m.requires_grad for m in memory)


@pytest.mark.parametrize("shared", [True, False])
def test_checkpoints_and_conversions_keep_biases_shared(shared, tmp_path):
    model, tokens = build(share_biases=shared)
    save_model(model, tmp_path / "xl.safetensors")
    empty = model.config.build(device="meta").to_empty(device="cpu").double()
    empty.load_state_dict(model.state_dict())
    for found in (
        load_model(tmp_path / "xl.safetensors"),
        empty,
        pickle.loads(pickle.dumps(model)),
    ):
        assert len(list(found.parameters())) == len(list(model.parameters()))
        biases = {id(attend.layer.r_w_bias) for attend in found.attentions}
        assert len(biases) == (1 if shared else 2)
        torch.testing.assert_close(found(tokens), model(tokens))
    with pytest.raises(RuntimeError, match="Missing key"):
        state = {n: t for n, t in model.state_dict().items() if "0.layer.r_w_bias" not in n}
        empty.load_state_dict(state)


def test_wrong_inputs_are_named():
    model, tokens = build()
    with pytest.raises(ValueError, match="memory must be the list of `segment`, with an entry for"):
        model(tokens, memory=[])
    with pytest.raises(ValueError, match="cutoffs must increase and be below vocab_size, got cut"):
        replace(CONFIG, cutoffs=(60, 20))
    with pytest.raises(ValueError, match="TransformerXLConfig: placement must be one of"):
        replace(CONFIG, placement="sandwich")
    with pytest.raises(ValueError, match="TransformerXL: tokens must have shape"):
        model(tokens[0])
