"""Swin Transformer: window attention in stages of growing width."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn.models.hf import Counterpart
from omniattn.models.vision.classifier import (
    HF_FIXED,
    HF_OPTIONS,
    HF_WEIGHTS,
    Classifier,
    VisionConfig,
    as_map,
    chosen,
)
from omniattn.modules import LayerNorm, PatchMerging, SwinBlock, WindowAttention
from omniattn.modules.base.fields import Epsilon, Probability, Size


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

    def _last(self, tokens: Tensor) -> Tensor:
        """Returns the normed tokens (B, height, width, dim) of the last stage."""
        x = self.embed_norm(tokens)
        for stage in self.stages:
            x = stage(x)
        y: Tensor = self.norm(x)
        return y

    def features(self, tokens: Tensor) -> Tensor:
        return self._last(tokens).flatten(1, 2).mean(1)

    def forward_features(self, images: Tensor) -> Tensor:
        """Returns the normed tokens (B, height, width, dim) of the last stage."""
        return self._last(self.patches(images))

    def feature_maps(
        self, images: Tensor, indices: Sequence[int] | None = None, *, norm: bool = False
    ) -> list[Tensor]:
        """Returns the maps of stages as (B, dim, height, width); see :class:`ViT`.

        Args:
            images: (B, channels, H, W).
            indices: stages, negative from the end; default: all.
            norm: True to norm the map of the last stage.
        """
        wanted = chosen("Swin", indices, len(self.stages))
        x, maps = self.embed_norm(self.patches(images)), []
        for index, stage in enumerate(self.stages):
            x = stage(x)
            if index in wanted:
                last = norm and index == len(self.stages) - 1
                maps.append(as_map(self.norm(x) if last else x))
        return maps
