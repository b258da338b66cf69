"""Training tasks on digits: crops, and a teacher's labels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from omniattn import functional
from omniattn.training.probes import nearest_neighbors
from omniattn.training.tasks import HELD_OUT_SEED, Batch, Digits

if TYPE_CHECKING:
    from omniattn.models.model import Model
    from omniattn.models.vision import DINO, DeiT


def uniform(shape: tuple[int, ...], seed: int, step: int, stream: int) -> Tensor:
    """Returns numbers in [0, 1) that (seed, step, stream) determine; stream 0 picks examples."""
    key = torch.tensor([seed, (step << 8) + stream])
    return functional.uniform_like(torch.empty(shape), seed=key)


class _Unlabelled(Digits):
    """Digits whose labels only the metrics use."""

    _PARTS: ClassVar[int] = 512

    def _features(self, encode: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the features of both splits."""
        found = []
        for images, _ in (self.train, self.held_out):
            parts = [encode(part.to(device)).float().cpu() for part in images.split(self._PARTS)]
            found.append(torch.cat(parts))
        return found[0], found[1]


class CroppedDigits(_Unlabelled):
    """Two large crops (B, 2, 1, 8, 8) and four small ones (B, 4, 1, 6, 6) of each digit.

    The metric is the accuracy of nearest neighbours by the teacher's features.
    """

    unit = "nats per view"
    compares = True
    small: ClassVar[int] = 4

    def _crops(
        self,
        images: Tensor,
        count: int,
        side: int,
        scale: tuple[float, float],
        key: tuple[int, int, int],
    ) -> Tensor:
        """Returns crops (B, count, 1, side, side), turned, moved and of another contrast."""
        draws = uniform((6, len(images) * count), *key)
        turn, where, stretch, contrast = draws[0], draws[1:3], draws[3:5], draws[5]
        angle = (turn - 0.5) * 0.4
        size = scale[0] + (scale[1] - scale[0]) * stretch
        move = (2 * where - 1) * (1 - size).clamp(min=0.1)
        sine, cosine = angle.sin(), angle.cos()
        rows = (cosine * size[0], -sine * size[1], move[0], sine * size[0], cosine * size[1])
        theta = torch.stack([*rows, move[1]], -1).view(-1, 2, 3)
        source = images.repeat_interleave(count, 0)
        grid = affine_grid(theta, [len(source), 1, side, side], align_corners=False)
        crops = grid_sample(source, grid, align_corners=False)
        crops = crops * (0.6 + 0.8 * contrast)[:, None, None, None]
        return crops.unflatten(0, (-1, count))

    def _views(self, images: Tensor, seed: int, step: int) -> Batch:
        large = self._crops(images, 2, 8, (0.8, 1.05), (seed, step, 2))
        small = self._crops(images, self.small, 6, (0.5, 0.8), (seed, step, 3))
        return large, small

    def batch(self, size: int, seed: int, step: int) -> Batch:
        return self._views(super().batch(size, seed, step)[0], seed, step)

    def held_out_batch(self, size: int) -> Batch:
        return self._views(self.held_out[0], HELD_OUT_SEED, 0)

    def metrics(self, model: Model, batch: Batch) -> dict[str, float]:
        teacher = cast("DINO", model).teacher
        train, held_out = self._features(teacher, batch[0].device)
        found = nearest_neighbors(train, self.train[1], held_out, self.held_out[1])
        return {"nearest neighbours": found}


class DistilledDigits(Digits):
    """Digits with a teacher: images (B, 1, 8, 8), labels (B,) and the teacher's logits (B, 10).

    The teacher compares an image with all others of the training split: its logit of a class is the
    logarithm of the density of the class's images there, each spread as a normal distribution.

    Args:
        width: standard deviation of a pixel.
    """

    def __init__(self, width: float = 0.08) -> None:
        super().__init__()
        self.width = width
        self.logits = self._taught(self.train[0], own=True)
        self.held_out_logits = self._taught(self.held_out[0])

    def _taught(self, images: Tensor, *, own: bool = False) -> Tensor:
        """Returns the teacher's logits; of its own images without the image itself."""
        x, known = images.flatten(1), self.train[0].flatten(1)
        scores = -torch.cdist(x, known).square() / (2 * known.shape[1] * self.width**2)
        if own:
            scores = scores.fill_diagonal_(-math.inf)
        classes = range(int(self.train[1].max()) + 1)
        parts = [scores[:, self.train[1] == c].logsumexp(-1) for c in classes]
        return torch.stack(parts, -1)

    def batch(self, size: int, seed: int, step: int) -> Batch:
        index = self.chosen(size, seed, step)
        return self.train[0][index], self.train[1][index], self.logits[index]

    def held_out_batch(self, size: int) -> Batch:
        return *self.held_out, self.held_out_logits

    def metrics(self, model: Model, batch: Batch) -> dict[str, float]:
        images, labels, teacher = batch
        first, second = cast("DeiT", model).heads(images)
        logits = {
            "accuracy": first + second,
            "class token": first,
            "distillation token": second,
            "teacher": teacher,
        }
        return {n: float((x.argmax(-1) == labels).double().mean()) for n, x in logits.items()}
