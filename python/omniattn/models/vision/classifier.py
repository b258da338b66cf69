"""Base classes of the models that map an image to features and classify them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_float, require_strided, shown
from omniattn.models.encoders.encoder import EncoderConfig
from omniattn.models.model import Model
from omniattn.modules import LayerNorm, Linear
from omniattn.modules.base.fields import Size, SizeOrZero

#: Our option -> transformers' option, for ViT and Swin.
HF_OPTIONS = {
    "classes": "num_labels",
    "channels": "num_channels",
    "image": "image_size",
    "patch": "patch_size",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
}
HF_WEIGHTS = (
    (r"input_layernorm|norm1", "layernorm_before"),
    (r"post_attention_layernorm|norm2", "layernorm_after"),
    (r"up_proj", "fc1"),
    (r"down_proj", "fc2"),
    (r"^head", "classifier"),
)
HF_FIXED: dict[str, Any] = {
    "hidden_act": "gelu",
    "qkv_bias": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@dataclass(frozen=True)
class VisionConfig(EncoderConfig):
    """Options shared by the image classifiers.

    Args:
        classes, channels, image, patch: sizes; `image` is the side of the square images, a multiple
            of `patch`. A model with classes=0 has no head and returns its features.
    """

    classes: SizeOrZero = 10
    channels: Size = 1
    image: Size = 8
    patch: Size = 2


class Classifier(Model):
    """Computes patches -> tokens -> features -> logits; subclasses map tokens to features.

    Args:
        config: sizes and options.
        width: size of a token.
        features: size of the head's input.
        norm_dim: size of the normed tokens; default: features.
        device, dtype: of the parameters.

    Shape:
        images (B, channels, image, image) -> logits (B, classes), or the mean loss with `labels`
        (B,).
    """

    config: VisionConfig

    def __init__(
        self,
        config: VisionConfig,
        width: int,
        features: int,
        norm_dim: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.patch, self.backend = config.channels, config.patch, config.backend
        patch = config.linear(config.channels * config.patch**2, width)
        self.embed_patches = Linear(patch, device=device, dtype=dtype)
        norm = config.layer_norm(features if norm_dim is None else norm_dim)
        self.norm = LayerNorm(norm, device=device, dtype=dtype)
        self.head: Linear | None = None
        if config.classes:
            self.head = Linear(config.linear(features, config.classes), device=device, dtype=dtype)

    def _require_images(self, images: Tensor) -> None:
        """Raises unless `images` are floats (B, channels, H, W), sides multiples of patch."""
        op, p = type(self).__name__, self.patch
        require_float(op, "images", images)
        require_strided(op, "images", images)
        shape = tuple(images.shape)
        if len(shape) != 4 or shape[1] != self.channels or shape[2] % p or shape[3] % p:
            raise ValueError(
                f"{op}: images must have shape (B, {self.channels}, H, W) with H and W multiples "
                f"of patch, got images.shape={shape}, patch={p}"
            )

    def patches(self, images: Tensor) -> Tensor:
        """Maps images (B, C, H, W) to tokens (B, H / patch, W / patch, width)."""
        self._require_images(images)
        p = self.patch
        split = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # (B, C, rows, p, columns, p)
        tokens: Tensor = self.embed_patches(split.permute(0, 2, 4, 1, 3, 5).flatten(3))
        return tokens

    def features(self, tokens: Tensor) -> Tensor:
        """Maps the tokens of `patches` to normed features (B, features)."""
        raise NotImplementedError

    def forward_features(self, images: Tensor) -> Tensor:
        """Returns the normed tokens of the last stage, before pooling."""
        raise NotImplementedError

    def feature_maps(
        self, images: Tensor, indices: Sequence[int] | None = None, *, norm: bool = False
    ) -> list[Tensor]:
        """Returns maps (B, width, height, width of the grid), for detection and segmentation.

        Args:
            images: (B, channels, H, W).
            indices: stages of Swin and PVT or blocks of ViT, negative from the end; default: all.
            norm: True to apply the last norm to each map of its width.
        """
        raise NotImplementedError

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns logits (B, classes), or with labels the mean loss."""
        features = self.features(self.patches(images))
        if self.head is None:
            if labels is not None:
                raise ValueError(f"{type(self).__name__}: labels need a head, got classes=0")
            return features
        logits: Tensor = self.head(features)
        if labels is None:
            return logits
        return functional.cross_entropy(logits, labels, backend=self.backend)


def chosen(op: str, indices: Iterable[int] | None, count: int) -> list[int]:
    """Returns which of `count` stages are wanted, counted from 0, in their order.

    Raises:
        ValueError: an index beyond the stages.
    """
    if indices is None:
        return list(range(count))
    given = list(indices)
    if not given or any(not isinstance(i, int) or not -count <= i < count for i in given):
        raise ValueError(
            f"{op}: indices must be integers from {-count} to {count - 1}, "
            f"got indices={shown(given)}"
        )
    return sorted({i % count for i in given})


def as_map(tokens: Tensor) -> Tensor:
    """Maps a grid of tokens (B, height, width, dim) to (B, dim, height, width)."""
    return tokens.permute(0, 3, 1, 2).contiguous()
