"""Text encoders compute what transformers computes, with padding: states, loss and gradients."""

from dataclasses import replace

import pytest
import torch
from small_presets import ENCODERS

from omniattn.functional.masks import KeyPadding
from omniattn.models import (
    PRESETS,
    DebertaV2Config,
    Electra,
    ElectraConfig,
    ElectraDiscriminatorConfig,
    ElectraGeneratorConfig,
    Model,
    from_hf,
    load_model,
    save_model,
)

DTYPE = torch.float64
#: A BigBird whose tokens do not see all others.
SPARSE = replace(ENCODERS["bigbird"], block=4)
#: transformers computes their attention, norms or losses in fp32.
ROUNDING = dict.fromkeys(
    ("longformer", "deberta", "deberta-positions", "electra-discriminator", "electra-equal"), 1e-5
)


def pair(config):
    """Returns our model of random weights, and that of transformers with copies of them."""
    torch.manual_seed(0)
    ours = config.build(dtype=DTYPE).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return ours, ours.to_hf()


def inputs(config):
    """Returns our arguments and those of transformers: two texts, of which one is padded."""
    tokens = torch.randint(3, 97, (2, 33))
    real = torch.ones(2, 33, dtype=torch.bool)
    real[1, 21:] = False
    tokens[~real] = config.padding_id or 0
    ours, theirs = {"key_padding": real}, {"attention_mask": real.long()}
    if config.token_types > 1:
        types = (torch.arange(33) > 9).long().expand(2, -1)
        ours["token_types"] = theirs["token_type_ids"] = types
    if config.architecture == "longformer":
        ours["global_index"] = torch.tensor([[0, 7], [3, 9]])
        theirs["global_attention_mask"] = torch.zeros_like(tokens)
        theirs["global_attention_mask"][0, [0, 7]] = 1
        theirs["global_attention_mask"][1, [3, 9]] = 1
    if config.architecture == "bigbird" and config.block == 4:
        ours["rand_blocks"] = torch.zeros(4, 7, 1, dtype=torch.int64)
    return tokens, real, ours, theirs


@pytest.mark.parametrize("name", [*ENCODERS, "bigbird-sparse"])
def test_states_loss_and_gradients_are_those_of_transformers(name):
    config = SPARSE if name == "bigbird-sparse" else ENCODERS[name]
    ours, theirs = pair(config)
    tokens, real, given, other = inputs(config)
    labels = torch.randint(2 if "discriminator" in name or "equal" in name else 97, (2, 33))
    labels = labels.masked_fill(~real, -100)
    close = {"rtol": 1e-9, "atol": ROUNDING.get(name, 1e-9)}
    out = theirs(tokens, labels=labels, output_hidden_states=True, **other)
    hidden = ours.hidden(tokens, **given)
    torch.testing.assert_close(hidden[real], out.hidden_states[-1][real], **close)
    logits = ours(tokens, **given)
    torch.testing.assert_close(logits[real], out.logits[real], **close)
    loss = ours(tokens, labels, **given)
    torch.testing.assert_close(loss, out.loss.double(), **close)

    loss.backward()
    out.loss.backward()
    for model in (ours, theirs):
        for parameter in model.parameters():
            zero = torch.zeros_like(parameter)
            parameter.data = zero if parameter.grad is None else parameter.grad
    for own, wanted in config.counterpart.pairs(ours, theirs):
        got, want = (torch.cat([t.flatten() for t in side]) for side in (own, wanted))
        scale = max(want.abs().max().item(), 1e-2)
        torch.testing.assert_close(got, want, rtol=0, atol=ROUNDING.get(name, 1e-9) * scale)


@torch.no_grad()
def test_padding_changes_no_real_token():
    for config in ENCODERS.values():
        model, _ = pair(config)
        tokens, real, given, _ = inputs(config)
        first = {k: v[1:, :21] for k, v in given.items() if k in ("key_padding", "token_types")}
        if "global_index" in given:
            first["global_index"] = given["global_index"][1:]
        short = model(tokens[1:, :21], **first)
        torch.testing.assert_close(model(tokens, **given)[1:, :21], short)
        if not config.takes_key_padding:
            given |= {"mask": KeyPadding(real), "key_padding": None}
            if getattr(config, "convolution", 0) == 0:  # which reads the neighbors
                torch.testing.assert_close(model(tokens, **given)[1:, :21], short)


@torch.no_grad()
def test_the_mask_decoder_reads_absolute_positions():
    """The published one: two passes of the last layer, with queries h + P and keys h."""
    plain = ENCODERS["deberta-v2"]
    config = replace(plain, mask_decoder=True)
    assert config.longest == 40 and plain.longest is None
    torch.manual_seed(0)
    ours = config.build(dtype=DTYPE).eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    without = plain.build(dtype=DTYPE)
    state = {n: t for n, t in ours.state_dict().items() if n != "mask_positions.weight"}
    without.load_state_dict(state)
    theirs = without.eval().to_hf()
    tokens, real, given, other = inputs(config)
    encoder = theirs.deberta.encoder
    states = theirs.deberta(tokens, output_hidden_states=True, **other).hidden_states[-2]
    query = states + ours.mask_positions.weight[:33]
    for _ in range(2):
        query, _ = encoder.layer[-1](
            states,
            encoder.get_attention_mask(real.long()),
            query_states=query,
            relative_pos=encoder.get_rel_pos(states),
            rel_embeddings=encoder.get_rel_embedding(),
        )
    want = theirs.lm_predictions(query, theirs.deberta.embeddings.word_embeddings)
    torch.testing.assert_close(ours(tokens, **given)[real], want[real])
    assert torch.equal(ours.hidden(tokens, **given), without.hidden(tokens, **given))
    with pytest.raises(NotImplementedError, match="mask_decoder must be False in transformers"):
        ours.to_hf()
    with pytest.raises(ValueError, match="mask_decoder must be False with adds_positions=True"):
        replace(config, adds_positions=True)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("roberta", "is_decoder", True),
        ("electra-generator", "hidden_act", "relu"),
        ("electra-discriminator", "attention_probs_dropout_prob", 0.3),
        ("deberta", "relative_attention", False),
        ("deberta", "pos_att_type", ["c2p"]),
        ("deberta", "talking_head", True),
        ("deberta-v2", "conv_groups", 2),
        ("longformer", "onnx_export", True),
        ("bigbird", "attention_type", "original_full"),
        ("bigbird", "rescale_embeddings", True),
    ],
)
def test_options_that_are_absent_here_are_named(name, option, value):
    theirs = ENCODERS[name].to_hf()
    setattr(theirs, option, value)
    with pytest.raises(NotImplementedError, match=f"{option} must be .*, got {option}="):
        type(ENCODERS[name]).from_hf(theirs)


def test_other_ways_to_say_the_same():
    theirs = ENCODERS["deberta"].to_hf()
    theirs.max_relative_positions = -1
    assert type(ENCODERS["deberta"]).from_hf(theirs).max_distance == 40
    theirs = ENCODERS["longformer"].to_hf()
    theirs.attention_window = 6
    assert type(ENCODERS["longformer"]).from_hf(theirs).window == 6
    theirs = ENCODERS["roberta"].to_hf()
    assert theirs.pad_token_id == 1
    theirs.pad_token_id = 3
    assert type(ENCODERS["roberta"]).from_hf(theirs).padding_id == 3


@pytest.mark.parametrize("name", ["roberta", "electra-generator", "deberta-v2"])
def test_folders_of_transformers_become_the_same_model(name, tmp_path):
    ours, theirs = pair(ENCODERS[name])
    theirs.save_pretrained(tmp_path)
    found = from_hf(tmp_path)
    assert found.config == ours.config == Model.from_hf(theirs).config
    torch.testing.assert_close(found.state_dict(), ours.state_dict(), rtol=0, atol=0)


def test_wrong_arguments_are_named():
    for change, message in (
        (
            {"window": (4,)},
            "window must be a number or one number per layer, got",
        ),
        ({"window": 3}, "LongformerAttention: window must be even, got window=3"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(ENCODERS["longformer"], **change)
    with pytest.raises(ValueError, match="convolution must be odd or 0, got convolution=2"):
        replace(ENCODERS["deberta-v2"], convolution=2)
    with pytest.raises(ValueError, match="conv_activation must be one of gelu, tanh, got"):
        replace(ENCODERS["deberta-v2"], conv_activation="relu")
    tokens = torch.ones(2, 5, dtype=torch.int64)
    model = ENCODERS["deberta-v3"].build()
    with pytest.raises(ValueError, match="Deberta: token_types must be None with a config of"):
        model(tokens, token_types=tokens)
    with pytest.raises(ValueError, match="Deberta: key_padding must have the shape of tokens, got"):
        model(tokens, key_padding=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"positions must be in \[0, 40\), got positions from 2"):
        ENCODERS["roberta"].build()(torch.full((1, 39), 5))


def electra():
    """Returns a small ELECTRA of random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "num_layers": 1, "num_heads": 2, "embedding_dim": 16}
    config = ElectraConfig(
        ElectraGeneratorConfig(dim=8, hidden_dim=16, **sizes),
        ElectraDiscriminatorConfig(dim=24, hidden_dim=40, **sizes),
    )
    model = config.build(dtype=DTYPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_electra_adds_the_losses_of_both_models(tmp_path):
    model = electra().eval()
    text = torch.randint(97, (2, 33))
    masked = torch.rand(2, 33) < 0.3
    targets = text.masked_fill(~masked, -100)
    tokens = text.masked_fill(masked, 96)
    proposed, replaced, loss = model.propose(tokens, targets)
    assert torch.equal(proposed[~masked], text[~masked])
    assert torch.equal(replaced, (proposed != text).long())
    assert 0 < replaced.sum() <= masked.sum()
    logits = model.discriminator(proposed)
    detection = torch.nn.functional.binary_cross_entropy_with_logits(logits, replaced.to(DTYPE))
    total = model(tokens, targets)
    torch.testing.assert_close(total, loss + 50 * detection)
    wanted = torch.nn.functional.cross_entropy(model.generator(tokens)[masked], text[masked])
    torch.testing.assert_close(loss, wanted)
    parts = model.further_losses()
    assert parts == {"generator": loss.item(), "discriminator": detection.item()}
    assert torch.equal(model(tokens), model.discriminator(tokens))

    total.backward()
    shared = [p for n, p in model.named_parameters() if n.startswith("discriminator.embed_")]
    assert all(p.grad is not None for p in model.parameters()) and len(shared) == 7
    assert not [n for n, _ in model.named_parameters() if n.startswith("generator.embed_tokens")]
    save_model(model, tmp_path / "electra.safetensors")
    back = load_model(tmp_path / "electra.safetensors")
    assert back.config == model.config
    assert torch.equal(back(tokens, targets), total)
    model.train()
    assert not torch.equal(model.propose(tokens, targets)[0], model.propose(tokens, targets)[0])


def test_electra_draws_from_the_distribution_of_the_generator():
    model = electra()
    tokens = torch.randint(97, (1, 33)).expand(400, -1)
    targets = torch.full_like(tokens, -100)
    targets[:, 5] = 3
    proposed, _, _ = model.propose(tokens, targets)
    share = torch.bincount(proposed[:, 5], minlength=97) / 400
    wanted = model.generator(tokens[:1])[0, 5].softmax(-1)
    assert (share - wanted).abs().max() < 0.1


def test_electra_ignores_padding():
    model = electra().eval()
    tokens = torch.randint(97, (2, 12))
    real = torch.ones(2, 12, dtype=torch.bool)
    real[:, 9:] = False
    targets = torch.full_like(tokens, -100)
    targets[:, 4] = 7
    short = model(tokens[:, :9], targets[:, :9])
    torch.testing.assert_close(model(tokens, targets, key_padding=real), short)
    for change, message in (
        (
            {"generator": ElectraDiscriminatorConfig()},
            "generator must be ElectraGeneratorConfig",
        ),
        ({"generator": ElectraGeneratorConfig(token_types=1)}, "token_types of generator and"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"ElectraConfig: {message}"):
            ElectraConfig(**change)
    with pytest.raises(ValueError, match="Electra: targets must have the shape of tokens, got"):
        model(tokens, targets[:, :3])
    with pytest.raises(ValueError, match="replaced must have the shape of tokens, got"):
        model.discriminator(tokens, targets[:, :3])
    assert isinstance(model, Electra)


def test_numbers_of_parameters():
    """Counted from the sizes, layer by layer."""
    for name in ("roberta-base", "roberta-large", "longformer-base-4096"):
        c = PRESETS[name]
        block = 4 * c.dim * c.dim + 2 * c.dim * c.hidden_dim + 9 * c.dim + c.hidden_dim
        if name.startswith("longformer"):
            block += 3 * (c.dim * c.dim + c.dim)
        embeddings = (c.vocab_size + c.max_positions + c.token_types + 2) * c.dim
        head = c.dim * c.dim + 3 * c.dim + c.vocab_size
        assert c.num_parameters == embeddings + c.num_layers * block + head
    c = PRESETS["deberta-v3-base"]
    assert isinstance(c, DebertaV2Config)
    block = 4 * c.dim * c.dim + 2 * c.dim * c.hidden_dim + 9 * c.dim + c.hidden_dim
    tables = (c.vocab_size + 2 * c.buckets + 4) * c.dim
    head = c.dim * c.dim + 3 * c.dim + c.vocab_size
    assert c.num_parameters == tables + c.num_layers * block + head
