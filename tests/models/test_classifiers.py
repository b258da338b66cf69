"""Classification heads on decoders and encoders: values, gradients, pooling, transformers."""

from dataclasses import replace

import pytest
import torch
import transformers
from small_presets import ENCODERS, FAMILIES, SMALL

from omniattn.models import (
    BertClassifier,
    LlamaConfig,
    Model,
    SequenceClassifier,
    SequenceClassifierConfig,
    TokenClassifier,
    TokenClassifierConfig,
    from_hf,
    load_model,
    save_model,
)

DTYPE = torch.float64
LLAMA = LlamaConfig(vocab_size=97, dim=48, num_layers=2, num_heads=4, hidden_dim=40)
MODELS = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tie_embeddings=True),
    "qwen3": FAMILIES["qwen3"],
    "gpt2": SMALL["gpt2"],
    "bloom": FAMILIES["bloom"],
    "bert": SMALL["bert"],
    **{
        name: ENCODERS[name]
        for name in (
            "roberta",
            "electra-discriminator",
            "deberta",
            "deberta-v2",
            "bigbird",
            "longformer",
        )
    },
}
#: What transformers' heads for texts compute, other than that of decoders.
HEADS = {
    "bert": "tanh",
    "roberta": "tanh",
    "electra-discriminator": "gelu",
    "deberta": "gelu",
    "deberta-v2": "gelu",
    "bigbird": "gelu_tanh",
    "longformer": "tanh",
}


def texts(name):
    """Returns the config of transformers' classifier of texts."""
    if name in HEADS:
        return SequenceClassifierConfig(MODELS[name], 3, 0.1, activation=HEADS[name])
    return SequenceClassifierConfig(MODELS[name], 3, pool="last", bias=False)


def pair(config):
    torch.manual_seed(0)
    ours = config.build(dtype=DTYPE).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return ours, ours.to_hf()


def inputs(name):
    padding = 1 if name in ("roberta", "longformer") else 0
    tokens, real = torch.randint(2, 97, (2, 33)), torch.ones(2, 33, dtype=torch.bool)
    real[1, 21:] = False
    return tokens.masked_fill(~real, padding), real, padding


def assert_same_gradients(ours, theirs):
    for model in (ours, theirs):
        for parameter in model.parameters():
            zero = torch.zeros_like(parameter)
            parameter.data = zero if parameter.grad is None else parameter.grad
    for own, wanted in ours.config.counterpart.pairs(ours, theirs):
        got, want = (torch.cat([t.flatten() for t in side]) for side in (own, wanted))
        scale = max(want.abs().max().item(), 1e-2)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", MODELS)
def test_texts_get_the_labels_of_transformers(name):
    ours, theirs = pair(texts(name))
    assert type(theirs).__name__.endswith("ForSequenceClassification")
    tokens, real, padding = inputs(name)
    theirs.config.pad_token_id = padding
    labels = torch.tensor([2, 0])
    out = theirs(tokens, attention_mask=real.long(), labels=labels)
    torch.testing.assert_close(ours(tokens, key_padding=real), out.logits, rtol=1e-5, atol=1e-5)
    loss = ours(tokens, labels, key_padding=real)
    torch.testing.assert_close(loss, out.loss.double(), rtol=1e-5, atol=1e-5)
    loss.backward()
    out.loss.backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_tokens_get_the_labels_of_transformers(name):
    ours, theirs = pair(TokenClassifierConfig(MODELS[name], 5, 0.1))
    assert type(theirs).__name__.endswith("ForTokenClassification")
    tokens, real, _ = inputs(name)
    labels = torch.randint(5, (2, 33)).masked_fill(~real, -100)
    out = theirs(tokens, attention_mask=real.long(), labels=labels)
    logits = ours(tokens, key_padding=real)
    torch.testing.assert_close(logits[real], out.logits[real], rtol=1e-5, atol=1e-5)
    loss = ours(tokens, labels, key_padding=real)
    torch.testing.assert_close(loss, out.loss.double(), rtol=1e-5, atol=1e-5)

    back = Model.from_hf(theirs)
    assert back.config == ours.config and isinstance(back, TokenClassifier)
    torch.testing.assert_close(back.state_dict(), ours.state_dict(), rtol=0, atol=0)
    back = Model.from_hf(pair(texts(name))[1])
    if name == "bert":  # whose classifier has a class of its own
        assert isinstance(back, BertClassifier)
    else:
        assert back.config == texts(name) and isinstance(back, SequenceClassifier)


def test_folders_and_checkpoints_come_back(tmp_path):
    for config in (texts("llama"), TokenClassifierConfig(MODELS["roberta"], 5)):
        ours, theirs = pair(config)
        theirs.save_pretrained(tmp_path)
        found = from_hf(tmp_path)
        assert found.config == config
        torch.testing.assert_close(found.state_dict(), ours.state_dict(), rtol=0, atol=0)
        save_model(ours, tmp_path / "own.safetensors")
        loaded = load_model(tmp_path / "own.safetensors", backend="reference")
        assert loaded.config == replace(config, backend="reference")
        assert loaded.body.config.backend == "reference"
        tokens = torch.randint(97, (2, 9))
        torch.testing.assert_close(loaded(tokens), ours(tokens))


@pytest.mark.parametrize("pool", ["first", "last", "mean"])
@torch.no_grad()
def test_padding_on_either_side_changes_no_label(pool):
    for model in (SMALL["bert"], LLAMA, SMALL["mamba2"]):
        classifier, _ = None, torch.manual_seed(0)
        config = SequenceClassifierConfig(model, pool=pool, activation="tanh", init_std=0.5)
        classifier = config.build(dtype=DTYPE).eval()
        tokens = torch.randint(97, (2, 12))
        real = torch.ones(2, 12, dtype=torch.bool)
        real[:, 8:] = False
        torch.testing.assert_close(classifier(tokens, key_padding=real), classifier(tokens[:, :8]))
        states = classifier.states(tokens, None, {})
        pooled = {"first": states[:, 0], "last": states[:, -1], "mean": states.mean(1)}
        torch.testing.assert_close(classifier.pooled(tokens), pooled[pool])
    left = real.flip(1)
    if pool == "last":
        llama = SequenceClassifierConfig(LLAMA, pool=pool).build(dtype=DTYPE)
        torch.testing.assert_close(llama(tokens, key_padding=left), llama(tokens[:, 4:]))


def test_heads_learn_what_they_are_asked():
    """Which of two tokens a text has, and for each token whether it is above 48."""
    torch.manual_seed(0)
    tokens = torch.randint(2, 97, (32, 9))
    with_two = torch.arange(32) % 2
    tokens[:, 4] = with_two
    above = (tokens > 48).long()
    for config, labels in (
        (SequenceClassifierConfig(LLAMA, pool="mean"), with_two),
        (TokenClassifierConfig(SMALL["bert"]), above),
    ):
        model = config.build()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(tokens, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.3 * losses[0]


def test_what_has_no_such_head_is_named():
    for make, message in (
        (lambda: SequenceClassifierConfig(SMALL["vit"]), "model must be the config of a decoder"),
        (lambda: TokenClassifierConfig(SMALL["t5"]), "model must be the config of a decoder or a"),
        (lambda: SequenceClassifierConfig(LLAMA, pool="max"), "pool must be one of first, last"),
        (lambda: SequenceClassifierConfig(LLAMA, activation="relu"), "activation must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(NotImplementedError, match="pool must be 'last' in transformers for Llama"):
        replace(texts("llama"), pool="mean").to_hf()
    with pytest.raises(NotImplementedError, match="no such model of BertClassifierConfig"):
        SequenceClassifierConfig(SMALL["bert-classifier"]).to_hf()
    theirs = texts("llama").to_hf()
    theirs.problem_type = "regression"
    with pytest.raises(NotImplementedError, match="problem_type must be 'single_label_class"):
        SequenceClassifierConfig.from_hf(theirs)
    with pytest.raises(NotImplementedError, match="model_type must be that of a model with such"):
        TokenClassifierConfig.from_hf(transformers.AlbertConfig())
    model = TokenClassifierConfig(SMALL["bert"]).build()
    with pytest.raises(ValueError, match="TokenClassifier: key_padding must have the shape of"):
        model(torch.ones(2, 3, dtype=torch.int64), key_padding=torch.ones(2, 2, dtype=torch.bool))
