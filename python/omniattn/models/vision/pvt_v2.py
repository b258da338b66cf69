"""PVT v2: overlapping patches, depthwise convolutions in place of positions, pooled keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omniattn.models.hf import Conversion, Counterpart
from omniattn.models.vision.classifier import (
    HF_FIXED,
    HF_OPTIONS,
    Classifier,
    VisionConfig,
    as_map,
    chosen,
)
from omniattn.modules import LayerNorm, Linear, Residual, SpatialReductionAttention
from omniattn.modules.base.fields import Probability, Size

#: Side of the grid of keys in linear attention.
_POOLED = 7


def _strides_to_hf(ours: PVTv2Config) -> dict[str, Any]:
    strides = [ours.patch, *(2 for _ in ours.dims[1:])]
    sizes = [2 * stride - 1 for stride in strides]
    return {"strides": strides, "patch_sizes": sizes, "num_encoder_blocks": len(sizes)}


def _strides_from_hf(theirs: Any) -> dict[str, Any]:
    strides, sizes = list(theirs.strides), list(theirs.patch_sizes)
    later = [2] * (len(theirs.hidden_sizes) - 1)
    if strides[1:] != later or sizes != [2 * stride - 1 for stride in strides]:
        raise NotImplementedError(
            "PVTv2Config: strides must be 2 after the first stage and patch_sizes 2 stride - 1, "
            f"got strides={theirs.strides}, patch_sizes={theirs.patch_sizes}"
        )
    return {"patch": strides[0]}


def _image_to_hf(ours: PVTv2Config) -> dict[str, Any]:
    return {"image_size": (ours.image, ours.image)}


def _image_from_hf(theirs: Any) -> dict[str, Any]:
    rows, columns = theirs.image_size
    if rows != columns:
        raise NotImplementedError(
            f"PVTv2Config: image_size must be a square, got image_size={theirs.image_size}"
        )
    return {"image": rows}


def _weights(ours: PVTv2Config) -> tuple[tuple[str, str], ...]:
    last, layer = len(ours.dims) - 1, r"pvt_v2.encoder.layers.\1"
    return (
        (r"^embed_patches", "pvt_v2.encoder.layers.0.patch_embedding.proj"),
        (r"^norm", f"pvt_v2.encoder.layers.{last}.layer_norm"),
        (r"^head", "classifier"),
        (r"^stages\.(\d+)\.merge", rf"{layer}.patch_embedding.proj"),
        (r"^stages\.(\d+)\.embed_norm", rf"{layer}.patch_embedding.layer_norm"),
        (r"^stages\.(\d+)\.norm", rf"{layer}.layer_norm"),
        (r"^stages\.(\d+)\.(attentions|mlps)\.(\d+)", rf"{layer}.blocks.\3.\2"),
        (r"attentions\.norm", "layer_norm_1"),
        (r"mlps\.norm", "layer_norm_2"),
        (r"attentions\.layer\.q\b", "attention.query"),
        (r"attentions\.layer\.kv", "attention.{key,value}"),
        (r"attentions\.layer\.sr", "attention.spatial_reduction"),
        (r"attentions\.layer\.norm", "attention.layer_norm"),
        (r"attentions\.layer\.proj", "attention.proj"),
        (r"mlps\.layer\.up_proj", "mlp.dense1"),
        (r"mlps\.layer\.dwconv", "mlp.dwconv.dwconv"),
        (r"mlps\.layer\.down_proj", "mlp.dense2"),
    )


@dataclass(frozen=True)
class PVTv2Config(VisionConfig):
    """Sizes of a PVT v2, which takes images of any size.

    Args:
        patch: stride of the first patches; patches of stride s have sides of 2 s - 1.
        dims, depths, heads: widths and numbers of blocks and heads of the stages; each stage halves
            the grid of the one before.
        sr_ratios: sides of the squares of patches that become one key.
        linear_attention: True to pool the keys to a grid of 7 x 7 instead, whatever the size of the
            image.
        mlp_ratios: inner widths of the MLPs over the width.
        qkv_bias: True for biases of queries, keys and values.
        drop_path_p: stochastic depth of the last block; grows linearly from 0 at the first.

    Reference:
        Wang et al., "PVT v2: Improved Baselines with Pyramid Vision Transformer", 2021, arXiv
        2106.13797.
    """

    architecture = "pvt-v2"
    hf = Counterpart(
        "PvtV2ForImageClassification",
        {name: HF_OPTIONS[name] for name in ("classes", "channels", "norm_eps", "init_std")}
        | {
            "dims": "hidden_sizes",
            "depths": "depths",
            "heads": "num_attention_heads",
            "sr_ratios": "sr_ratios",
            "linear_attention": "linear_attention",
            "mlp_ratios": "mlp_ratios",
            "qkv_bias": "qkv_bias",
            "drop_path_p": "drop_path_rate",
        },
        (),
        fixed={name: value for name, value in HF_FIXED.items() if name != "qkv_bias"},
        conversions=(
            Conversion(_strides_to_hf, _strides_from_hf),
            Conversion(_image_to_hf, _image_from_hf),
        ),
        layer_weights=_weights,
    )

    dims: tuple[Size, ...] = (32, 64)
    depths: tuple[Size, ...] = (2, 2)
    heads: tuple[Size, ...] = (1, 2)
    sr_ratios: tuple[Size, ...] = (2, 1)
    linear_attention: bool = False
    mlp_ratios: tuple[Size, ...] = (4, 4)
    qkv_bias: bool = True
    drop_path_p: Probability = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("depths", "heads", "sr_ratios", "mlp_ratios"):
            if len(value := getattr(self, name)) != len(self.dims):
                raise ValueError(
                    f"PVTv2Config: {name} must have one number for each stage, "
                    f"got {name}={value}, dims={self.dims}"
                )

    def attention_of(self, stage: int) -> SpatialReductionAttention.Config:
        """Returns the config of a stage's token mixers."""
        return SpatialReductionAttention.Config(
            self.dims[stage],
            self.heads[stage],
            self.sr_ratios[stage],
            self.qkv_bias,
            self.norm_eps,
            init_std=self.init_std,
            backend=self.backend,
            pool=_POOLED if self.linear_attention else 0,
        )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> PVTv2:
        return PVTv2(self, device=device, dtype=dtype)


def _convolved(layer: nn.Module, x: Tensor) -> Tensor:
    """Applies a convolution to tokens (B, h, w, dim)."""
    y: Tensor = layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    return y.contiguous()


class _ConvMLP(nn.Module):
    """MLP with a depthwise 3 x 3 convolution, whose padding tells the patches their places."""

    def __init__(self, c: PVTv2Config, dim: int, hidden: int, **factory: Any) -> None:
        super().__init__()
        self.linear_attention = c.linear_attention
        self.up_proj = Linear(c.linear(dim, hidden), **factory)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, **factory)
        self.down_proj = Linear(c.linear(hidden, dim), **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Maps a grid of tokens (B, h, w, dim) to the same shape."""
        x = self.up_proj(x)
        if self.linear_attention:
            x = x.relu()
        y: Tensor = self.down_proj(nn.functional.gelu(_convolved(self.dwconv, x)))
        return y


def _patches(n_in: int, dim: int, stride: int, **factory: Any) -> nn.Conv2d:
    return nn.Conv2d(n_in, dim, 2 * stride - 1, stride, stride - 1, **factory)


class _Stage(nn.Module):
    """A stage: overlapping patches of the grid before, blocks on the grid, and a norm."""

    def __init__(self, c: PVTv2Config, stage: int, rates: Sequence[float], **factory: Any) -> None:
        super().__init__()
        dim, norm = c.dims[stage], c.layer_norm(c.dims[stage])
        self.merge: nn.Conv2d | None = None
        if stage:
            self.merge = _patches(c.dims[stage - 1], dim, 2, **factory)
        self.embed_norm = LayerNorm(norm, **factory)
        self.attentions, self.mlps = nn.ModuleList(), nn.ModuleList()
        for rate in rates:
            residual = Residual.Config(norm, drop_path_p=rate)
            layer = SpatialReductionAttention(c.attention_of(stage), **factory)
            mlp = _ConvMLP(c, dim, dim * c.mlp_ratios[stage], **factory)
            self.attentions.append(Residual(layer, residual, **factory))
            self.mlps.append(Residual(mlp, residual, **factory))
        self.norm: LayerNorm | None = None  # the last stage has that of the model
        if stage < len(c.dims) - 1:
            self.norm = LayerNorm(norm, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Maps a grid of tokens to that of the stage (B, h, w, dim)."""
        if self.merge is not None:
            x = _convolved(self.merge, x)
        x = self.embed_norm(x)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = mlp(attention(x))
        return x if self.norm is None else self.norm(x)


class PVTv2(Classifier):
    """PVT v2: the head reads the mean of the last stage's normed patches.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Example:
        >>> model = PVTv2(PVTv2Config())
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
        >>> [m.shape for m in model.feature_maps(torch.zeros(2, 1, 8, 12))]
        [torch.Size([2, 32, 4, 6]), torch.Size([2, 64, 2, 3])]
    """

    config: PVTv2Config
    embed_patches: nn.Conv2d  # type: ignore[assignment]

    def __init__(
        self,
        config: PVTv2Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(config, config.dims[0], config.dims[-1], **factory)
        self.config = c = config
        self.embed_patches = _patches(c.channels, c.dims[0], c.patch, **factory)
        blocks = sum(c.depths)
        rates = [c.drop_path_p * i / max(1, blocks - 1) for i in range(blocks)]
        self.stages = nn.ModuleList()
        for stage, depth in enumerate(c.depths):
            own, rates = rates[:depth], rates[depth:]
            self.stages.append(_Stage(c, stage, own, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises convolutions from N(0, 2 / fan), fan = outputs of an input, as the release.

        A depthwise convolution has as many outputs of an input as its kernel is large.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
                nn.init.normal_(module.weight, std=(2 * module.groups / fan) ** 0.5)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def patches(self, images: Tensor) -> Tensor:
        """Maps images (B, C, H, W) to tokens (B, H / patch, W / patch, width)."""
        self._require_images(images)
        y: Tensor = self.embed_patches(images).permute(0, 2, 3, 1)
        return y.contiguous()

    def _stages(self, patches: Tensor) -> Iterator[Tensor]:
        """Yields the tokens after each stage; the last stage gives them before its norm."""
        x = patches
        for stage in self.stages:
            x = stage(x)
            yield x

    def _last(self, patches: Tensor) -> Tensor:
        """Returns the normed tokens (B, patches, dim) of the last stage."""
        *_, last = self._stages(patches)
        y: Tensor = self.norm(last.flatten(1, 2))
        return y

    def features(self, tokens: Tensor) -> Tensor:
        return self._last(tokens).mean(1)

    def forward_features(self, images: Tensor) -> Tensor:
        """Returns the normed tokens (B, patches, dim) of the last stage."""
        return self._last(self.patches(images))

    def feature_maps(
        self, images: Tensor, indices: Sequence[int] | None = None, *, norm: bool = False
    ) -> list[Tensor]:
        """Returns the maps of stages as (B, dim, height, width).

        Args:
            images: (B, channels, H, W).
            indices: stages, negative from the end; default: all.
            norm: True to norm the map of the last stage; the others end with norms of their own.
        """
        count, maps = len(self.stages), []
        wanted = chosen("PVTv2", indices, count)
        for index, x in enumerate(self._stages(self.patches(images))):
            if index in wanted:
                maps.append(as_map(self.norm(x) if norm and index == count - 1 else x))
        return maps
