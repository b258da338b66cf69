"""Image to text computes what transformers' ViT and GPT-2 compute."""

import json
from dataclasses import replace

import pytest
import torch

from omniattn.models import ImageToTextConfig, Model, SwinConfig, ViTConfig, from_hf, generate

_VISION = ViTConfig(classes=0, channels=3, image=16, patch=4, dim=24, num_layers=1, num_heads=2)
CONFIG = ImageToTextConfig(
    97, 48, 2, vision=_VISION, num_heads=4, hidden_dim=192, max_positions=20, norm_eps=1e-5
)
CONFIGS = {
    "bridged": CONFIG,
    "of-one-width": replace(
        CONFIG, vision=replace(_VISION, dim=48), dropout_p=0.1, attention_dropout_p=0.1
    ),
}


def pair(name):
    torch.manual_seed(0)
    ours = CONFIGS[name].build(dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.2)
    return ours, ours.to_hf()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_gradients_and_captions_are_those_of_transformers(name, tmp_path):
    ours, theirs = pair(name)
    assert type(ours.config).from_dict(json.loads(json.dumps(ours.config.to_dict()))) == ours.config
    back = Model.from_hf(theirs)
    assert back.config == ours.config
    torch.testing.assert_close(back.state_dict(), ours.state_dict(), rtol=0, atol=0)

    images, tokens = torch.rand(2, 3, 16, 16).double(), torch.randint(97, (2, 9))
    given = {"decoder_input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    out = theirs(pixel_values=images, **given)
    torch.testing.assert_close(ours(images, tokens[:, :-1]), out.logits)
    loss = ours(images, tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, out.loss)

    start = torch.full((2, 1), 3)
    options = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    options |= {"decoder_start_token_id": 3, "do_sample": False}
    for num_beams in (1, 3):
        wanted = theirs.generate(images, **options, num_beams=num_beams)
        found = generate(ours, start, 8, source=images, num_beams=num_beams)
        assert torch.equal(found, wanted)

    loss.backward()
    out.loss.backward()
    for model in (ours, theirs):
        for parameter in model.parameters():
            unused = torch.zeros_like(parameter)  # those of transformers' pooler
            parameter.data = unused if parameter.grad is None else parameter.grad
    for sides in ours.config.counterpart.pairs(ours, theirs):
        got, want = (torch.cat([t.flatten() for t in side]) for side in sides)
        torch.testing.assert_close(got, want)


def test_folders_and_other_encoders(tmp_path):
    ours, theirs = pair("bridged")
    theirs.save_pretrained(tmp_path)
    found = from_hf(tmp_path)
    assert found.config == ours.config
    torch.testing.assert_close(found.state_dict(), ours.state_dict(), rtol=0, atol=0)

    swin = SwinConfig(classes=0, channels=3, image=16, patch=4, dim=24)
    model = replace(CONFIG, vision=swin).build().eval()
    images, start = torch.rand(2, 3, 16, 16), torch.zeros(2, 1, dtype=torch.long)
    assert model.encode(images).shape == (2, 4, 48)
    found = generate(model, start, 5, source=images)
    with torch.no_grad():
        assert torch.equal(found[:, 1:], model(images, found[:, :-1]).argmax(-1))
    with pytest.raises(
        NotImplementedError, match="vision must be a ViTConfig in transformers, got"
    ):
        model.to_hf()


def test_what_transformers_lacks_and_wrong_inputs_are_named():
    ours, theirs = pair("bridged")
    with pytest.raises(NotImplementedError, match="hidden_dim must be 192 in transformers, got h"):
        replace(CONFIG, hidden_dim=40).to_hf()
    with pytest.raises(ValueError, match=r"vision must have no head, .*got vision.classes=10"):
        replace(CONFIG, vision=ViTConfig())
    theirs.config.decoder.activation_function = "relu"
    with pytest.raises(NotImplementedError, match="activation_function must be 'gelu_new', got"):
        ImageToTextConfig.from_hf(theirs.config)
    images, tokens = torch.rand(2, 3, 16, 16).double(), torch.zeros(2, 21, dtype=torch.long)
    with pytest.raises(ValueError, match="ImageToText: tokens must be at most 20, the"):
        ours(images, tokens)
    with pytest.raises(ValueError, match="mask must be None for images"):
        ours.encode(images, mask=tokens)
    with pytest.raises(ValueError, match="ViT: images must have shape"):
        ours(images[:, :1], tokens)
