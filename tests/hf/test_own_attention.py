"""Layers that compute attention or call torch's themselves run on this package's kernels."""

import copy
import pickle
from unittest import mock

import pytest
import torch
import transformers as hf
from patched_models import messages
from torch import nn

import omniattn.hf
from omniattn import functional
from omniattn.hf.attention import deberta
from omniattn.hf.attention.alibi import bloom_forward, mpt_forward

SIZES = {
    **{"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    **{"relative_attention": True, "position_biased_input": False, "type_vocab_size": 0},
}
SECOND = {"position_buckets": 6, "norm_rel_ebd": "layer_norm", "share_att_key": True}
BOTH = ["c2p", "p2c"]


def first(**given) -> nn.Module:
    options = {"max_relative_positions": 9, "pos_att_type": BOTH} | given
    return hf.DebertaForMaskedLM(hf.DebertaConfig(**SIZES | options))


def second(**given) -> nn.Module:
    options = {"max_relative_positions": 9, "pos_att_type": BOTH} | given
    return hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**SIZES | options))


def bloom(**given) -> nn.Module:
    sizes = {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return hf.BloomForCausalLM(hf.BloomConfig(**sizes | dropout | given))


def mpt(**given) -> nn.Module:
    sizes = {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
    return hf.MptForCausalLM(hf.MptConfig(**sizes | given))


MODELS = {
    "deberta": first,
    "deberta-c2p": lambda: first(pos_att_type=["c2p"], max_relative_positions=40),
    "deberta-plain": lambda: first(relative_attention=False, pos_att_type=[]),
    "deberta-v2": lambda: second(**SECOND),
    "deberta-v2-own": lambda: second(pos_att_type=["p2c"]),
    "bloom": bloom,
    "mpt": mpt,
    "mpt-clipped": lambda: mpt(attn_config={"clip_qkv": 0.5, "softmax_scale": 0.3}),
}
OTHERS = dict.fromkeys(("linear", "norm", "mlp", "rope", "loss", "mixer", "experts"), False)


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """Returns a model with random weights, and a copy with our attention."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.15)
    patched = copy.deepcopy(model)
    assert omniattn.hf.patch(patched, **OTHERS) == {"attention": 2}
    return model, patched


def inputs(length: int = 23) -> dict[str, torch.Tensor]:
    real = torch.ones(2, length, dtype=torch.int64)
    real[1, length - 7 :] = 0
    return {"input_ids": torch.randint(3, 97, (2, length)), "attention_mask": real}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_the_models(name):
    model, patched = pair(name)
    given, found = inputs(), []
    for each in (model, patched):
        logits = each(**given).logits[given["attention_mask"] > 0]
        parameters = list(each.parameters())
        grads = torch.autograd.grad(logits.sin().sum(), parameters, allow_unused=True)
        found.append((logits, *grads))
    largest = max(g.abs().max() for g in found[0][1:] if g is not None)
    for expected, actual in zip(*found, strict=True):
        if expected is None:
            assert actual is None
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5 * largest + 1e-4)
    omniattn.hf.unpatch(patched)
    torch.testing.assert_close(patched(**given).logits, model(**given).logits, rtol=0, atol=0)


@torch.no_grad()
def test_each_layer_runs_on_our_kernels():
    for name in ("deberta", "deberta-v2"):
        _, patched = pair(name)
        with mock.patch.object(deberta, "attention", wraps=deberta.attention) as ours:
            patched(**inputs())
        assert ours.call_count == 2
    for name, forward in (("bloom", bloom_forward), ("mpt", mpt_forward)):
        _, patched = pair(name)
        assert sum(type(m).forward is forward for m in patched.modules()) == 2


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_attention_weights_are_the_models(name):
    model, patched = pair(name)
    given = {"input_ids": inputs()["input_ids"], "output_attentions": True}
    for expected, actual in zip(
        model(**given).attentions, patched(**given).attentions, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_generated_tokens_are_the_models(name):
    """Two prompts, of which one is padded on the left."""
    model, patched = pair(name)
    given = inputs(9)
    given = {n: t.flip(1) for n, t in given.items()}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    assert torch.equal(patched.generate(**given, **options), model.generate(**given, **options))


@torch.no_grad()
def test_masks_with_values_are_added():
    """A user's additive mask may have other values than 0 and the lowest number."""
    model, patched = pair("bloom")
    x = torch.randint(3, 97, (1, 9))
    mask = torch.randn(1, 1, 9, 9).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -1e4)
    own = torch.ones(1, 9)
    layers = [each.transformer.h[0].self_attention for each in (model, patched)]
    alibi = model.transformer.build_alibi_tensor(own, 4, torch.float32)
    states = model.transformer.word_embeddings(x)
    expected, actual = (layer(states, states, alibi, mask)[0] for layer in layers)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_queries_of_other_states_run_the_layers_own_code():
    """As in the enhanced mask decoder, and where pairs at one distance differ."""
    model, patched = pair("deberta-v2")
    x, other = torch.randn(2, 1, 11, 32).unbind(0)
    mask = torch.ones(1, 1, 11, 11, dtype=torch.bool)
    positions = model.deberta.encoder.get_rel_embedding()
    places = model.deberta.encoder.get_rel_pos(x)
    for query, relative in ((other, places), (None, places[:, :, torch.randperm(11)])):
        given = {"query_states": query, "relative_pos": relative, "rel_embeddings": positions}
        layers = (each.deberta.encoder.layer[0].attention.self for each in (model, patched))
        expected, actual = (layer(x, mask, **given)[0] for layer in layers)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_dropout_acts_in_training():
    for name in ("deberta", "bloom", "mpt"):
        _, patched = pair(name)
        for module in patched.modules():
            if "Attention" in type(module).__name__:
                for dropout in ("dropout", "attention_dropout"):
                    if isinstance(getattr(module, dropout, None), nn.Dropout):
                        getattr(module, dropout).p = 0.5
                if hasattr(module, "attn_dropout_p"):
                    module.attn_dropout_p = 0.5
        given = inputs()
        assert not torch.equal(patched.train()(**given).logits, patched(**given).logits)
        patched.eval()
        torch.testing.assert_close(patched(**given).logits, patched(**given).logits)


def test_layers_that_compute_something_else_are_named(caplog):
    caplog.set_level("DEBUG", "omniattn")
    model = bloom(pretraining_tp=2, slow_but_exact=True)
    assert "attention" not in omniattn.hf.patch(model, **OTHERS)
    assert any("multiplies in slices" in text for _, text in messages(caplog))


#: Models whose layers call torch's scaled_dot_product_attention.
FALCON = {
    **{"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
SAM = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32},
    **{"patch_size": 4, "output_channels": 16, "window_size": 3, "global_attn_indexes": [1]},
}
CALLING = {
    "rotary": lambda: hf.FalconForCausalLM(hf.FalconConfig(**FALCON)),
    "alibi": lambda: hf.FalconForCausalLM(hf.FalconConfig(**FALCON, alibi=True)),
    "groups": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2)
    ),
    "sam": lambda: hf.SamVisionModel(hf.SamVisionConfig(**SAM)),
}


def calling_pair(name: str) -> tuple[nn.Module, nn.Module, list[dict[str, torch.Tensor]]]:
    """Returns a model, a patched copy, and inputs without and with padding."""
    model = CALLING[name]().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    patched = copy.deepcopy(model)
    assert omniattn.hf.patch(patched)["attention"] == 2
    if name == "sam":
        return model, patched, [{"pixel_values": torch.randn(2, 3, 32, 32)}]
    x = torch.randint(3, 97, (2, 17))
    real = torch.ones_like(x)
    real[1, 12:] = 0
    return model, patched, [{"input_ids": x}, {"input_ids": x, "attention_mask": real}]


@pytest.mark.parametrize("name", CALLING)
def test_outputs_and_gradients_of_models_that_call_torch(name):
    model, patched, given = calling_pair(name)
    again = pickle.loads(pickle.dumps(patched))
    for inputs in given:
        kept = inputs.get("attention_mask", torch.tensor(1)) == 1
        calls = mock.Mock(wraps=functional.scaled_dot_product_attention)
        with mock.patch.object(functional, "scaled_dot_product_attention", calls):
            outputs = [each(**inputs)[0] for each in (model, patched, again)]
        assert calls.call_count == 4
        expected, actual, loaded = (x[kept] if kept.dim() else x for x in outputs)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(loaded, actual)
        grads = [
            torch.autograd.grad(y.sin().sum(), list(m.parameters()), allow_unused=True)
            for m, y in ((model, expected), (patched, actual))
        ]
        for e, a in zip(*grads, strict=True):
            assert e is None or (a - e).norm() <= 1e-3 * e.norm() + 1e-5
    omniattn.hf.unpatch(patched)
    assert torch.equal(patched(**given[0])[0], model(**given[0])[0])


def test_tokens_and_compiled_models():
    model, patched, given = calling_pair("rotary")
    x = given[0]["input_ids"][:, :7]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(x)}
    assert torch.equal(patched.generate(x, **options), model.generate(x, **options))
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).logits, model(x).logits, rtol=1e-4, atol=1e-4)


def test_layers_of_a_model_with_eager_attention_stay(caplog):
    model = CALLING["rotary"]()
    model.config._attn_implementation = "eager"
    assert "attention" not in omniattn.hf.patch(model)
    reason = "it does not ask transformers' AttentionInterface"
    assert messages(caplog) == [
        ("WARNING", f"patch: attention: 2 FalconAttention unchanged: {reason}")
    ]
