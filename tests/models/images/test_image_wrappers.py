"""Masked autoencoders and CLIP compute what transformers computes."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from omniattn.models import PRESETS, CLIPConfig, MAEConfig, Model, from_hf
from omniattn.models.vision.clip import recall

_VIT = {"channels": 3, "image": 32, "patch": 8, "dim": 48, "num_layers": 2, "num_heads": 4}
_TEXT = {"vocab_size": 97, "context": 11, "text_dim": 24, "text_layers": 2, "text_heads": 3}
MAE = MAEConfig(**_VIT, decoder_dim=16, decoder_layers=1, decoder_heads=2)
CLIP = CLIPConfig(**_VIT, **_TEXT, projection_dim=20)


def pair(config):
    torch.manual_seed(0)
    ours = config.build(dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    theirs = ours.to_hf()
    back = Model.from_hf(theirs)
    assert back.config == config
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
    torch.testing.assert_close(back.state_dict(), ours.state_dict(), rtol=0, atol=0)
    return ours, theirs


def assert_same_gradients(ours, theirs):
    for model in (ours, theirs):
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.data = torch.zeros_like(parameter) if grad is None else grad
    for own, other in ours.config.counterpart.pairs(ours, theirs):
        got, want = (torch.cat([t.flatten() for t in side]) for side in (own, other))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("norm_pix", [False, True])
def test_mae_restores_as_transformers_does(norm_pix):
    ours, theirs = pair(replace(MAE, norm_pix=norm_pix, mask_ratio=0.7))
    images, noise = torch.rand(3, 3, 32, 32, dtype=torch.float64), torch.rand(3, 16)
    want = theirs(images, noise=noise)
    loss, outputs = ours(images, noise)
    torch.testing.assert_close(outputs.logits, want.logits)
    assert torch.equal(outputs.mask, want.mask.bool()) and outputs.mask[0].sum() == 12
    torch.testing.assert_close(loss, want.loss)
    loss.backward()
    want.loss.backward()
    assert_same_gradients(ours, theirs)


def test_mae_starts_and_restores_as_in_the_paper():
    model = replace(MAE, norm_pix=True).build()
    assert torch.equal(
        model.encoder.embed_positions.weight[None], model.to_hf().vit.embeddings.position_embeddings
    )
    bound = math.sqrt(6 / (48 + 3 * 64))
    weight = model.encoder.embed_patches.weight
    assert 0.95 * bound < weight.abs().max() <= bound
    images = torch.rand(2, 3, 32, 32)
    _, outputs = model(images)
    perfect = outputs._replace(logits=model.targets(images))
    torch.testing.assert_close(model.restored(images, perfect), images)
    changed = model.restored(images, outputs) != images
    assert changed.flatten(1).double().mean(1).tolist() == [0.75, 0.75]
    with pytest.raises(ValueError, match=r"MAE: noise must have shape \(2, 16\), got noise.shape"):
        model(images, torch.rand(2, 15))
    with pytest.raises(ValueError, match="MAEConfig: mask_ratio must keep and mask at least one"):
        replace(MAE, mask_ratio=0.99)
    with pytest.raises(ValueError, match="MAEConfig: pool must be 'token', got pool='mean'"):
        replace(MAE, pool="mean")


@pytest.mark.parametrize("eot", [None, 90])
def test_clip_compares_as_transformers_does(eot):
    ours, theirs = pair(replace(CLIP, eot=eot))
    images = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    tokens = torch.randint(80, (3, 11))
    tokens[[0, 1, 2], [4, 10, 7]] = 90
    want = theirs(tokens, images, return_loss=True)
    loss, outputs = ours(images, tokens)
    torch.testing.assert_close(outputs.image_embeds, want.image_embeds)
    torch.testing.assert_close(outputs.text_embeds, want.text_embeds)
    torch.testing.assert_close(outputs.logits_per_text, want.logits_per_text)
    torch.testing.assert_close(loss, want.loss)
    loss.backward()
    want.loss.backward()
    assert_same_gradients(ours, theirs)


@torch.no_grad()
def test_clip_classifies_by_texts_and_limits_its_scale():
    model = CLIP.build()
    images, prompts = torch.rand(5, 3, 32, 32), torch.randint(97, (4, 2, 11))
    texts = model.encode_text(prompts.flatten(0, 1)).view(4, 2, -1).mean(1)
    want = F.cosine_similarity(model.encode_image(images)[:, None], texts[None], dim=-1)
    model.log_scale.fill_(9.0)
    torch.testing.assert_close(model.zero_shot(images, prompts), 100 * want)
    assert model.log_scale.item() == pytest.approx(math.log(100))
    torch.testing.assert_close(model.zero_shot(images, prompts[:, 0]).shape, (5, 4))
    queries, keys = torch.eye(4), torch.eye(4)[[0, 1, 3, 2]] + 0.1 * torch.eye(4)
    assert (recall(queries, keys), recall(queries, keys, 2)) == (0.5, 1.0)


def test_clip_starts_as_the_release_does():
    torch.manual_seed(0)
    config = replace(CLIP, dim=96, text_dim=64, text_heads=4)
    for name, parameter in config.build().named_parameters():
        text = name.startswith("text")
        width, layers = (64, 2) if text else (96, 2)
        deep = width**-0.5 * (2 * layers) ** -0.5
        stds = {"q_proj": deep, "down_proj": deep, "o_proj": width**-0.5, "class_token": 96**-0.5}
        stds |= {"up_proj": (2 * width) ** -0.5, "projection": width**-0.5, "embed": 0.02}
        std = next((std for key, std in stds.items() if key in name.split(".", 1)[-1]), None)
        if std is not None and parameter.dim() and not name.endswith("bias"):
            assert parameter.std().item() == pytest.approx(std, rel=0.3), name


def test_wrong_pairs_are_named():
    model, images = CLIP.build(), torch.rand(2, 3, 32, 32)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    for given, message in (
        (tokens[:1], r"CLIP: images and tokens must be pairs, got images.shape=\(2, 3, 32, 32\)"),
        (tokens.expand(2, 5).repeat(1, 3), "CLIP: tokens must have at most 11 positions, got"),
        (tokens.float(), "tokens must"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            model(images, given)
    with pytest.raises(ValueError, match="each row of tokens must have the id eot=9, got none in"):
        replace(CLIP, eot=9).build()(images, tokens)
    with pytest.raises(ValueError, match="CLIPConfig: gated must be False, got gated=True"):
        replace(CLIP, gated=True)
    theirs = CLIP.to_hf()
    theirs.text_config.hidden_act = "gelu"
    with pytest.raises(NotImplementedError, match="hidden_act of text_config must be 'quick_gelu'"):
        CLIPConfig.from_hf(theirs)


@pytest.mark.parametrize("config", [MAE, CLIP], ids=["mae", "clip"])
def test_folders_become_the_same_model(config, tmp_path):
    ours, theirs = pair(config)
    theirs.save_pretrained(tmp_path)
    torch.testing.assert_close(from_hf(tmp_path).state_dict(), ours.state_dict(), rtol=0, atol=0)


def test_configs_of_transformers_are_those_of_the_releases():
    import transformers

    assert replace(PRESETS["clip-vit-b-32"], eot=49407) == replace(
        CLIPConfig.from_hf(transformers.CLIPConfig()), log_scale=math.log(1 / 0.07)
    )
    theirs = transformers.ViTMAEConfig(layer_norm_eps=1e-6)
    assert PRESETS["vit-mae-base"] == MAEConfig.from_hf(theirs)
