"""Image classifiers: the Vision Transformer and Swin."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_float, require_strided, shown
from omniattn.models.encoder import EncoderConfig
from omniattn.models.hf import Conversion, Counterpart
from omniattn.models.model import Model
from omniattn.modules import (
    DecoderBlock,
    LayerNorm,
    LearnedPositional,
    Linear,
    PatchMerging,
    SwinBlock,
    WindowAttention,
)
from omniattn.modules.base.fields import Epsilon, Probability, Size

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
            of `patch`.
    """

    classes: Size = 10
    channels: Size = 1
    image: Size = 8
    patch: Size = 2


class Classifier(Model):
    """Computes patches -> tokens -> features -> logits; subclasses map tokens to features.

    Args:
        config: sizes and options.
        width: size of a token.
        features: size of the head's input.
        device, dtype: of the parameters.

    Shape:
        images (B, channels, image, image) -> logits (B, classes), or the mean loss with `labels`
        (B,).
    """

    def __init__(
        self,
        config: VisionConfig,
        width: int,
        features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.patch, self.backend = config.channels, config.patch, config.backend
        patch = config.linear(config.channels * config.patch**2, width)
        self.embed_patches = Linear(patch, device=device, dtype=dtype)
        self.norm = LayerNorm(config.layer_norm(features), device=device, dtype=dtype)
        self.head = Linear(config.linear(features, config.classes), device=device, dtype=dtype)

    def patches(self, images: Tensor) -> Tensor:
        """Maps images (B, C, H, W) to tokens (B, H / patch, W / patch, width)."""
        op, p = type(self).__name__, self.patch
        require_float(op, "images", images)
        require_strided(op, "images", images)
        shape = tuple(images.shape)
        if len(shape) != 4 or shape[1] != self.channels or shape[2] % p or shape[3] % p:
            raise ValueError(
                f"{op}: images must have shape (B, {self.channels}, H, W) with H and W multiples "
                f"of patch, got images.shape={shape}, patch={p}"
            )
        split = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # (B, C, rows, p, columns, p)
        tokens: Tensor = self.embed_patches(split.permute(0, 2, 4, 1, 3, 5).flatten(3))
        return tokens

    def features(self, tokens: Tensor) -> Tensor:
        """Maps the tokens of `patches` to normed features (B, features)."""
        raise NotImplementedError

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns logits (B, classes), or with labels the mean loss."""
        logits: Tensor = self.head(self.features(self.patches(images)))
        if labels is None:
            return logits
        return functional.cross_entropy(logits, labels, backend=self.backend)


def _class_token_only(ours: ViTConfig) -> dict[str, Any]:
    if ours.pool != "token":
        raise NotImplementedError(
            f"ViTConfig: pool must be 'token' in transformers, got pool={shown(ours.pool)}"
        )
    return {}


@dataclass(frozen=True)
class ViTConfig(VisionConfig):
    """Sizes of a ViT.

    Args:
        dim, num_layers, num_heads: sizes; the feed-forward layers are 4 dim wide.
        pool: input of the head: "token", a class token before the patches, or "mean" of the
            patches, without a class token.

    Reference:
        Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, arXiv 2010.11929; mean: Beyer,
        Zhai, Kolesnikov, "Better plain ViT baselines for ImageNet-1k", 2022, arXiv 2205.01580.
    """

    architecture = "vit"
    hf = Counterpart(
        "ViTForImageClassification",
        HF_OPTIONS
        | {
            "dim": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
        },
        (
            (r"^class_token", "vit.embeddings.cls_token"),
            (r"^embed_positions.weight", "vit.embeddings.position_embeddings"),
            (r"^embed_patches", "vit.embeddings.patch_embeddings.projection"),
            (r"^norm", "vit.layernorm"),
            (r"^layers", "vit.layers"),
            (r"mixer", "attention"),
            *HF_WEIGHTS,
        ),
        fixed=HF_FIXED | {"intermediate_size": lambda c: 4 * c.dim},
        conversions=(Conversion(_class_token_only, lambda _: {}),),
    )

    dim: Size = 64
    num_layers: Size = 4
    num_heads: Size = 4
    pool: str = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("ViTConfig", "pool", self.pool, ("token", "mean"))

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ViT:
        return ViT(self, device=device, dtype=dtype)


class ViT(Classifier):
    """Vision Transformer: [class token; patches] + positions, pre-norm blocks, head.

    The head reads the class token, or with `pool="mean"` the mean of the normed patches.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Example:
        >>> ViT(ViTConfig())(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    config: ViTConfig

    def __init__(
        self,
        config: ViTConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, config.dim, config.dim, device=device, dtype=dtype)
        self.config = c = config
        self.class_token: nn.Parameter | None = None
        if c.pool == "token":
            self.class_token = nn.Parameter(torch.empty(c.dim, device=device, dtype=dtype))
        self.reset_parameters()
        tokens = (c.image // c.patch) ** 2 + (c.pool == "token")
        positions = LearnedPositional.Config(tokens, c.dim, c.init_std)
        self.embed_positions = LearnedPositional(positions, device=device, dtype=dtype)
        attention = c.attention(c.dim, c.num_heads)
        block = DecoderBlock.Config(attention, c.mlp(c.dim, 4 * c.dim), self.norm.config)
        self.layers = nn.ModuleList(
            DecoderBlock(block, device=device, dtype=dtype) for _ in range(c.num_layers)
        )

    def reset_parameters(self) -> None:
        """Initialises the class token from N(0, init_std^2)."""
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=self.config.init_std)

    def features(self, tokens: Tensor) -> Tensor:
        side = self.config.image // self.config.patch
        if tokens.shape[1:3] != (side, side):
            raise ValueError(
                f"ViT: images must have {side} x {side} patches, a position for each, "
                f"got {tokens.shape[1]} x {tokens.shape[2]}"
            )
        x = tokens.flatten(1, 2)
        if self.class_token is not None:
            x = torch.cat([self.class_token.to(x.dtype).expand(len(x), 1, -1), x], 1)
        x, residual = self.embed_positions(x), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        if self.class_token is not None:
            x, residual = x[:, 0], None if residual is None else residual[:, 0]
        y: Tensor = self.norm(x if residual is None else x + residual)
        return y if self.class_token is not None else y.mean(1)


def _swin_layer(match: re.Match[str]) -> str:
    """Renames a stage's layer: our stages start with the merging, transformers' end with it."""
    stage, layer = int(match[1]), int(match[2])
    if stage > 0 and layer == 0:
        return f"swin.encoder.layers.{stage - 1}.downsample"
    return f"swin.encoder.layers.{stage}.blocks.{layer - (stage > 0)}"


@dataclass(frozen=True)
class SwinConfig(VisionConfig):
    """Sizes of a Swin Transformer.

    Args:
        dim: width of the first stage; each further stage is twice as wide, on half the grid.
        depths, heads: numbers of blocks and heads of each stage; every other block shifts its
            windows.
        window: side of a window.
        drop_path_p: stochastic depth of the last block; grows linearly from 0 at the first.

    Reference:
        Liu et al., "Swin Transformer", 2021, arXiv 2103.14030.
    """

    architecture = "swin"
    hf = Counterpart(
        "SwinForImageClassification",
        HF_OPTIONS
        | {
            "dim": "embed_dim",
            "depths": "depths",
            "heads": "num_heads",
            "window": "window_size",
            "drop_path_p": "drop_path_rate",
        },
        (
            (r"^embed_patches", "swin.embeddings.patch_embeddings.projection"),
            (r"^embed_norm", "swin.embeddings.norm"),
            (r"^norm", "swin.layernorm"),
            (r"^stages\.(\d+)\.(\d+)", _swin_layer),
            (r"attn\.qkv", "attention.{q,k,v}_proj"),
            (r"attn\.proj", "attention.o_proj"),
            (r"attn\.relative", "attention.relative_position_bias.relative"),
            *HF_WEIGHTS,
        ),
        fixed=HF_FIXED | {"mlp_ratio": 4.0, "use_absolute_embeddings": False},
    )

    norm_eps: Epsilon = 1e-5
    dim: Size = 32
    depths: tuple[Size, ...] = (2, 2)
    heads: tuple[Size, ...] = (2, 4)
    window: Size = 2
    drop_path_p: Probability = 0.0

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Swin:
        return Swin(self, device=device, dtype=dtype)


class Swin(Classifier):
    """Swin Transformer: stages of window attention with patch merging; mean pooling.

    Patches are normed after embedding: before it, the norm of a single number (`patch=1`, one
    channel) would keep little except its sign.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Example:
        >>> Swin(SwinConfig())(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    config: SwinConfig

    def __init__(
        self,
        config: SwinConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        last = config.dim * 2 ** (len(config.depths) - 1)
        super().__init__(config, config.dim, last, device=device, dtype=dtype)
        self.config = c = config
        self.embed_norm = LayerNorm(c.layer_norm(c.dim), device=device, dtype=dtype)
        blocks = sum(c.depths)
        drop = iter([c.drop_path_p * i / max(1, blocks - 1) for i in range(blocks)])

        def block(width: int, heads: int, index: int) -> SwinBlock:
            shift = c.window // 2 if index % 2 else 0
            attention = WindowAttention.Config(
                width, heads, c.window, shift, init_std=c.init_std, backend=c.backend
            )
            config = SwinBlock.Config(attention, drop_path_p=next(drop), norm_eps=c.norm_eps)
            return SwinBlock(config, device=device, dtype=dtype)

        self.stages = nn.ModuleList()
        for stage, (depth, heads) in enumerate(zip(c.depths, c.heads, strict=True)):
            layers: list[nn.Module] = []
            if stage > 0:
                merging = PatchMerging.Config(
                    c.dim * 2 ** (stage - 1), c.norm_eps, c.init_std, c.backend
                )
                layers.append(PatchMerging(merging, device=device, dtype=dtype))
            layers += [block(c.dim * 2**stage, heads, index) for index in range(depth)]
            self.stages.append(nn.Sequential(*layers))

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed_norm(tokens)
        for stage in self.stages:
            x = stage(x)
        y: Tensor = self.norm(x.flatten(1, 2)).mean(1)
        return y
