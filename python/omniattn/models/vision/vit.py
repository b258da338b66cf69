"""Vision Transformer, and the options of its descendants: DeiT, CLIP, DINO, DINOv2, MAE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_choice, shown
from omniattn.models.hf import Conversion, Counterpart
from omniattn.models.vision.classifier import (
    HF_FIXED,
    HF_OPTIONS,
    HF_WEIGHTS,
    Classifier,
    VisionConfig,
    as_map,
    chosen,
)
from omniattn.models.vision.stem import ConvStem
from omniattn.modules import MLP, DecoderBlock, GatedMLP, LayerNorm, LearnedPositional, Linear
from omniattn.modules.base.fields import Positive, Probability, Size, SizeOrZero

#: Options of ViTConfig that transformers' ViT lacks.
_PLAIN: dict[str, Any] = {
    "pool": "token",
    "stem": (),
    "positions": "learned",
    "interpolate": None,
    "patch_bias": True,
    "pre_norm": False,
    "mask_token": False,
    "registers": 0,
    "layer_scale": None,
    "gated": False,
    "drop_path_p": 0.0,
}


def only_plain(options: Mapping[str, Any]) -> Conversion:
    """Returns a conversion that refuses other values of these options of ours."""

    def to_hf(ours: Any) -> dict[str, Any]:
        for name, plain in options.items():
            if (value := getattr(ours, name)) != plain:
                raise NotImplementedError(
                    f"{type(ours).__name__}: {name} must be {plain!r} in transformers, "
                    f"got {name}={shown(value)}"
                )
        return {}

    return Conversion(to_hf, lambda _: dict(options))


def without(*names: str) -> dict[str, Any]:
    """Returns the options that transformers' ViT lacks, except these."""
    return {name: value for name, value in _PLAIN.items() if name not in names}


def require_options(config: Any, fixed: Mapping[str, Any]) -> None:
    """Raises ValueError unless the options of a config have these values."""
    for name, wanted in fixed.items():
        if (value := getattr(config, name)) != wanted:
            raise ValueError(
                f"{type(config).__name__}: {name} must be {wanted!r}, got {name}={shown(value)}"
            )


#: Our option -> theirs, for all transformers' models with a single ViT.
VIT_OPTIONS = HF_OPTIONS | {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}


def vit_weights(trunk: str, layers: str = "layers") -> tuple[tuple[str, str], ...]:
    """Returns the renames of a ViT's weights to those below `trunk` of transformers' model."""
    return (
        (r"^class_token", f"{trunk}embeddings.cls_token"),
        (r"^distillation_token", f"{trunk}embeddings.distillation_token"),
        (r"^mask_token", f"{trunk}embeddings.mask_token"),
        (r"^registers", f"{trunk}embeddings.register_tokens"),
        (r"^embed_positions.weight", f"{trunk}embeddings.position_embeddings"),
        (r"^embed_patches", f"{trunk}embeddings.patch_embeddings.projection"),
        (r"^norm", f"{trunk}layernorm"),
        (r"^layers", f"{trunk}{layers}"),
        (r"mixer_scale\.weight", "layer_scale1.lambda1"),
        (r"mlp_scale\.weight", "layer_scale2.lambda1"),
        (r"mixer", "attention"),
    )


@dataclass(frozen=True)
class ViTConfig(VisionConfig):
    """Sizes and options of a ViT.

    Args:
        dim, num_layers, num_heads: sizes; the feed-forward layers are 4 dim wide.
        pool: input of the head: "token", a class token before the patches; "mean" of the patches,
            without a class token; or "token_mean", both one after the other (DINOv2).
        stem: widths of 3 x 3 convolutions of stride 2 with BatchNorm and ReLU before a 1 x 1
            convolution, in place of the patch projection; 2^len(stem) must be `patch`.
        positions: "learned", or "sincos" for fixed sin-cos positions (MAE).
        interpolate: None if all images must have the size `image`; "bicubic" to interpolate the
            positions for other sizes (DINO), or "antialias" to filter them too where the grid
            shrinks (DINOv2 with registers).
        patch_bias: True for a bias of the patch projection.
        pre_norm: True for a norm before the first block (CLIP).
        mask_token: True for a token that replaces masked patches (iBOT).
        registers: number of further tokens without positions.
        layer_scale: initial factor of each branch's output per channel, None for no factors.
        gated: True for SwiGLU of two thirds of the width, rounded up to a multiple of 8 (DINOv2).
        drop_path_p: stochastic depth of the last block; grows linearly from 0 at the first.

    Reference:
        Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, arXiv 2010.11929; mean: Beyer,
        Zhai, Kolesnikov, "Better plain ViT baselines for ImageNet-1k", 2022, arXiv 2205.01580;
        stem: Xiao et al., "Early Convolutions Help Transformers See Better", 2021, arXiv
        2106.14881; registers: Darcet et al., "Vision Transformers Need Registers", 2023, arXiv
        2309.16588; factors: Touvron et al., "Going deeper with Image Transformers", 2021, arXiv
        2103.17239.
    """

    architecture = "vit"
    hf: ClassVar[Counterpart | None] = Counterpart(
        "ViTForImageClassification",
        VIT_OPTIONS,
        (*vit_weights("vit."), *HF_WEIGHTS),
        fixed=HF_FIXED | {"intermediate_size": lambda c: 4 * c.dim},
        conversions=(only_plain(_PLAIN),),
    )
    #: True for a distillation token after the class token.
    distilled: ClassVar[bool] = False
    #: Activation of MLPs that are not gated.
    activation: ClassVar[str] = "gelu"

    dim: Size = 64
    num_layers: Size = 4
    num_heads: Size = 4
    pool: str = "token"
    stem: tuple[Size, ...] = ()
    positions: str = "learned"
    interpolate: str | None = None
    patch_bias: bool = True
    pre_norm: bool = False
    mask_token: bool = False
    registers: SizeOrZero = 0
    layer_scale: Positive | None = None
    gated: bool = False
    drop_path_p: Probability = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        op = type(self).__name__
        require_choice(op, "pool", self.pool, ("token", "mean", "token_mean"))
        require_choice(op, "positions", self.positions, ("learned", "sincos"))
        if self.interpolate is not None:
            require_choice(op, "interpolate", self.interpolate, ("bicubic", "antialias"))
        if self.image % self.patch:
            raise ValueError(
                f"{op}: image must be a multiple of patch, "
                f"got image={self.image}, patch={self.patch}"
            )
        if self.stem and 2 ** len(self.stem) != self.patch:
            raise ValueError(
                f"{op}: stem must have log2(patch) convolutions of stride 2, "
                f"got stem={self.stem}, patch={self.patch}"
            )

    @property
    def side(self) -> int:
        """Number of patches along a side of the image."""
        return self.image // self.patch

    @property
    def placed(self) -> int:
        """Number of tokens with positions before the patches."""
        return (self.pool != "mean") + self.distilled

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return self.placed + self.registers

    @property
    def token_std(self) -> float:
        """Standard deviation of the class token and the registers."""
        return self.init_std

    def feed_forward(self) -> MLP.Config:
        """Returns the config of each layer's channel mixer."""
        hidden = 4 * self.dim
        if self.gated:
            wide = (2 * hidden // 3 + 7) // 8 * 8
            return GatedMLP.Config(self.dim, wide, bias=True, **self.common)
        return MLP.Config(self.dim, hidden, self.activation, **self.common)

    def block(self, layer: int) -> DecoderBlock.Config:
        """Returns the config of a layer, counted from 0."""
        return DecoderBlock.Config(
            self.attention(self.dim, self.num_heads),
            self.feed_forward(),
            self.layer_norm(self.dim),
            drop_path_p=self.drop_path_p * layer / max(1, self.num_layers - 1),
            layer_scale=self.layer_scale,
        )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Classifier:
        return ViT(self, device=device, dtype=dtype)


class ViT(Classifier):
    """Vision Transformer: [class token; patches] + positions, pre-norm blocks, head.

    The head reads the class token, or with `pool="mean"` the mean of the normed patches.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Example:
        >>> model = ViT(ViTConfig())
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
        >>> model.forward_features(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 17, 64])
        >>> [m.shape for m in model.feature_maps(torch.zeros(2, 1, 8, 8), [-1])]
        [torch.Size([2, 64, 4, 4])]
    """

    #: Parameters without weight decay, besides vectors.
    undecayed = ("registers",)
    config: ViTConfig
    embed_patches: Linear | ConvStem  # type: ignore[assignment]

    def __init__(
        self,
        config: ViTConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        features = config.dim * (1 + (config.pool == "token_mean"))
        super().__init__(config, config.dim, features, config.dim, **factory)
        self.config = c = config
        if c.stem:
            self.embed_patches = ConvStem(c.channels, c.stem, c.dim, **factory)
        elif not c.patch_bias:
            patch = Linear.Config(c.channels * c.patch**2, c.dim, False, c.init_std, c.backend)
            self.embed_patches = Linear(patch, **factory)

        def token(wanted: object, *rows: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(*rows, c.dim, **factory)) if wanted else None

        self.class_token = token(c.pool != "mean")
        self.distillation_token = token(c.distilled)
        self.registers = token(c.registers, c.registers)
        self.mask_token = token(c.mask_token)
        positions = LearnedPositional.Config(c.placed + c.side**2, c.dim, c.init_std)
        self.embed_positions = LearnedPositional(positions, **factory)
        self.embed_positions.weight.requires_grad_(c.positions == "learned")
        self.pre_norm = LayerNorm(c.layer_norm(c.dim), **factory) if c.pre_norm else None
        self.layers = nn.ModuleList(
            DecoderBlock(c.block(layer), **factory) for layer in range(c.num_layers)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the tokens before the patches from N(0, init_std^2), the mask token with 0.

        Positions of the kind "sincos" get their table.
        """
        c = self.config
        for token in (self.class_token, self.distillation_token, self.registers):
            if token is not None:
                nn.init.normal_(token, std=c.token_std)
        if self.mask_token is not None:
            nn.init.zeros_(self.mask_token)
        if c.positions == "sincos":
            set_sincos(self.embed_positions, c.side, c.placed)

    def embed(self, patches: Tensor, masked: Tensor | None = None) -> Tensor:
        """Maps patches (B, h, w, dim) to tokens with positions (B, prefix + h w, dim).

        masked: bool (B, h w), True for patches that the mask token replaces.
        """
        c, rows, columns = self.config, *patches.shape[1:3]
        if c.interpolate is None and (rows, columns) != (c.side, c.side):
            raise ValueError(
                f"{type(self).__name__}: images must have {c.side} x {c.side} patches, "
                f"a position for each, got {rows} x {columns}"
            )
        x = patches.flatten(1, 2)
        if masked is not None:
            x = torch.where(masked[..., None], self._mask(masked, x).to(x.dtype), x)
        given = (self.class_token, self.distillation_token)
        first: list[Tensor] = [token for token in given if token is not None]
        if first:
            tokens = torch.stack(first).to(x.dtype)
            x = torch.cat([tokens.expand(len(x), -1, -1), x], 1)
        x = self._placed(x, rows, columns)
        if self.registers is not None:
            registers = self.registers.to(x.dtype).expand(len(x), -1, -1)
            x = torch.cat([x[:, : c.placed], registers, x[:, c.placed :]], 1)
        return x

    def _mask(self, masked: Tensor, x: Tensor) -> Tensor:
        op = type(self).__name__
        if self.mask_token is None:
            raise ValueError(f"{op}: masked needs mask_token=True in the config, got False")
        if masked.dtype != torch.bool or masked.shape != x.shape[:2]:
            raise ValueError(
                f"{op}: masked must be bool of shape {tuple(x.shape[:2])}, "
                f"got masked.dtype={masked.dtype}, masked.shape={tuple(masked.shape)}"
            )
        return self.mask_token

    def _placed(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Adds the positions, interpolated for another grid."""
        c = self.config
        if (rows, columns) == (c.side, c.side):
            y: Tensor = self.embed_positions(x)
            return y
        table = functional.interpolate_grid(
            self.embed_positions.weight,
            (c.side, c.side),
            (rows, columns),
            prefix=c.placed,
            antialias=c.interpolate == "antialias",
        )
        return x + table.to(x.dtype)

    def blocks(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields (x, residual), whose sum are the tokens, after each block."""
        residual = None
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        for layer in self.layers:
            x, residual = layer(x, residual)
            yield x, residual

    def encode(self, x: Tensor, tokens: slice | None = None) -> Tensor:
        """Runs the blocks and the norm on tokens (B, T, dim); returns those of `tokens`."""
        residual: Tensor | None = None
        for state in self.blocks(x):
            x, residual = state
        if tokens is not None:
            x, residual = x[:, tokens], None if residual is None else residual[:, tokens]
        y: Tensor = self.norm(x if residual is None else x + residual)
        return y

    def features(self, tokens: Tensor) -> Tensor:
        c, x = self.config, self.embed(tokens)
        if c.pool == "token":
            return self.encode(x, slice(0, 1))[:, 0]
        y = self.encode(x)
        mean = y[:, c.prefix :].mean(1)
        return mean if c.pool == "mean" else torch.cat([y[:, 0], mean], -1)

    def forward_features(self, images: Tensor, masked: Tensor | None = None) -> Tensor:
        """Returns all normed tokens (B, prefix + patches, dim).

        Args:
            images: (B, channels, H, W).
            masked: bool (B, patches), True for patches that the mask token replaces.
        """
        return self.encode(self.embed(self.patches(images), masked))

    def feature_maps(
        self, images: Tensor, indices: Sequence[int] | None = None, *, norm: bool = False
    ) -> list[Tensor]:
        """Returns the patches after blocks as maps (B, dim, H / patch, W / patch).

        Args:
            images: (B, channels, H, W).
            indices: blocks, negative from the end; default: all.
            norm: True to apply the last norm to each map.
        """
        c, patches, maps = self.config, self.patches(images), []
        wanted = chosen(type(self).__name__, indices, len(self.layers))
        for index, (x, residual) in enumerate(self.blocks(self.embed(patches))):
            if index in wanted:
                y = x if residual is None else x + residual
                y = self.norm(y) if norm else y
                maps.append(as_map(y[:, c.prefix :].unflatten(1, patches.shape[1:3])))
        return maps

    def patches(self, images: Tensor) -> Tensor:
        """Maps images (B, C, H, W) to tokens (B, H / patch, W / patch, dim)."""
        if not self.config.stem:
            return super().patches(images)
        self._require_images(images)
        tokens: Tensor = self.embed_patches(images)
        return tokens


@torch.no_grad()
def set_sincos(table: LearnedPositional, side: int, prefix: int) -> None:
    """Fills a table with the fixed positions of a square grid after `prefix` tokens."""
    table.drawn_outside = True
    weight = table.weight
    exact = functional.sincos_2d(weight.shape[1], side, side, prefix=prefix, device=weight.device)
    weight.copy_(exact)
