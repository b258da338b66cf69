"""DINO: a ViT that learns to predict what a moving average of itself sees in other crops."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_tensor
from omniattn.models.hf import Counterpart
from omniattn.models.model import Model
from omniattn.models.vision.classifier import HF_FIXED, HF_WEIGHTS
from omniattn.models.vision.dinov2 import Dinov2Config, Dinov2RegistersConfig
from omniattn.models.vision.self_distillation import Targets, koleo_loss
from omniattn.models.vision.vit import (
    VIT_OPTIONS,
    ViT,
    ViTConfig,
    only_plain,
    require_options,
    vit_weights,
    without,
)
from omniattn.modules import Linear
from omniattn.modules.base.fields import Positive, Probability, Size, SizeOrZero
from omniattn.reference.precision import widen

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class DINOFeaturesConfig(ViTConfig):
    """Sizes and options of a ViT without a head, as in the releases of DINO.

    The model returns the normed class token.

    Args:
        dim, num_layers, num_heads: as in ViTConfig, also its other options.

    Reference:
        Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", 2021, arXiv
        2104.14294.
    """

    architecture = "dino-features"
    hf = Counterpart(
        "ViTModel",
        {name: theirs for name, theirs in VIT_OPTIONS.items() if name != "classes"},
        (*vit_weights(""), *HF_WEIGHTS),
        fixed=HF_FIXED | {"intermediate_size": lambda c: 4 * c.dim},
        conversions=(
            only_plain(without("interpolate") | {"classes": 0, "interpolate": "bicubic"}),
        ),
        unused=r"^pooler",
    )

    classes: SizeOrZero = 0
    interpolate: str | None = "bicubic"


@dataclass(frozen=True)
class DINOConfig(ViTConfig):
    """Sizes and options of a DINO.

    Args:
        dim, num_layers, num_heads: sizes of the ViT, as in ViTConfig, also its other options.
        head_dim, bottleneck, prototypes: widths of the heads' hidden layers and of their last
            layer, and the number of classes that the head makes up.
        student_temperature, teacher_temperature: divisors of the logits.
        first_temperature, warmup: the teacher's temperature at the start, and the share of the
            training in which it rises linearly to teacher_temperature.
        centering: "mean" subtracts a running mean from the teacher's logits (DINO); "sinkhorn"
            makes the batch use the prototypes evenly (DINOv2).
        center_momentum: momentum of the running mean.
        momentum: share of the teacher that stays at a step, at the start; rises to 1 as a cosine.
        frozen: share of the training in which the prototypes get no gradient.
        ibot: weight of the loss of masked patches, 0 for none; needs mask_token=True.
        koleo: weight of :func:`koleo_loss` of the student's class tokens, 0 for none.

    Reference:
        Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", 2021, arXiv
        2104.14294; ibot: Zhou et al., 2021, arXiv 2111.07832; sinkhorn, koleo: Oquab et al.,
        "DINOv2", 2023, arXiv 2304.07193.
    """

    architecture = "dino"
    hf = None

    classes: SizeOrZero = 0
    interpolate: str | None = "bicubic"
    head_dim: Size = 2048
    bottleneck: Size = 256
    prototypes: Size = 65536
    student_temperature: Positive = 0.1
    teacher_temperature: Positive = 0.04
    first_temperature: Positive = 0.04
    warmup: Probability = 0.0
    centering: str = "mean"
    center_momentum: Probability = 0.9
    momentum: Probability = 0.996
    frozen: Probability = 0.0
    ibot: float = 0.0
    koleo: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("DINOConfig", "centering", self.centering, ("mean", "sinkhorn"))
        require_options(self, {"classes": 0, "pool": "token", "mask_token": self.ibot > 0})

    def temperature(self, done: float) -> float:
        """Returns the teacher's temperature after a share of the training."""
        if done >= self.warmup:
            return self.teacher_temperature
        first = self.first_temperature
        return first + (self.teacher_temperature - first) * done / self.warmup

    def kept(self, done: float) -> float:
        """Returns the share of the teacher that stays at a step, after a share of the training."""
        return 1 - (1 - self.momentum) * (1 + math.cos(math.pi * min(1.0, done))) / 2

    @property
    def features(self) -> ViTConfig:
        """Config of the ViT alone: that of DINOv2 with factors per channel, else that of DINO."""
        own = {field.name: getattr(self, field.name) for field in fields(ViTConfig)}
        kind: type[ViTConfig] = DINOFeaturesConfig
        if self.layer_scale is not None:
            kind = Dinov2RegistersConfig if self.registers else Dinov2Config
        return kind(**own)

    def build(  # type: ignore[override]
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> DINO:
        return DINO(self, device=device, dtype=dtype)


class _Head(nn.Module):
    """Maps features to logits of prototypes: three layers, unit length, unit prototypes."""

    def __init__(self, c: DINOConfig, **factory: Any) -> None:
        super().__init__()
        sizes = (c.dim, c.head_dim, c.head_dim, c.bottleneck)
        self.layers = nn.ModuleList(
            Linear(c.linear(n_in, n_out), **factory) for n_in, n_out in itertools.pairwise(sizes)
        )
        prototypes = Linear.Config(c.bottleneck, c.prototypes, False, c.init_std, c.backend)
        self.prototypes = Linear(prototypes, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (..., dim) to logits (..., prototypes)."""
        *hidden, last = self.layers
        for layer in hidden:
            x = nn.functional.gelu(layer(x))
        x = nn.functional.normalize(last(x), dim=-1)
        weight = nn.functional.normalize(self.prototypes.weight, dim=-1)
        return functional.linear(x, weight, backend=self.prototypes.config.backend)


class DINOOutput(NamedTuple):
    """Results of a DINO.

    Args:
        student_logits: (B, views, prototypes) of all crops, the global ones first.
        targets: (B, 2, prototypes), probabilities of the teacher for the global crops.
        losses: parts of the loss by name, unweighted: "dino", "ibot", "koleo".
    """

    student_logits: Tensor
    targets: Tensor
    losses: dict[str, Tensor]


class DINO(Model):
    """Self-distillation without labels; after training, `teacher` maps images to features.

    `teacher` is a model of its own, which can be saved and converted to transformers.

    The student's prediction for each crop learns the teacher's for each other global crop. The
    teacher is a moving average of the student: call `after_step` after each optimizer step, as the
    Trainer does.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        large (B, 2, channels, image, image), small (B, n, channels, h, w), masked (B, 2, patches)
        bool -> (loss, outputs); masked patches of the large crops are hidden from the student.

    Example:
        >>> config = DINOConfig(head_dim=32, bottleneck=16, prototypes=64)
        >>> loss, outputs = DINO(config)(torch.rand(3, 2, 1, 8, 8), torch.rand(3, 4, 1, 4, 4))
        >>> outputs.student_logits.shape, outputs.targets.shape
        (torch.Size([3, 6, 64]), torch.Size([3, 2, 64]))
    """

    config: DINOConfig

    def __init__(
        self,
        config: DINOConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = c = config
        self.student, self.head = ViT(c.features, **factory), _Head(c, **factory)
        # Masks and stochastic depth are the student's.
        self.teacher = ViT(replace(c.features, drop_path_p=0.0), **factory)
        self.teacher_head = _Head(c, **factory)
        self.targets = Targets(c.prototypes, c.centering, c.center_momentum, device=device)
        self.patch_head: _Head | None = None
        if c.ibot:
            self.patch_head, self.teacher_patch_head = _Head(c, **factory), _Head(c, **factory)
            self.patch_targets = Targets(
                c.prototypes, c.centering, c.center_momentum, device=device
            )
            self.teacher_patch_head.requires_grad_(False)
        self.teacher.requires_grad_(False)
        self.teacher_head.requires_grad_(False)
        self._losses: dict[str, float] = {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Copies the student to the teacher."""
        if not self.targets.center.is_meta:
            self._follow(0.0)

    def _pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """Returns the parts of the student and of the teacher."""
        pairs: list[tuple[nn.Module, nn.Module]] = [
            (self.student, self.teacher),
            (self.head, self.teacher_head),
        ]
        if self.patch_head is not None:
            pairs.append((self.patch_head, self.teacher_patch_head))
        return pairs

    @torch.no_grad()
    def _follow(self, kept: float) -> None:
        for student, teacher in self._pairs():
            for new, old in zip(student.parameters(), teacher.parameters(), strict=True):
                old.lerp_(new.detach(), 1 - kept)

    def to_hf(self) -> PreTrainedModel:
        """Converts the teacher, which gives the features, to transformers' ViTModel.

        With factors per channel it becomes a Dinov2Model, and with registers a
        Dinov2WithRegistersModel.

        Raises:
            NotImplementedError: transformers lacks an option.
        """
        return self.teacher.to_hf()

    def before_step(self, done: float) -> None:
        if done < self.config.frozen:
            for head in (self.head, self.patch_head):
                if head is not None:
                    head.prototypes.weight.grad = None

    def after_step(self, done: float) -> None:
        self._follow(self.config.kept(done))
        self.targets.progress.fill_(done)

    def further_losses(self) -> dict[str, float]:
        return self._losses

    def forward(
        self, large: Tensor, small: Tensor, masked: Tensor | None = None
    ) -> tuple[Tensor, DINOOutput]:
        """Returns the loss and the outputs; see the class."""
        c = self.config
        self._require_crops(large, small, masked)
        views = large.flatten(0, 1)
        hidden = None if masked is None else masked.flatten(0, 1)
        seen = self.student.forward_features(views, hidden)
        crops = self.student(small.flatten(0, 1))
        tokens = torch.cat(
            [seen[:, 0].unflatten(0, (-1, 2)), crops.unflatten(0, (len(small), -1))], 1
        )
        logits = self.head(tokens)
        temperature = c.temperature(float(self.targets.progress))
        with torch.no_grad():
            whole = self.teacher.forward_features(views)
            teacher = self.teacher_head(whole[:, 0]).unflatten(0, (-1, 2))
            targets = self.targets(teacher, temperature)
        losses = {"dino": self._across_views(logits, targets)}
        loss = losses["dino"]
        if hidden is not None:
            patches = slice(c.prefix, None)
            losses["ibot"] = self._of_patches(seen[:, patches], whole[:, patches], hidden)
            loss = loss + c.ibot * losses["ibot"]
        if c.koleo:
            losses["koleo"] = koleo_loss(tokens[:, 0]) + koleo_loss(tokens[:, 1])
            loss = loss + c.koleo * losses["koleo"]
        if self.training:
            self.targets.update(teacher.flatten(0, 1))
        self._losses = {} if len(losses) == 1 else {n: t.item() for n, t in losses.items()}
        return loss, DINOOutput(logits, targets, losses)

    def _require_crops(self, large: Tensor, small: Tensor, masked: Tensor | None) -> None:
        for name, crops in (("large", large), ("small", small)):
            require_tensor("DINO", name, crops)
            views = crops.shape[1] if crops.dim() == 5 else 0
            if not views or len(crops) != len(large) or (name == "large" and views != 2):
                raise ValueError(
                    "DINO: large must have shape (B, 2, channels, H, W) and small "
                    f"(B, n, channels, h, w), got {name}.shape={tuple(crops.shape)}"
                )
        if (masked is None) != (self.patch_head is None):
            raise ValueError(
                "DINO: masked must be given if and only if ibot is above 0, "
                f"got masked={'None' if masked is None else 'a tensor'}, ibot={self.config.ibot}"
            )

    def _across_views(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of each view under each other global view's target."""
        log_q = (widen(logits) / self.config.student_temperature).log_softmax(-1)
        pairs = -torch.einsum("bik,bvk->iv", targets.to(log_q.dtype), log_q) / len(logits)
        own = torch.eye(*pairs.shape, dtype=torch.bool, device=pairs.device)
        return pairs.masked_fill(own, 0).sum() / (pairs.numel() - 2)

    def _of_patches(self, seen: Tensor, whole: Tensor, hidden: Tensor) -> Tensor:
        """Returns the mean cross-entropy of hidden patches, averaged in each view first."""
        head = self.patch_head
        assert head is not None
        if not hidden.any():
            return seen.sum() * 0.0
        with torch.no_grad():
            teacher = self.teacher_patch_head(whole[hidden])
            temperature = self.config.temperature(float(self.targets.progress))
            targets = self.patch_targets(teacher, temperature)
        log_q = (widen(head(seen[hidden])) / self.config.student_temperature).log_softmax(-1)
        errors = -(targets.to(log_q.dtype) * log_q).sum(-1)
        count = hidden.sum(1)
        weights = (1 / count.clamp(min=1)).repeat_interleave(count)
        if self.training:
            self.patch_targets.update(teacher)
        return (errors * weights.to(errors.dtype)).sum() / (count > 0).sum()
