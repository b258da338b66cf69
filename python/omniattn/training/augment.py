"""Augmentations of labelled images by torchvision: Mixup, CutMix and RandAugment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import require_choice, require_int

#: Names of the augmentations -> their classes in torchvision.transforms.v2.
AUGMENTATIONS = {"mixup": "MixUp", "cutmix": "CutMix", "randaugment": "RandAugment"}


class Augment:
    """Augments batches of labelled images by transforms of torchvision, determined by a seed.

    RandAugment changes each image on its own. Mixup and CutMix mix pairs, and turn labels into
    probabilities of classes; if both are given, one of them is drawn for each batch.

    Args:
        names: "mixup", "cutmix" and "randaugment", in any order.
        classes: number of classes.

    Raises:
        ImportError: torchvision is not installed.
        ValueError: an unknown name.

    Reference:
        Zhang et al., "mixup", 2017, arXiv 1710.09412; Yun et al., "CutMix", 2019, arXiv 1905.04899;
        Cubuk et al., "RandAugment", 2019, arXiv 1909.13719.
    """

    def __init__(self, *names: str, classes: int) -> None:
        require_int("Augment", "classes", classes, 2)
        for name in names:
            require_choice("Augment", "names", name, tuple(AUGMENTATIONS))
        try:
            from torchvision.transforms import v2
        except ImportError as error:
            raise ImportError(
                f"Augment: {', '.join(names)} needs torchvision; "
                "install with: pip install torchvision"
            ) from error
        self.classes = classes
        self.single: Any = v2.RandAugment() if "randaugment" in names else None
        mixing = [
            getattr(v2, AUGMENTATIONS[name])(num_classes=classes)
            for name in ("mixup", "cutmix")
            if name in names
        ]
        self.mixing: Any = v2.RandomChoice(mixing) if mixing else None

    def __call__(self, images: Tensor, labels: Tensor, *key: int) -> tuple[Tensor, Tensor]:
        """Returns new images (B, C, H, W) in [0, 1] and labels (B,) or probabilities (B, classes).

        `key`: non-negative numbers that determine the draws, such as a seed and a step.
        """
        if self.single is None and self.mixing is None:
            return images, labels
        seed = 0
        for part in key:
            seed = (seed * 1_000_003 + part) % 2**63
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.single is not None:
                pixels = (images * 255).round().to(torch.uint8)
                images = torch.stack([self.single(image) for image in pixels]) / 255
            if self.mixing is not None:
                images, labels = self.mixing(images, labels)
        return images, labels
