"""Models of images compute what transformers computes: outputs, loss, gradients, feature maps."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers import Dinov2Backbone

from omniattn.models import (
    DeiTConfig,
    DINOFeaturesConfig,
    Dinov2ClassifierConfig,
    Dinov2Config,
    Dinov2RegistersClassifierConfig,
    Dinov2RegistersConfig,
    Model,
    PVTConfig,
    PVTv2Config,
    SwinConfig,
    ViTConfig,
    from_hf,
)
from omniattn.models.vision.losses import distillation_loss

_VIT = {"channels": 3, "image": 32, "patch": 8, "dim": 48, "num_layers": 2, "num_heads": 4}
_PYRAMID = {
    **{"channels": 3, "image": 32, "patch": 4, "dims": (16, 32, 48), "depths": (1, 2, 1)},
    **{"heads": (1, 2, 4), "mlp_ratios": (2, 3, 4)},
}
VIT = ViTConfig(**_VIT)
MODELS = {
    "vit": VIT,
    "vit-headless": replace(VIT, classes=0),
    "deit": DeiTConfig(**_VIT),
    "dino": DINOFeaturesConfig(**_VIT),
    "dinov2": Dinov2Config(**_VIT, layer_scale=0.3),
    "dinov2-gated": Dinov2Config(**_VIT, gated=True, mask_token=False),
    "dinov2-classifier": Dinov2ClassifierConfig(**_VIT, classes=7),
    "dinov2-registers": Dinov2RegistersConfig(**_VIT, registers=3),
    "dinov2-registers-classifier": Dinov2RegistersClassifierConfig(**_VIT, classes=7, gated=True),
    "pvt": PVTConfig(**_PYRAMID, sr_ratios=(4, 2, 1)),
    "pvt-v2": PVTv2Config(**_PYRAMID, sr_ratios=(4, 2, 1)),
    "pvt-v2-linear": PVTv2Config(
        **_PYRAMID, sr_ratios=(2, 2, 2), linear_attention=True, qkv_bias=False
    ),
    "swin": SwinConfig(channels=3, image=32, patch=4, dim=24, depths=(2, 1), heads=(2, 3)),
}


def pair(config):
    """Returns our model of random weights in fp64, and that of transformers with copies of them."""
    torch.manual_seed(0)
    ours = config.build(dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return ours, ours.to_hf()


def output_of(theirs, images):
    if type(theirs).__name__ == "ViTModel":  # whose pooler DINO does not have
        return theirs(images, interpolate_pos_encoding=True).last_hidden_state[:, 0]
    out = theirs(images)
    return out.pooler_output if "logits" not in out else out.logits


@pytest.mark.parametrize("name", MODELS)
def test_outputs_loss_and_gradients_are_those_of_transformers(name):
    ours, theirs = pair(MODELS[name])
    back = Model.from_hf(theirs)
    assert back.config == ours.config
    assert type(ours.config).from_dict(json.loads(json.dumps(ours.config.to_dict()))) == back.config
    torch.testing.assert_close(back.state_dict(), ours.state_dict(), rtol=0, atol=0)

    images = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    want = output_of(theirs, images)
    torch.testing.assert_close(ours(images), want)
    if ours.head is None:
        loss, expected = ours(images).square().mean(), want.square().mean()
        with pytest.raises(ValueError, match="labels need a head, got classes=0"):
            ours(images, torch.zeros(3, dtype=torch.long))
    else:
        labels = torch.tensor([1, 6, 0])
        loss, expected = ours(images, labels), F.cross_entropy(want, labels)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for model in (ours, theirs):
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.data = torch.zeros_like(parameter) if grad is None else grad
    for own, other in ours.config.counterpart.pairs(ours, theirs):
        got, want = (torch.cat([t.flatten() for t in side]) for side in (own, other))
        torch.testing.assert_close(got, want)


@torch.no_grad()
@pytest.mark.parametrize("name", ["dino", "dinov2", "dinov2-registers", "pvt-v2", "pvt-v2-linear"])
def test_positions_of_other_sizes_are_those_of_transformers(name):
    ours, theirs = pair(MODELS[name])
    for rows, columns in ((48, 64), (24, 40)):
        images = torch.rand(2, 3, rows, columns, dtype=torch.float64)
        # 1e-5: theirs interpolates in fp32.
        want = output_of(theirs, images)
        torch.testing.assert_close(ours(images), want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_masked_patches_are_those_of_transformers():
    ours, theirs = pair(MODELS["dinov2"])
    images, masked = torch.rand(2, 3, 32, 32, dtype=torch.float64), torch.rand(2, 16) < 0.5
    want = theirs(images, bool_masked_pos=masked).last_hidden_state
    torch.testing.assert_close(ours.forward_features(images, masked), want)
    with pytest.raises(ValueError, match=r"masked must be bool of shape \(2, 16\), got masked.dty"):
        ours.forward_features(images, masked.int())
    plain = VIT.build()
    with pytest.raises(ValueError, match="masked needs mask_token=True in the config"):
        plain.forward_features(images.float(), masked)


@torch.no_grad()
def test_feature_maps_are_the_hidden_states_of_transformers():
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    for name, prefix in (("vit", 1), ("deit", 2)):
        ours, theirs = pair(MODELS[name])
        states = theirs(images, output_hidden_states=True).hidden_states[1:]
        for got, want in zip(ours.feature_maps(images), states, strict=True):
            torch.testing.assert_close(got.flatten(2).mT, want[:, prefix:])
        last = theirs.base_model(images).last_hidden_state
        torch.testing.assert_close(ours.forward_features(images), last)

    ours, theirs = pair(MODELS["swin"])
    states = theirs(images, output_hidden_states=True)
    torch.testing.assert_close(
        ours.feature_maps(images, [-1])[0], states.reshaped_hidden_states[-1]
    )
    assert [m.shape[1:] for m in ours.feature_maps(images)] == [(24, 8, 8), (48, 4, 4)]
    torch.testing.assert_close(
        ours.forward_features(images).flatten(1, 2), theirs.swin(images).last_hidden_state
    )

    ours, theirs = pair(MODELS["pvt"])
    want = theirs.pvt(images, output_hidden_states=True)
    states = [want.hidden_states[block] for block in (0, 2, 3)]  # the last of each stage
    maps = ours.feature_maps(images)
    assert [m.shape[1:] for m in maps] == [(16, 8, 8), (32, 4, 4), (48, 2, 2)]
    for got, state in zip(maps, states, strict=True):
        torch.testing.assert_close(got.flatten(2).mT, state[:, -got[0, 0].numel() :])
    torch.testing.assert_close(ours.forward_features(images), want.last_hidden_state)
    normed = ours.feature_maps(images, [2], norm=True)[0]
    torch.testing.assert_close(normed.flatten(2).mT, want.last_hidden_state[:, 1:])

    ours, theirs = pair(MODELS["pvt-v2"])
    states = theirs.pvt_v2(images, output_hidden_states=True).hidden_states
    torch.testing.assert_close(ours.feature_maps(images, norm=True), list(states))
    assert [m.shape[1:] for m in states] == [(16, 8, 8), (32, 4, 4), (48, 2, 2)]
    torch.testing.assert_close(ours.forward_features(images), states[-1].flatten(2).mT)

    ours, theirs = pair(MODELS["dinov2"])
    theirs.config.set_output_features_output_indices(out_indices=[1, 2], out_features=None)
    backbone = Dinov2Backbone(theirs.config).double().eval()
    backbone.load_state_dict(theirs.state_dict())
    want = backbone(images).feature_maps
    got = ours.feature_maps(images, norm=True)
    torch.testing.assert_close(got, list(want))


def test_wrong_feature_maps_are_named():
    for name in ("vit", "swin", "pvt"):
        model, images = MODELS[name].build(), torch.ones(1, 3, 32, 32)
        for indices in ([], [9], [0.5]):
            with pytest.raises(ValueError, match=r"indices must be integers from -\d to \d, got"):
                model.feature_maps(images, indices)


@torch.no_grad()
def test_a_stem_of_convolutions_takes_the_place_of_the_patches():
    config = replace(VIT, stem=(4, 8, 16))
    model = config.build(dtype=torch.float64).eval()
    norm = model.embed_patches.layers[1]
    norm.running_mean.uniform_()
    images = x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    for layer in (0, 3, 6):
        conv, norm, _ = model.embed_patches.layers[layer : layer + 3]
        x = F.conv2d(x, conv.weight, stride=2, padding=1)
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        shift = norm.bias - norm.running_mean * scale
        x = (x * scale[:, None, None] + shift[:, None, None]).relu()
    last = model.embed_patches.layers[-1]
    want = torch.einsum("bchw,dc->bhwd", x, last.weight[:, :, 0, 0]) + last.bias
    torch.testing.assert_close(model.patches(images), want)
    assert model(images).shape == (2, 10)
    with pytest.raises(ValueError, match=r"images must have shape \(B, 3, H, W\) with H and W"):
        model(images[:, :, :30])
    with pytest.raises(ValueError, match=r"stem must have log2\(patch\) convolutions .*=\(4, 8\)"):
        replace(config, stem=(4, 8))
    with pytest.raises(NotImplementedError, match="stem must be \\(\\) in transformers"):
        config.to_hf()


def test_fixed_positions_have_no_gradient():
    model = replace(VIT, positions="sincos").build()
    table = model.embed_positions.weight
    assert not table.requires_grad and (table[0] == 0).all() and table[1:].std() > 0.4
    model(torch.ones(1, 3, 32, 32)).sum().backward()
    assert table.grad is None and model.class_token.grad is not None


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_distillation_is_the_loss_of_the_paper(kind):
    torch.manual_seed(0)
    own, other, teacher = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 6, 3, 3, 1])
    base = F.cross_entropy(own, labels)
    if kind == "hard":
        want = (base + F.cross_entropy(other, teacher.argmax(-1))) / 2
    else:
        p = (teacher.detach() / 3).softmax(-1)
        divergence = (p * (p.log() - (other / 3).log_softmax(-1))).sum(-1).mean()
        want = 0.9 * base + 0.1 * 9 * divergence
    got = distillation_loss(own, other, labels, teacher, kind=kind)
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(loss, (own, other), retain_graph=True) for loss in (got, want)]
    torch.testing.assert_close(*gradients)
    whole = {"soft_share": 1.0, "kind": "soft"}
    divided = distillation_loss(own, other, labels, teacher, divide_by_classes=True, **whole)
    torch.testing.assert_close(7 * divided, distillation_loss(own, other, labels, teacher, **whole))


def test_deit_returns_the_loss_and_both_logits():
    config = replace(MODELS["deit"], distillation="soft", temperature=2.0)
    model, images = config.build(), torch.rand(2, 3, 32, 32)
    labels, teacher = torch.tensor([1, 2]), torch.randn(2, 10)
    loss, outputs = model(images, labels, teacher)
    torch.testing.assert_close(model(images), sum(outputs) / 2)
    want = distillation_loss(*outputs, labels, teacher, kind="soft", temperature=2.0)
    torch.testing.assert_close(loss, want)
    with pytest.raises(
        ValueError, match=r"DeiT: teacher must have shape \(2, 10\), got teacher.sh"
    ):
        model(images, labels, teacher[:1])
    with pytest.raises(TypeError, match="DeiT: labels must be given with a teacher"):
        model(images, None, teacher)
    with pytest.raises(ValueError, match="DeiTConfig: pool must be 'token' and classes at least 1"):
        replace(config, classes=0)
    with pytest.raises(ValueError, match="distillation must be one of"):
        replace(config, distillation="firm")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("deit", "intermediate_size", 100),
        ("dinov2", "mlp_ratio", 2),
        ("dinov2", "drop_path_rate", 0.1),
        ("pvt", "hidden_act", "relu"),
        ("pvt-v2", "hidden_act", "relu"),
    ],
)
def test_options_that_are_absent_here_are_named(name, option, value):
    config = MODELS[name].to_hf()
    setattr(config, option, value)
    with pytest.raises(NotImplementedError, match=f"{option} must be .*, got {option}={value!r}"):
        type(MODELS[name]).from_hf(config)


def test_wrong_sizes_are_named():
    with pytest.raises(
        ValueError, match="image must be a multiple of patch, got image=30, patch=8"
    ):
        replace(VIT, image=30)
    for option, value, message in (
        ("depths", (1, 2), "depths must have one number for each stage"),
        ("sr_ratios", (4, 2, 2), "sr_ratios must end with 1"),
        ("image", 24, "image must be a multiple of patch \\* 2\\^\\(stages - 1\\), got image=24"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(MODELS["pvt"], **{option: value})
    theirs = MODELS["pvt-v2"].to_hf()
    theirs.patch_sizes = [5, 3, 3]
    with pytest.raises(NotImplementedError, match=r"strides must be 2 .* and patch_sizes 2 stride"):
        PVTv2Config.from_hf(theirs)
    with pytest.raises(ValueError, match="PVTv2Config: depths must have one number for each stage"):
        PVTv2Config(depths=(1,))
    with pytest.raises(ValueError, match="PVT: images must have 8 x 8 patches"):
        MODELS["pvt"].build()(torch.ones(1, 3, 64, 64))


@pytest.mark.parametrize("name", ["dinov2-registers", "pvt"])
def test_folders_become_the_same_model(name, tmp_path):
    ours, theirs = pair(MODELS[name])
    theirs.save_pretrained(tmp_path)
    found = from_hf(tmp_path)
    assert found.config == ours.config
    torch.testing.assert_close(found.state_dict(), ours.state_dict(), rtol=0, atol=0)
