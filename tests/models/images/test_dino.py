"""DINO: its loss, its teacher and its schedules are those of the papers."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from omniattn.models import DINOConfig, from_hf
from omniattn.models.vision.self_distillation import koleo_loss, sinkhorn

CONFIG = DINOConfig(
    **{"channels": 2, "image": 16, "patch": 4, "dim": 24, "num_layers": 1, "num_heads": 2},
    **{"head_dim": 20, "bottleneck": 12, "prototypes": 30, "init_std": 0.3},
)
DINOV2 = replace(CONFIG, centering="sinkhorn", mask_token=True, ibot=0.5, koleo=0.1)


def crops():
    torch.manual_seed(1)
    large = torch.rand(3, 2, 2, 16, 16, dtype=torch.float64)
    return large, torch.rand(3, 4, 2, 8, 8, dtype=torch.float64)


def logits_of(head, x):
    for layer in head.layers[:2]:
        x = F.gelu(F.linear(x, layer.weight, layer.bias))
    x = F.normalize(F.linear(x, head.layers[2].weight, head.layers[2].bias), dim=-1)
    return x @ F.normalize(head.prototypes.weight, dim=-1).T


def test_the_loss_predicts_each_other_view_and_moves_the_center_afterwards():
    torch.manual_seed(0)
    model = CONFIG.build(dtype=torch.float64)
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    center = model.targets.center.normal_().clone().double()
    large, small = crops()
    views = [*large.unbind(1), *small.unbind(1)]
    students = [logits_of(model.head, model.student(view)) for view in views]
    teachers = [logits_of(model.teacher_head, model.teacher(view)) for view in views[:2]]
    total, pairs = 0.0, 0
    for i, teacher in enumerate(teachers):
        target = ((teacher - center) / 0.04).softmax(-1).detach()
        for v, student in enumerate(students):
            if v != i:
                total -= (target * (student / 0.1).log_softmax(-1)).sum(-1).mean()
                pairs += 1
    model.eval()
    loss, outputs = model(large, small)
    assert pairs == 10 and torch.equal(model.targets.center.double(), center)
    torch.testing.assert_close(loss, total / pairs, rtol=1e-5, atol=1e-5)  # the center is fp32
    torch.testing.assert_close(outputs.student_logits, torch.stack(students, 1))
    model.train()
    model(large, small)
    want = 0.9 * center + 0.1 * torch.cat(teachers).mean(0)
    torch.testing.assert_close(model.targets.center.double(), want, rtol=1e-5, atol=1e-5)
    loss.backward()
    for name, parameter in model.named_parameters():
        learns = not name.startswith("teacher")
        assert parameter.requires_grad == (parameter.grad is not None) == learns, name


def test_masked_patches_and_the_spread_of_features_have_losses():
    torch.manual_seed(0)
    model = DINOV2.build(dtype=torch.float64).eval()
    large, small = crops()
    masked = torch.rand(3, 2, 16) < 0.4
    masked[1, 0] = False
    loss, outputs = model(large, small, masked)
    views, hidden = large.flatten(0, 1), masked.flatten(0, 1)
    seen = model.student.forward_features(views, hidden)
    whole = model.teacher.forward_features(views)
    targets = sinkhorn(logits_of(model.teacher_patch_head, whole[:, 1:][hidden]), 0.04)
    log_q = (logits_of(model.patch_head, seen[:, 1:]) / 0.1).log_softmax(-1)
    errors = torch.zeros(6, 16, dtype=torch.float64)
    errors[hidden] = -(targets * log_q[hidden]).sum(-1)
    ibot = sum(e[h].mean() for e, h in zip(errors, hidden, strict=True) if h.any()) / 5
    torch.testing.assert_close(outputs.losses["ibot"], ibot)
    tokens = seen[:, 0].view(3, 2, -1)
    spread = koleo_loss(tokens[:, 0]) + koleo_loss(tokens[:, 1])
    torch.testing.assert_close(outputs.losses["koleo"], spread)
    torch.testing.assert_close(loss, outputs.losses["dino"] + 0.5 * ibot + 0.1 * spread)
    assert model.further_losses() == {n: t.item() for n, t in outputs.losses.items()}
    teacher = logits_of(model.teacher_head, whole[:, 0])
    torch.testing.assert_close(outputs.targets.flatten(0, 1), sinkhorn(teacher, 0.04))
    none = model(large, small, torch.zeros_like(masked))[1].losses["ibot"]
    assert none == 0
    for wrong in (None, masked.int()):
        with pytest.raises(ValueError, match="masked must be"):
            model(large, small, wrong)


def test_sinkhorn_uses_prototypes_evenly():
    torch.manual_seed(0)
    rows = sinkhorn(torch.randn(12, 4, dtype=torch.float64), 0.5, iterations=60)
    torch.testing.assert_close(rows.sum(1), torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(rows.sum(0), torch.full((4,), 3.0, dtype=torch.float64))
    logits = torch.randn(5, 3, dtype=torch.float64)
    q = (logits / 0.2).exp().T  # as in the release, prototypes by examples
    q = q / q.sum()
    for _ in range(3):
        q = q / q.sum(1, keepdim=True) / 3
        q = q / q.sum(0, keepdim=True) / 5
    torch.testing.assert_close(sinkhorn(logits, 0.2), (q * 5).T)
    assert sinkhorn(1e4 * logits, 0.04).isfinite().all()


def test_koleo_is_the_distance_to_the_nearest():
    torch.manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    unit = x / x.norm(dim=-1, keepdim=True)
    distance = (unit[:, None] - unit).square().sum(-1).add(torch.eye(6)).sqrt()
    distance = distance + 9 * torch.eye(6)
    want = -distance.min(-1).values.add(1e-8).log().mean()
    torch.testing.assert_close(koleo_loss(x), want)
    gradients = [torch.autograd.grad(loss, x, retain_graph=True) for loss in (koleo_loss(x), want)]
    torch.testing.assert_close(*gradients)
    with pytest.raises(
        ValueError, match=r"koleo_loss: features must have shape \(N, d\) with N >="
    ):
        koleo_loss(x[:1])


def test_schedules_are_those_of_the_paper():
    config = replace(CONFIG, first_temperature=0.02, warmup=0.5)
    assert [config.temperature(done) for done in (0.0, 0.25, 0.5, 1.0)] == [0.02, 0.03, 0.04, 0.04]
    assert [config.kept(0.0), config.kept(1.0), config.kept(2.0)] == [0.996, 1.0, 1.0]
    assert math.isclose(config.kept(0.5), 0.998)
    torch.manual_seed(0)
    model = replace(config, frozen=0.1).build(dtype=torch.float64)
    for student, teacher in zip(
        model.student.parameters(), model.teacher.parameters(), strict=True
    ):
        assert torch.equal(student, teacher)
    loss, _ = model(*crops())
    loss.backward()
    model.before_step(0.2)
    assert model.head.prototypes.weight.grad is not None
    model.before_step(0.0)
    assert model.head.prototypes.weight.grad is None
    before = model.teacher.class_token.clone()
    with torch.no_grad():
        model.student.class_token.add_(1.0)
    model.after_step(0.5)
    torch.testing.assert_close(model.teacher.class_token, before + 0.002)
    assert model.targets.progress == 0.5
    assert DINOConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "ViTModel"),
        ({"layer_scale": 0.5, "mask_token": True, "ibot": 0.5}, "Dinov2Model"),
        ({"layer_scale": 0.5, "registers": 2, "interpolate": "antialias"}, "Dinov2WithRegisters"),
    ],
)
@torch.no_grad()
def test_the_teacher_is_a_model_of_transformers(options, kind):
    torch.manual_seed(0)
    mask = {"mask_token": True, "ibot": 0.5} if "registers" in options else {}
    model = replace(CONFIG, drop_path_p=0.1, **options | mask).build(dtype=torch.float64).eval()
    for parameter in model.teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs, images = model.to_hf(), torch.rand(2, 2, 16, 16, dtype=torch.float64)
    assert type(theirs).__name__.startswith(kind)
    torch.testing.assert_close(theirs(images).last_hidden_state[:, 0], model.teacher(images))
    back = from_hf(theirs)
    assert back.config == model.teacher.config
    torch.testing.assert_close(back(images), model.teacher(images))


def test_options_that_transformers_lacks_are_named():
    with pytest.raises(NotImplementedError, match="DINOFeaturesConfig: mask_token must be False"):
        replace(CONFIG, mask_token=True, ibot=0.5).build().to_hf()


def test_wrong_crops_and_options_are_named():
    model, (large, small) = CONFIG.build(dtype=torch.float64), crops()
    for given, name in (((large[:, :1], small), "large"), ((large, small[:2]), "small")):
        with pytest.raises(ValueError, match=rf"and small \(B, n, .*, got {name}.shape=\("):
            model(*given)
    with pytest.raises(ValueError, match="DINOConfig: mask_token must be True, got mask_token=F"):
        replace(CONFIG, ibot=1.0)
    with pytest.raises(ValueError, match="centering must be one of"):
        replace(CONFIG, centering="none")
    with pytest.raises(NotImplementedError, match="transformers has no such model"):
        CONFIG.to_hf()
