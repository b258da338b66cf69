"""output_attentions=True gives the weights of eager attention."""

import pytest
import torch
from eager_models import DECODERS, OTHERS, batch, pair, tokens

MODELS = {name: ("text", make) for name, make in DECODERS.items()} | OTHERS


def attentions(output) -> list[torch.Tensor]:
    parts = [
        output,
        *(output[n] for n in ("text_model_output", "vision_model_output") if n in output),
    ]
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return [x for part in parts for name in names for x in part.get(name) or ()]


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in MODELS if name != "clip"])
def test_weights_are_those_of_eager_attention(name):
    kind, make = MODELS[name]
    eager, ours = pair(make)
    real = torch.ones(2, 19, dtype=torch.bool)
    real[0, 13:] = False
    given = batch(kind, eager.config, real)
    outputs = [model(**given, output_attentions=True) for model in (eager, ours)]
    expected, actual = map(attentions, outputs)
    assert len(actual) == len(expected) >= 2
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        if kind != "images" and a.shape[2] == 19:  # a padded query sees nothing, in eager all
            a, e = (x.transpose(1, 2)[real] for x in (a, e))
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    for model, output in zip((eager, ours), outputs, strict=True):
        torch.testing.assert_close(output.loss, model(**given).loss)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_weights_while_generating(cache):
    eager, ours = pair(DECODERS["gpt_oss"])
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    options |= {"output_attentions": True, "return_dict_in_generate": True}
    x = tokens(2, 7)
    expected, actual = (model.generate(x, **options) for model in (eager, ours))
    for step in range(4):
        torch.testing.assert_close(
            actual.attentions[step], expected.attentions[step], rtol=1e-4, atol=1e-5
        )


def test_weights_have_gradients_and_can_be_asked_for_in_the_config():
    eager, ours = pair(DECODERS["llama"])
    x = tokens()
    for model in (eager, ours):
        model.config._output_attentions = True  # transformers' setter takes eager attention alone
    grads = []
    for model in (eager, ours):
        model.model(x).attentions[0].sin().sum().backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-5)
    ours.config._output_attentions = False
    assert ours.model(x).attentions is None
