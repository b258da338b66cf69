"""Tasks on images: their batches, the probes that judge features, and what is learned."""

import sys
from dataclasses import replace

import pytest
import torch

from omniattn.models.presets import TRAINED
from omniattn.training import (
    Augment,
    CaptionedShapes,
    CroppedDigits,
    Digits,
    DistilledDigits,
    MaskedShapes,
    TrainConfig,
    Trainer,
    linear_probe,
    nearest_neighbors,
    recipe_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_batches_of_digits_depend_on_seed_and_step():
    pytest.importorskip("sklearn")
    shapes = {
        CroppedDigits: [(5, 2, 1, 8, 8), (5, 4, 1, 6, 6)],
        DistilledDigits: [(5, 1, 8, 8), (5,), (5, 10)],
    }
    for kind, expected in shapes.items():
        task = kind()
        batch = task.batch(5, 0, 3)
        assert [t.shape for t in batch] == expected
        for got, want in zip(task.batch(5, 0, 3), batch, strict=True):
            assert torch.equal(got, want)
        for other in (task.batch(5, 0, 4), task.batch(5, 1, 3)):
            assert not any(torch.equal(a, b) for a, b in zip(other, batch, strict=True))
        assert len(task.held_out_batch(1)[0]) == 360
    large, _ = CroppedDigits().batch(8, 0, 0)
    assert not torch.equal(large[:, 0], large[:, 1]) and large.min() >= 0
    distilled = DistilledDigits()
    for logits, (_, labels) in (
        (distilled.logits, distilled.train),
        (distilled.held_out_logits, distilled.held_out),
    ):
        assert (logits.argmax(-1) == labels).double().mean() > 0.97
        assert logits.softmax(-1).max(-1).values.quantile(0.1) < 0.95  # it is soft


def test_captions_name_what_is_drawn():
    task = CaptionedShapes()
    assert len(set(task.captions)) == 128 and max(map(len, task.captions)) < task.context
    assert not set(task.seen.tolist()) & set(task.unseen.tolist())
    images, tokens = task.batch(64, 0, 0)
    assert images.shape == (64, 3, 16, 16) and 0 <= images.min() <= images.max() <= 1
    again, _ = task.batch(64, 0, 0)
    assert torch.equal(images, again) and len(tokens.unique(dim=0)) == 64
    texts = [bytes(row[: row.argmax()].tolist()).decode() for row in tokens]
    assert (tokens.argmax(-1) == (tokens == task.END).int().argmax(-1)).all()
    for caption, image in zip(texts, images, strict=True):
        assert caption in task.captions
        rows = slice(0, 8) if "top" in caption else slice(8, 16)
        columns = slice(0, 8) if "left" in caption else slice(8, 16)
        part = image[:, rows, columns]
        for index, colour in enumerate(("red", "green", "blue")):
            if colour in caption:
                others = [i for i in range(3) if i != index]
                assert (part[index] - part[others].amax(0)).max() > 0.3, caption
    with pytest.raises(ValueError, match="trains on generated shapes"):
        CaptionedShapes.load("file", 3)


def test_masked_shapes_depend_on_seed_and_step():
    task = MaskedShapes(16)
    images, noise = task.batch(5, 0, 3)
    assert images.shape == (5, 3, 16, 16) and noise.shape == (5, 16)
    for other in (task.batch(5, 0, 4), task.batch(5, 1, 3), task.held_out_batch(5)):
        assert not torch.equal(other[0][:5], images) and not torch.equal(other[1][:5], noise)
    assert all(map(torch.equal, task.batch(5, 0, 3), (images, noise)))


def test_probes_tell_classes_apart():
    torch.manual_seed(0)
    centres, labels = torch.randn(3, 5), torch.arange(90) % 3
    x = centres[labels] + 0.1 * torch.randn(90, 5)
    split = x[:60], labels[:60], x[60:], labels[60:]
    assert linear_probe(*split) == nearest_neighbors(*split) == 1.0
    noise = torch.randn(60, 5), labels[:60], torch.randn(30, 5), labels[60:]
    assert linear_probe(*noise) < 0.7 and nearest_neighbors(*noise) < 0.7
    near = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.1]])
    votes = torch.tensor([0, 1, 1])
    query = torch.tensor([[1.0, 0.05]])
    assert nearest_neighbors(near, votes, query, torch.tensor([1]), k=3) == 1.0
    assert nearest_neighbors(near, votes, query, torch.tensor([0]), k=1) == 1.0
    with pytest.raises(ValueError, match=r"linear_probe: train must have shape \(N, d\) and"):
        linear_probe(x, labels[:3], x, labels)


def test_each_gradient_is_limited_on_its_own():
    pytest.importorskip("sklearn")
    model = replace(TRAINED["dino"], num_layers=1, prototypes=32, head_dim=16)
    options = recipe_of(model).options
    assert options["clip"] == 3.0 and options["clip_each"]
    run = Trainer(
        TrainConfig(model, **options | {"steps": 2, "batch": 4, "clip": 1e-3}), CroppedDigits()
    )
    run.train_step()
    norms = [p.grad.norm().item() for p in run.model.parameters() if p.grad is not None]
    assert max(norms) < 1.001e-3 and sum(n > 0.9e-3 for n in norms) > 5
    teacher = run.model.teacher.class_token.clone()
    run.train_step()
    assert not torch.equal(run.model.teacher.class_token, teacher)


def test_parts_of_a_batch_that_is_compared_are_refused():
    with pytest.raises(ValueError, match="accumulate must be 1, as the loss compares"):
        Trainer(TrainConfig("clip", batch=4, accumulate=2), CaptionedShapes())


def test_augmentations_need_torchvision_and_classes(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    message = "Augment: mixup, cutmix needs torchvision; install with: pip install torchvision"
    with pytest.raises(ImportError, match=message):
        Augment("mixup", "cutmix", classes=10)
    with pytest.raises(ValueError, match=r"Augment: names must be one of .*, got names='mixdown'"):
        Augment("mixdown", classes=10)
    with pytest.raises(ValueError, match="augment needs a task of images and their classes, got"):
        Trainer(TrainConfig("clip", augment=("mixup",)), CaptionedShapes())


def test_augmentations_are_those_of_torchvision():
    pytest.importorskip("torchvision")
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8)
    for names in (("mixup",), ("cutmix",), ("randaugment",), ("randaugment", "mixup", "cutmix")):
        augment = Augment(*names, classes=10)
        new, targets = augment(images, labels, 0, 3)
        again, other = augment(images, labels, 0, 3), augment(images, labels, 0, 4)
        assert torch.equal(new, again[0]) and torch.equal(targets, again[1])
        assert new.shape == images.shape and not torch.equal(new, other[0])
        if names != ("randaugment",):
            torch.testing.assert_close(targets.sum(-1), torch.ones(8))


#: Model -> metric and a floor far above chance: 0.31 for the mean of drawn shapes, 0.1 for digits,
#: and 1 of 128 for retrieval.
FIGURES = {
    "mae": ("linear probe", 0.78),
    "clip": ("retrieval", 0.1),
    "dino": ("nearest neighbours", 0.7),
    "deit": ("accuracy", 0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_training_reaches_its_figure(name):
    config = TRAINED[name]
    kind = recipe_of(config).task
    if issubclass(kind, Digits):
        pytest.importorskip("sklearn")
    run = Trainer(TrainConfig(name, **recipe_of(config).options), kind())
    run.evaluate()
    for _ in range(run.config.steps):
        run.train_step()
    run.evaluate()
    metric, floor = FIGURES[name]
    before, after = run.held_out[0][metric], run.held_out[-1][metric]
    assert after > max(floor, before)
