"""Training tasks on generated images of shapes: captions, and restored patches."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor
from typing_extensions import Self

from omniattn.training.images import uniform
from omniattn.training.probes import linear_probe
from omniattn.training.tasks import HELD_OUT_SEED, Batch, Task

if TYPE_CHECKING:
    from omniattn.models.model import Model
    from omniattn.models.vision import CLIP, MAE

#: Kinds of shapes: colours by red, green and blue.
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (1.0, 0.1, 0.1),
    "green": (0.1, 0.9, 0.2),
    "blue": (0.2, 0.3, 1.0),
    "yellow": (1.0, 0.9, 0.1),
}
SIZES = {"small": 0.28, "large": 0.45}
PLACES = {
    "top left": (-0.5, -0.5),
    "top right": (-0.5, 0.5),
    "bottom left": (0.5, -0.5),
    "bottom right": (0.5, 0.5),
}


class _Shapes(Task):
    """Images (B, 3, 16, 16) of a shape of some colour, size and place."""

    side: ClassVar[int] = 16

    def __init__(self) -> None:
        kinds = list(itertools.product(range(4), range(4), range(2), range(4)))
        self.kinds = torch.tensor(kinds)  # shape, colour, size, place
        self.digest = f"shapes-{len(kinds)}"

    @classmethod
    def load(cls, path: Path | str | None, length: int) -> Self:
        if path is not None:
            raise ValueError("this model trains on generated shapes, not on other data")
        return cls()

    def images(self, index: Tensor, seed: int, step: int) -> Tensor:
        """Draws images (B, 3, 16, 16) of combinations (B,), each moved a little and noisy."""
        shape, colour, size, place = self.kinds[index].T
        n, side = len(index), self.side
        moved = 0.3 * uniform((2, n), seed, step, 4) - 0.15
        centre = torch.tensor(list(PLACES.values()))[place].T + moved
        radius = torch.tensor(list(SIZES.values()))[size][:, None, None]
        line = (torch.arange(side) + 0.5) * 2 / side - 1
        y = (line[None, :, None] - centre[0][:, None, None]) / radius
        x = (line[None, None, :] - centre[1][:, None, None]) / radius
        box = torch.maximum(x.abs(), y.abs())
        masks = torch.stack(
            [
                (x.square() + y.square()).expand_as(box) <= 1,
                box <= 0.85,
                (box <= 1) & (2 * x.abs() <= y + 1),
                (box <= 1) & (torch.minimum(x.abs(), y.abs()) <= 0.35),
            ]
        )
        inside = masks[shape, torch.arange(n)][:, None].float()
        paint = torch.tensor(list(COLOURS.values()))[colour][:, :, None, None]
        ground = 0.3 * uniform((n, 1, 1, 1), seed, step, 5)
        noise = 0.2 * uniform((n, 3, side, side), seed, step, 6)
        return (inside * paint + (1 - inside) * ground + noise).clamp(0, 1)


class CaptionedShapes(_Shapes):
    """Images (B, 3, 16, 16) of a shape, and captions (B, 40) such as "a small red cross, top left".

    Captions are bytes, then the token END. Every fifth combination of shape, colour, size and place
    is held out: no such image or caption is in the training. The metrics use images of these:
    "retrieval" is the share whose own caption is the most similar of all 128, "zero-shot" the
    accuracy of choosing the shape by its captions.
    """

    unit = "nats per pair"
    compares = True
    items = "pairs"
    items_per_example = 1
    END: ClassVar[int] = 256
    vocab_size: ClassVar[int] = 257
    context: ClassVar[int] = 40

    def __init__(self) -> None:
        super().__init__()
        names = (SHAPES, tuple(COLOURS), tuple(SIZES), tuple(PLACES))
        self.captions = [
            "a {2} {1} {0}, {3}".format(*(n[i] for n, i in zip(names, kind, strict=True)))
            for kind in self.kinds.tolist()
        ]
        self.tokens = torch.zeros(len(self.kinds), self.context, dtype=torch.long)
        for row, caption in zip(self.tokens, self.captions, strict=True):
            text = [*caption.encode(), self.END]
            row[: len(text)] = torch.tensor(text)
        everything = torch.arange(len(self.kinds))
        self.unseen = everything[everything % 5 == 0]
        self.seen = everything[everything % 5 != 0]
        self.summary = (
            f"images drawn of {len(self.seen)} combinations to train on, {len(self.unseen)} held "
            "out"
        )

    def batch(self, size: int, seed: int, step: int) -> Batch:
        """Returns different combinations, unless there are more examples than combinations."""
        order = uniform((len(self.seen),), seed, step, 0).argsort()
        index = self.seen[order.repeat(size // len(order) + 1)[:size]]
        return self.images(index, seed, step), self.tokens[index]

    def held_out_batch(self, size: int) -> Batch:
        """Returns an image of each combination that is held out."""
        return self.images(self.unseen, HELD_OUT_SEED, 0), self.tokens[self.unseen]

    def metrics(self, model: Model, batch: Batch) -> dict[str, float]:
        clip, device = cast("CLIP", model), batch[0].device
        index = self.unseen.repeat(8)
        images = self.images(index, HELD_OUT_SEED, 1).to(device)
        tokens = self.tokens.to(device)
        embeds, texts = clip.encode_image(images).float(), clip.encode_text(tokens).float()
        found = (embeds @ texts.T).argmax(-1).cpu()
        shapes = clip.zero_shot(images, tokens.unflatten(0, (len(SHAPES), -1))).argmax(-1).cpu()
        return {
            "retrieval": float((found == index).double().mean()),
            "zero-shot": float((shapes == self.kinds[index, 0]).double().mean()),
        }


class MaskedShapes(_Shapes):
    """Restores masked patches: images (B, 3, 16, 16) and noise (B, patches) that orders patches.

    The metrics are accuracies of linear classifiers on the mean of the encoder's patches, for the
    shape, colour, size and place of new images, and their mean, "linear probe".

    Args:
        patches: number of patches of an image.
    """

    unit = "squared error per pixel"
    items = "images"
    items_per_example = 1

    def __init__(self, patches: int = 16) -> None:
        super().__init__()
        self.patches = patches
        self.summary = f"images drawn of {len(self.kinds)} combinations"

    def batch(self, size: int, seed: int, step: int) -> Batch:
        index = (uniform((size,), seed, step, 0) * len(self.kinds)).long()
        return self.images(index, seed, step), uniform((size, self.patches), seed, step, 1)

    def held_out_batch(self, size: int) -> Batch:
        """Returns 4 images of each combination."""
        index = torch.arange(len(self.kinds)).repeat(4)
        noise = uniform((len(index), self.patches), HELD_OUT_SEED, 0, 1)
        return self.images(index, HELD_OUT_SEED, 0), noise

    def metrics(self, model: Model, batch: Batch) -> dict[str, float]:
        encoder = cast("MAE", model).encoder
        index = torch.arange(len(self.kinds)).repeat(4)
        fitted, judged = (
            encoder.forward_features(images.to(batch[0].device))[:, encoder.config.prefix :]
            .mean(1)
            .float()
            .cpu()
            for images in (self.images(index, HELD_OUT_SEED, 1), batch[0])
        )
        names = ("shape", "colour", "size", "place")
        found = {
            name: linear_probe(fitted, labels, judged, labels)
            for name, labels in zip(names, self.kinds[index].T, strict=True)
        }
        return {"linear probe": sum(found.values()) / len(found), **found}
