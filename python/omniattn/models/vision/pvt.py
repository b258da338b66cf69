"""Pyramid Vision Transformer: stages whose keys are reduced, and a class token in the last."""

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
from omniattn.modules import (
    MLP,
    LayerNorm,
    LearnedPositional,
    Linear,
    Residual,
    SpatialReductionAttention,
)
from omniattn.modules.base.fields import Probability, Size


def _patch_sizes(ours: PVTConfig) -> dict[str, Any]:
    sizes = [ours.patch, *(2 for _ in ours.dims[1:])]
    return {"patch_sizes": sizes, "strides": sizes, "num_encoder_blocks": len(sizes)}


def _patch(theirs: Any) -> dict[str, Any]:
    sizes = list(theirs.patch_sizes)
    if sizes[1:] != [2] * (len(theirs.hidden_sizes) - 1) or list(theirs.strides) != sizes:
        raise NotImplementedError(
            "PVTConfig: patch_sizes must be 2 after the first stage, and strides the same, "
            f"got patch_sizes={theirs.patch_sizes}, strides={theirs.strides}"
        )
    return {"patch": sizes[0]}


def _weights(ours: PVTConfig) -> tuple[tuple[str, str], ...]:
    last = len(ours.dims) - 1
    return (
        (r"^class_token", f"pvt.encoder.patch_embeddings.{last}.cls_token"),
        (r"^embed_patches", "pvt.encoder.patch_embeddings.0.projection"),
        (r"^norm", "pvt.encoder.layer_norm"),
        (r"^head", "classifier"),
        (r"^stages\.(\d+)\.merge", r"pvt.encoder.patch_embeddings.\1.projection"),
        (r"^stages\.(\d+)\.embed_norm", r"pvt.encoder.patch_embeddings.\1.layer_norm"),
        (
            r"^stages\.(\d+)\.embed_positions\.weight",
            r"pvt.encoder.patch_embeddings.\1.position_embeddings",
        ),
        (r"^stages\.(\d+)\.(attentions|mlps)\.(\d+)", r"pvt.encoder.block.\1.\3.\2"),
        (r"attentions\.norm", "layer_norm_1"),
        (r"mlps\.norm", "layer_norm_2"),
        (r"attentions\.layer\.q\b", "attention.self.query"),
        (r"attentions\.layer\.kv", "attention.self.{key,value}"),
        (r"attentions\.layer\.sr", "attention.self.sequence_reduction"),
        (r"attentions\.layer\.norm", "attention.self.layer_norm"),
        (r"attentions\.layer\.proj", "attention.output.dense"),
        (r"mlps\.layer\.up_proj", "mlp.dense1"),
        (r"mlps\.layer\.down_proj", "mlp.dense2"),
    )


@dataclass(frozen=True)
class PVTConfig(VisionConfig):
    """Sizes of a Pyramid Vision Transformer.

    Args:
        dims, depths, heads: widths and numbers of blocks and heads of the stages; each stage halves
            the grid of the one before.
        sr_ratios: sides of the squares of patches that become one key, 1 in the last stage.
        mlp_ratios: inner widths of the MLPs over the width.
        qkv_bias: True for biases of queries, keys and values.
        drop_path_p: stochastic depth of the last block; grows linearly from 0 at the first.

    Reference:
        Wang et al., "Pyramid Vision Transformer", 2021, arXiv 2102.12122.
    """

    architecture = "pvt"
    hf = Counterpart(
        "PvtForImageClassification",
        {name: theirs for name, theirs in HF_OPTIONS.items() if name != "patch"}
        | {
            "dims": "hidden_sizes",
            "depths": "depths",
            "heads": "num_attention_heads",
            "sr_ratios": "sequence_reduction_ratios",
            "mlp_ratios": "mlp_ratios",
            "qkv_bias": "qkv_bias",
            "drop_path_p": "drop_path_rate",
        },
        (),
        fixed={name: value for name, value in HF_FIXED.items() if name != "qkv_bias"},
        conversions=(Conversion(_patch_sizes, _patch),),
        layer_weights=_weights,
    )

    dims: tuple[Size, ...] = (32, 64)
    depths: tuple[Size, ...] = (2, 2)
    heads: tuple[Size, ...] = (1, 2)
    sr_ratios: tuple[Size, ...] = (2, 1)
    mlp_ratios: tuple[Size, ...] = (4, 4)
    qkv_bias: bool = True
    drop_path_p: Probability = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("depths", "heads", "sr_ratios", "mlp_ratios"):
            if len(value := getattr(self, name)) != len(self.dims):
                raise ValueError(
                    f"PVTConfig: {name} must have one number for each stage, "
                    f"got {name}={value}, dims={self.dims}"
                )
        if self.sr_ratios[-1] != 1:
            raise ValueError(
                "PVTConfig: sr_ratios must end with 1, as the class token is no patch, "
                f"got sr_ratios={self.sr_ratios}"
            )
        if self.image % (self.patch * 2 ** (len(self.dims) - 1)):
            raise ValueError(
                "PVTConfig: image must be a multiple of patch * 2^(stages - 1), "
                f"got image={self.image}, patch={self.patch}, dims={self.dims}"
            )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> PVT:
        return PVT(self, device=device, dtype=dtype)


class _Stage(nn.Module):
    """A stage: norm of the patches, positions, and blocks on the grid."""

    def __init__(self, c: PVTConfig, stage: int, rates: Sequence[float], **factory: Any) -> None:
        super().__init__()
        dim, side = c.dims[stage], c.image // c.patch // 2**stage
        last = stage == len(c.dims) - 1
        norm = c.layer_norm(dim)
        self.merge: Linear | None = None
        if stage:
            self.merge = Linear(c.linear(4 * c.dims[stage - 1], dim), **factory)
        self.embed_norm = LayerNorm(norm, **factory)
        positions = LearnedPositional.Config(side**2 + last, dim, c.init_std)
        self.embed_positions = LearnedPositional(positions, **factory)
        attention = SpatialReductionAttention.Config(
            dim,
            c.heads[stage],
            c.sr_ratios[stage],
            c.qkv_bias,
            c.norm_eps,
            init_std=c.init_std,
            backend=c.backend,
        )
        mlp = c.mlp(dim, dim * c.mlp_ratios[stage])
        self.attentions, self.mlps = nn.ModuleList(), nn.ModuleList()
        for rate in rates:
            residual = Residual.Config(norm, drop_path_p=rate)
            layer = SpatialReductionAttention(attention, **factory)
            self.attentions.append(Residual(layer, residual, **factory))
            self.mlps.append(Residual(MLP(mlp, **factory), residual, **factory))

    def forward(self, patches: Tensor, class_token: Tensor | None) -> Tensor:
        """Maps a grid of tokens to the stage's (B, h, w, dim), or to (B, 1, 1 + h w, dim)."""
        if self.merge is not None:  # 2 x 2 tokens, by channel first as in a convolution
            patches = patches.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
            patches = self.merge(patches.permute(0, 1, 3, 5, 2, 4).flatten(3))
        rows, columns = patches.shape[1:3]
        x = self.embed_norm(patches).flatten(1, 2)
        if class_token is not None:
            x = torch.cat([class_token.to(x.dtype).expand(len(x), 1, -1), x], 1)
        x = self.embed_positions(x)
        x = x.unflatten(1, (rows, columns) if class_token is None else (1, -1))
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = mlp(attention(x))
        return x


class PVT(Classifier):
    """Pyramid Vision Transformer: stages of spatial-reduction attention; the head reads a token.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Example:
        >>> model = PVT(PVTConfig())
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
        >>> [m.shape for m in model.feature_maps(torch.zeros(2, 1, 8, 8))]
        [torch.Size([2, 32, 4, 4]), torch.Size([2, 64, 2, 2])]
    """

    config: PVTConfig

    def __init__(
        self,
        config: PVTConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, config.dims[0], config.dims[-1], device=device, dtype=dtype)
        self.config = c = config
        self.class_token = nn.Parameter(torch.empty(c.dims[-1], device=device, dtype=dtype))
        blocks = sum(c.depths)
        rates = [c.drop_path_p * i / max(1, blocks - 1) for i in range(blocks)]
        self.stages = nn.ModuleList()
        for stage, depth in enumerate(c.depths):
            own, rates = rates[:depth], rates[depth:]
            self.stages.append(_Stage(c, stage, own, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the class token from N(0, init_std^2)."""
        nn.init.normal_(self.class_token, std=self.config.init_std)

    def _stages(self, patches: Tensor) -> Iterator[Tensor]:
        """Yields the tokens after each stage; those of the last begin with the class token."""
        side = self.config.image // self.config.patch
        if patches.shape[1:3] != (side, side):
            raise ValueError(
                f"PVT: images must have {side} x {side} patches, a position for each, "
                f"got {patches.shape[1]} x {patches.shape[2]}"
            )
        x = patches
        for index, stage in enumerate(self.stages):
            x = stage(x, self.class_token if index == len(self.stages) - 1 else None)
            yield x

    def _last(self, patches: Tensor) -> Tensor:
        for x in self._stages(patches):
            last = x
        return last[:, 0]

    def features(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.norm(self._last(tokens)[:, 0])
        return y

    def forward_features(self, images: Tensor) -> Tensor:
        """Returns the normed tokens (B, 1 + patches, dim) of the last stage."""
        y: Tensor = self.norm(self._last(self.patches(images)))
        return y

    def feature_maps(
        self, images: Tensor, indices: Sequence[int] | None = None, *, norm: bool = False
    ) -> list[Tensor]:
        """Returns the maps of stages as (B, dim, height, width).

        Args:
            images: (B, channels, H, W).
            indices: stages, negative from the end; default: all.
            norm: True to norm the map of the last stage.
        """
        count, patches, maps = len(self.stages), self.patches(images), []
        wanted = chosen("PVT", indices, count)
        side = patches.shape[1] // 2 ** (count - 1)
        for index, x in enumerate(self._stages(patches)):
            if index == count - 1:
                x = x[:, 0, 1:].unflatten(1, (side, side))
                x = self.norm(x) if norm else x
            if index in wanted:
                maps.append(as_map(x))
        return maps
