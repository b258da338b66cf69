"""Encoder-decoders compute what transformers and torch compute: values, gradients, tokens."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from omniattn.models import (
    BartConfig,
    EncoderDecoder,
    MarianConfig,
    MBartConfig,
    Model,
    Routers,
    SwitchTransformerConfig,
    T5Config,
    TransformerConfig,
    generate,
)
from omniattn.modules import MLP, Attention, DecoderBlock, LayerNorm, MoE

_SIZES = {"vocab_size": 97, "dim": 48, "num_layers": 2, "num_heads": 4, "hidden_dim": 40}
_MARIAN = {**_SIZES, "max_positions": 40, "token_ids": (("pad_token_id", 1),)}
CONFIGS = {
    "bart": BartConfig(**_SIZES, max_positions=40, dropout_p=0.1, attention_dropout_p=0.2),
    "bart-distilled": BartConfig(
        **_SIZES, max_positions=40, decoder_layers=1, scale_embedding=True, activation_dropout_p=0.1
    ),
    "mbart": MBartConfig(**_SIZES, max_positions=40),
    "marian": MarianConfig(**_MARIAN, decoder_layers=1),
    "marian-relu": MarianConfig(**_MARIAN, activation="relu", scale_embedding=False),
    "switch": SwitchTransformerConfig(
        **_SIZES, head_dim=12, experts=4, capacity_factor=None, capacity=64
    ),
    "switch-full": SwitchTransformerConfig(
        **_SIZES, head_dim=12, experts=4, expert_period=1, capacity_factor=None, capacity=5
    ),
    "t5-shallow": T5Config(**_SIZES, head_dim=12, decoder_layers=1),
}
#: Without the special tokens of BART.
PLAIN = {
    **{"eos_token_id": None, "pad_token_id": 1, "max_new_tokens": 9, "do_sample": False},
    **{"decoder_start_token_id": 2, "forced_eos_token_id": None, "forced_bos_token_id": None},
}


def pair(config):
    """Returns our model of random weights, and that of transformers with copies of them."""
    torch.manual_seed(0)
    ours = config.build(dtype=torch.float64).eval()
    with torch.no_grad():
        for tensor in ours.state_dict().values():
            tensor.normal_(std=0.2)
    return ours, ours.to_hf()


def inputs():
    """Returns source, tokens and targets, without the padding that BART does not train."""
    source, tokens = torch.randint(2, 97, (2, 33)), torch.randint(2, 97, (2, 17))
    return source, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_gradients_are_those_of_transformers(name):
    ours, theirs = pair(CONFIGS[name])
    assert type(ours.config).from_dict(json.loads(json.dumps(ours.config.to_dict()))) == ours.config
    back = Model.from_hf(theirs)
    assert back.config == ours.config
    torch.testing.assert_close(back.state_dict(), ours.state_dict(), rtol=0, atol=0)

    source, tokens, targets = inputs()
    real = torch.arange(33) < torch.tensor([[33], [20]])
    for mask in (None, real):
        given = {} if mask is None else {"attention_mask": mask.long()}
        out = theirs(input_ids=source, decoder_input_ids=tokens, labels=targets, **given)
        torch.testing.assert_close(ours(source, tokens, source_mask=mask), out.logits)
        loss = ours(source, tokens, targets, source_mask=mask)
        torch.testing.assert_close(loss, out.loss)
    loss.backward()
    out.loss.backward()
    for model in (ours, theirs):
        for parameter in model.parameters():
            zero = torch.zeros_like(parameter)  # experts without tokens have no gradient
            parameter.data = zero if parameter.grad is None else parameter.grad
    # Routers of transformers have fp32 weights.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if "switch" in name else {}
    for sides in ours.config.counterpart.pairs(ours, theirs):
        got, want = (torch.cat([t.flatten() for t in side]).double() for side in sides)
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_transformers(name, num_beams):
    ours, theirs = pair(CONFIGS[name])
    source, start = inputs()[0], torch.full((2, 1), 2)
    real = torch.arange(33) < torch.tensor([[33], [20]])
    for mask in (None, real):
        given = {} if mask is None else {"attention_mask": mask.long()}
        wanted = theirs.generate(source, **PLAIN, num_beams=num_beams, **given)
        found = generate(ours, start, 9, source=source, source_mask=mask, num_beams=num_beams)
        assert torch.equal(found, wanted)


def test_options_that_are_absent_here_are_named():
    for option, value in (
        ("activation_function", "relu"),
        ("decoder_ffn_dim", 50),
        ("decoder_attention_heads", 2),
        ("encoder_layerdrop", 0.1),
        ("tie_word_embeddings", False),
    ):
        config = CONFIGS["bart"].to_hf()
        setattr(config, option, value)
        with pytest.raises(NotImplementedError, match=f"BartConfig: {option} must be .*, got"):
            BartConfig.from_hf(config)


def torch_layer(block):
    """Returns the layer of torch with the weights of a block, whose attention has no biases."""
    decodes = block.cross_attn is not None
    kind = nn.TransformerDecoderLayer if decodes else nn.TransformerEncoderLayer
    pre = block.config.placement == "pre"
    sizes = {"dim_feedforward": 40, "dropout": 0.0, "batch_first": True, "norm_first": pre}
    layer = kind(48, 4, **sizes, dtype=torch.float64)
    attentions = [(layer.self_attn, block.mixer)]
    names = ["input_layernorm", "post_attention_layernorm"]
    if not pre:
        names = ["mixer_output_norm", "mlp_output_norm"]
    if decodes:
        attentions.append((layer.multihead_attn, block.cross_attn))
        names.insert(1, "cross_attention_layernorm" if pre else "cross_attn_output_norm")
    for theirs, ours in attentions:
        weights = [getattr(ours, f"{n}_proj").weight for n in "qkv"]
        theirs.in_proj_weight.data = torch.cat(weights)
        theirs.out_proj.weight.data = ours.o_proj.weight
        nn.init.zeros_(theirs.in_proj_bias)
        nn.init.zeros_(theirs.out_proj.bias)
    layer.linear1.load_state_dict(block.mlp.up_proj.state_dict())
    layer.linear2.load_state_dict(block.mlp.down_proj.state_dict())
    for i, name in enumerate(names, 1):
        getattr(layer, f"norm{i}").load_state_dict(getattr(block, name).state_dict())
    return layer


@torch.no_grad()
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_the_transformer_of_2017(placement):
    config = TransformerConfig(**_SIZES, placement=placement)
    torch.manual_seed(0)
    model = config.build(dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    source, tokens, _ = inputs()

    def embedded(ids):
        angle = torch.arange(ids.shape[1], dtype=torch.float64)[:, None]
        angle = angle * 10000.0 ** (-torch.arange(0, 48, 2, dtype=torch.float64) / 48)
        table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
        return model.embed_tokens.weight[ids] * 48**0.5 + table

    memory, x = embedded(source), embedded(tokens)
    for block in model.encoder.layers:
        memory = torch_layer(block)(memory)
    memory = memory if placement == "post" else model.encoder.norm(memory)
    hidden = torch.ones(16, 16).triu(1).bool()
    for block in model.decoder.layers:
        x = torch_layer(block)(x, memory, tgt_mask=hidden)
    x = x if placement == "post" else model.decoder.norm(x)
    wanted = x @ model.embed_tokens.weight.T
    # 1e-6: the table of positions is rounded to fp32.
    torch.testing.assert_close(model(source, tokens), wanted, rtol=1e-6, atol=1e-5)

    states, memory = model.new_state(2, 16), model.encode(source)
    steps = [model.hidden(part, memory, state=states) for part in tokens.split([5, 1, 10], 1)]
    torch.testing.assert_close(model.head(torch.cat(steps, 1)), model(source, tokens))


def test_experts_in_training():
    """Half of an even share of 66 tokens is 9 for each expert; GShard uses two for a token."""
    for top_k in (1, 2):
        config = replace(CONFIGS["switch"], capacity=None, capacity_factor=0.5, top_k=top_k)
        torch.manual_seed(0)
        model = config.build()
        routers = Routers(model)
        assert [type(layer.mlp) for layer in model.encoder.layers] == [MLP, MoE]
        source, tokens, targets = inputs()
        model(source, tokens, targets).backward()
        assert routers.loss().item() > 0
        moe = model.encoder.layers[1].mlp
        assert moe.state.counts.sum() == 66 * top_k
        capacity = math.ceil(0.5 * top_k * 66 / 4)
        assert moe.state.dropped == (moe.state.counts - capacity).clamp(min=0).sum()
        assert moe.gate.weight.grad.abs().max() > 0


def test_labels_are_smoothed_in_training():
    torch.manual_seed(0)
    model = TransformerConfig(**_SIZES, label_smoothing=0.1).build(dtype=torch.float64)
    source, tokens, targets = inputs()
    targets[0, :5] = -100
    logits = model(source, tokens).flatten(0, 1)
    for training, smoothing in ((True, 0.1), (False, 0.0)):
        wanted = nn.functional.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)
        torch.testing.assert_close(model.train(training)(source, tokens, targets), wanted)


def test_an_architecture_is_a_config():
    class Plain(EncoderDecoder.Config):
        architecture = "plain-encoder-decoder"

        def block(self, layer, *, decoder):
            def attention(**options):
                return Attention.Config(16, 2, causal=decoder and not options, **options)

            cross = attention(cross=True) if decoder else None
            mlp, norm = MLP.Config(16, 32), LayerNorm.Config(16)
            return DecoderBlock.Config(attention(), mlp, norm, cross=cross)

    try:
        model = Plain(11, 16, 1).build()
        assert model(*[torch.zeros(1, 3, dtype=torch.long)] * 2).shape == (1, 3, 11)
    finally:
        del EncoderDecoder.Config.architectures["plain-encoder-decoder"]


def test_wrong_inputs_are_named():
    model = CONFIGS["bart"].build()
    tokens = torch.ones(1, 41, dtype=torch.long)
    message = "EncoderDecoder: {} must be at most 40, the number of positions, got 41 tokens"
    with pytest.raises(ValueError, match=message.format("source")):
        model(tokens, tokens[:, :1])
    memory, state = model.encode(tokens[:, :3]), model.new_state(1, 50)
    with torch.no_grad(), pytest.raises(ValueError, match=message.format("tokens")):
        for part in tokens.split([40, 1], 1):
            model.hidden(part, memory, state=state)
    with pytest.raises(ValueError, match="EncoderDecoder: source must have shape"):
        model(tokens[0], tokens)
    source, start = tokens[:, :5], tokens[:, :1]
    with pytest.raises(ValueError, match=r"generate: source_mask must have shape \(B, S\) of sou"):
        generate(model, start, 1, source=source, source_mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match="generate: source_mask must be bool"):
        generate(model, start, 1, source=source, source_mask=source)
    with pytest.raises(ValueError, match="source_mask needs a source, got source=None"):
        generate(model, start, 1, source_mask=source > 0)
    with pytest.raises(ValueError, match="TransformerConfig: placement must be one of"):
        TransformerConfig(placement="sandwich")
    with pytest.raises(ValueError, match=r"residual_in_fp32 must be False .*='post'"):
        replace(model.config.block(0, decoder=True), residual_in_fp32=True)
