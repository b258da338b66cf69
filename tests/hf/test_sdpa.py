"""Layers that call torch's scaled_dot_product_attention themselves run on this package's."""

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

FALCON = {
    **{"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
SAM = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32},
    **{"patch_size": 4, "output_channels": 16, "window_size": 3, "global_attn_indexes": [1]},
}
MODELS = {
    "rotary": lambda: hf.FalconForCausalLM(hf.FalconConfig(**FALCON)),
    "alibi": lambda: hf.FalconForCausalLM(hf.FalconConfig(**FALCON, alibi=True)),
    "groups": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2)
    ),
    "sam": lambda: hf.SamVisionModel(hf.SamVisionConfig(**SAM)),
}


def pair(name: str) -> tuple[nn.Module, nn.Module, list[dict[str, torch.Tensor]]]:
    """Returns a model, a patched copy, and inputs without and with padding."""
    model = MODELS[name]().eval()
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


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_the_models(name):
    model, patched, given = pair(name)
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
    model, patched, given = pair("rotary")
    x = given[0]["input_ids"][:, :7]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(x)}
    assert torch.equal(patched.generate(x, **options), model.generate(x, **options))
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).logits, model(x).logits, rtol=1e-4, atol=1e-4)


def test_layers_of_a_model_with_eager_attention_stay(caplog):
    model = MODELS["rotary"]()
    model.config._attn_implementation = "eager"
    assert "attention" not in omniattn.hf.patch(model)
    reason = "it does not ask transformers' AttentionInterface"
    assert messages(caplog) == [
        ("WARNING", f"patch: attention: 2 FalconAttention unchanged: {reason}")
    ]
