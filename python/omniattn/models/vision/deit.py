"""DeiT: a ViT with a distillation token, whose head learns from a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_shape
from omniattn.models.hf import Counterpart
from omniattn.models.vision.classifier import HF_FIXED, HF_WEIGHTS
from omniattn.models.vision.losses import distillation_loss
from omniattn.models.vision.vit import VIT_OPTIONS, ViT, ViTConfig, only_plain, vit_weights, without
from omniattn.modules import Linear
from omniattn.modules.base.fields import Positive, Probability


@dataclass(frozen=True)
class DeiTConfig(ViTConfig):
    """Sizes and options of a DeiT with a distillation token.

    DeiTs without that token are ViTs.

    Args:
        dim, num_layers, num_heads: as in ViTConfig, also its other options.
        distillation: "hard" for the teacher's most probable class as a label, or "soft" for its
            probabilities.
        soft_share: share of the teacher in the soft loss.
        temperature: temperature of the soft loss.
        divide_by_classes: True to divide the soft loss by the number of classes, as the release
            does.

    Reference:
        Touvron et al., "Training data-efficient image transformers & distillation through
        attention", 2020, arXiv 2012.12877.
    """

    architecture = "deit"
    hf = Counterpart(
        "DeiTForImageClassificationWithTeacher",
        VIT_OPTIONS,
        (
            *vit_weights("deit."),
            (r"^head\b", "cls_classifier"),
            (r"^distillation_head", "distillation_classifier"),
            *HF_WEIGHTS,
        ),
        fixed=HF_FIXED | {"intermediate_size": lambda c: 4 * c.dim},
        conversions=(only_plain(without()),),
    )
    distilled: ClassVar[bool] = True

    distillation: str = "hard"
    soft_share: Probability = 0.1
    temperature: Positive = 3.0
    divide_by_classes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("DeiTConfig", "distillation", self.distillation, ("hard", "soft"))
        if self.pool != "token" or not self.classes:
            raise ValueError(
                "DeiTConfig: pool must be 'token' and classes at least 1, as both tokens have a "
                f"head, got pool={self.pool!r}, classes={self.classes}"
            )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> DeiT:
        return DeiT(self, device=device, dtype=dtype)


class DeiTOutput(NamedTuple):
    """Logits (B, classes) of the head of the class token and of the distillation token."""

    class_logits: Tensor
    distillation_logits: Tensor


class DeiT(ViT):
    """ViT with a second head, which reads a distillation token and learns from a teacher.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        images (B, channels, image, image) -> logits (B, classes), the mean of both heads; their
        mean loss with `labels` (B,); with `labels` and `teacher` (B, classes), the teacher's
        logits, the distillation loss and both heads' logits.

    Example:
        >>> model, images = DeiT(DeiTConfig()), torch.zeros(2, 1, 8, 8)
        >>> model(images).shape
        torch.Size([2, 10])
        >>> loss, outputs = model(images, torch.tensor([3, 1]), torch.zeros(2, 10))
        >>> loss.shape, outputs.distillation_logits.shape
        (torch.Size([]), torch.Size([2, 10]))
    """

    config: DeiTConfig

    def __init__(
        self,
        config: DeiTConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        head = config.linear(config.dim, config.classes)
        self.distillation_head = Linear(head, device=device, dtype=dtype)

    def heads(self, images: Tensor) -> DeiTOutput:
        """Returns the logits of both heads."""
        y = self.encode(self.embed(self.patches(images)), slice(0, 2))
        head: Any = self.head
        return DeiTOutput(head(y[:, 0]), self.distillation_head(y[:, 1]))

    @overload
    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor: ...
    @overload
    def forward(
        self, images: Tensor, labels: Tensor, teacher: Tensor
    ) -> tuple[Tensor, DeiTOutput]: ...
    def forward(
        self, images: Tensor, labels: Tensor | None = None, teacher: Tensor | None = None
    ) -> Tensor | tuple[Tensor, DeiTOutput]:
        """Returns logits; with labels the mean loss; with a teacher (loss, outputs)."""
        c, outputs = self.config, self.heads(images)
        if teacher is None:
            logits = (outputs.class_logits + outputs.distillation_logits) / 2
            if labels is None:
                return logits
            return functional.cross_entropy(logits, labels, backend=self.backend)
        if labels is None:
            raise TypeError("DeiT: labels must be given with a teacher, got labels=None")
        require_shape("DeiT", "teacher", teacher, outputs.class_logits.shape)
        loss = distillation_loss(
            *outputs,
            labels,
            teacher,
            kind=c.distillation,
            soft_share=c.soft_share,
            temperature=c.temperature,
            divide_by_classes=c.divide_by_classes,
            backend=self.backend,
        )
        return loss, outputs
