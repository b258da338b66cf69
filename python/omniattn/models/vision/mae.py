"""Masked autoencoder: a ViT of few patches, and a decoder that restores the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from omniattn.checks.arguments import require_float, require_number, require_shape
from omniattn.models.hf import Counterpart
from omniattn.models.model import Model
from omniattn.models.vision.classifier import HF_FIXED, HF_WEIGHTS
from omniattn.models.vision.vit import (
    VIT_OPTIONS,
    ViT,
    ViTConfig,
    only_plain,
    require_options,
    set_sincos,
    vit_weights,
    without,
)
from omniattn.modules import DecoderBlock, LayerNorm, LearnedPositional, Linear
from omniattn.modules.base.fields import Size, SizeOrZero

#: Options of ViTConfig that the encoder must have.
_ENCODER: dict[str, Any] = {
    "classes": 0,
    "pool": "token",
    "positions": "sincos",
    "stem": (),
    "interpolate": None,
    "mask_token": False,
    "registers": 0,
}


@dataclass(frozen=True)
class MAEConfig(ViTConfig):
    """Sizes and options of a masked autoencoder.

    Args:
        dim, num_layers, num_heads: sizes of the encoder, as in ViTConfig, also its other options.
        decoder_dim, decoder_layers, decoder_heads: sizes of the decoder.
        mask_ratio: share of the patches that the encoder does not see.
        norm_pix: True for targets normed within each patch.

    Reference:
        He et al., "Masked Autoencoders Are Scalable Vision Learners", 2021, arXiv 2111.06377.
    """

    architecture = "mae"
    hf = Counterpart(
        "ViTMAEForPreTraining",
        {name: theirs for name, theirs in VIT_OPTIONS.items() if name != "classes"}
        | {
            "decoder_dim": "decoder_hidden_size",
            "decoder_layers": "decoder_num_hidden_layers",
            "decoder_heads": "decoder_num_attention_heads",
            "mask_ratio": "mask_ratio",
            "norm_pix": "norm_pix_loss",
        },
        (
            (r"^decoder_layers", "decoder.decoder_layers"),
            (r"^decoder_(embed|norm|pred)\.", r"decoder.decoder_\1."),
            (r"^decoder_positions\.weight", "decoder.decoder_pos_embed"),
            (r"^mask_token", "decoder.mask_token"),
            (r"^encoder\.", ""),
            *vit_weights("vit."),
            *HF_WEIGHTS,
        ),
        fixed=HF_FIXED
        | {
            "intermediate_size": lambda c: 4 * c.dim,
            "decoder_intermediate_size": lambda c: 4 * c.decoder_dim,
        },
        conversions=(only_plain(without() | _ENCODER),),
    )

    classes: SizeOrZero = 0
    positions: str = "sincos"
    decoder_dim: Size = 32
    decoder_layers: Size = 2
    decoder_heads: Size = 4
    mask_ratio: float = 0.75
    norm_pix: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("MAEConfig", "mask_ratio", self.mask_ratio, above=0, below=1)
        require_options(self, _ENCODER)
        if not 0 < self.kept < self.side**2:
            raise ValueError(
                "MAEConfig: mask_ratio must keep and mask at least one patch, "
                f"got mask_ratio={self.mask_ratio} of {self.side**2} patches"
            )

    @property
    def kept(self) -> int:
        """Number of patches that the encoder sees."""
        return int(self.side**2 * (1 - self.mask_ratio))

    def decoder_block(self) -> DecoderBlock.Config:
        """Returns the config of each layer of the decoder."""
        return DecoderBlock.Config(
            self.attention(self.decoder_dim, self.decoder_heads),
            self.mlp(self.decoder_dim, 4 * self.decoder_dim),
            self.layer_norm(self.decoder_dim),
        )

    def build(  # type: ignore[override]
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> MAE:
        return MAE(self, device=device, dtype=dtype)


class MAEOutput(NamedTuple):
    """Results of a masked autoencoder.

    Args:
        logits: predicted pixels (B, patches, patch^2 channels) of all patches, by rows, columns and
            channels of a patch.
        mask: True for masked patches (B, patches).
    """

    logits: Tensor
    mask: Tensor


class MAE(Model):
    """Masked autoencoder: loss = mean squared error of the masked patches' pixels.

    The encoder reads the class token and the kept patches. The decoder gets its output, a shared
    token for each masked patch, and positions.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        images (B, channels, image, image), noise (B, patches) -> (loss, outputs). The patches with
        the smallest noise are kept; by default torch's generator draws it.

    Example:
        >>> loss, outputs = MAE(MAEConfig())(torch.rand(2, 1, 8, 8))
        >>> outputs.logits.shape, outputs.mask.sum(-1)
        (torch.Size([2, 16, 4]), tensor([12, 12]))
    """

    config: MAEConfig

    def __init__(
        self,
        config: MAEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = c = config
        self.encoder = ViT(c, **factory)
        self.decoder_embed = Linear(c.linear(c.dim, c.decoder_dim), **factory)
        self.mask_token = nn.Parameter(torch.empty(c.decoder_dim, **factory))
        positions = LearnedPositional.Config(1 + c.side**2, c.decoder_dim, c.init_std)
        self.decoder_positions = LearnedPositional(positions, **factory)
        self.decoder_positions.weight.requires_grad_(False)
        block = c.decoder_block()
        self.decoder_layers = nn.ModuleList(
            DecoderBlock(block, **factory) for _ in range(c.decoder_layers)
        )
        self.decoder_norm = LayerNorm(c.layer_norm(c.decoder_dim), **factory)
        self.decoder_pred = Linear(c.linear(c.decoder_dim, c.patch**2 * c.channels), **factory)
        for module in self.modules():
            if isinstance(module, Linear):
                module.drawn_outside = True
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws linear layers as Xavier and Glorot, and the mask token from N(0, init_std^2)."""
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.mask_token, std=self.config.init_std)
        set_sincos(self.decoder_positions, self.config.side, 1)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> tuple[Tensor, MAEOutput]:
        """Returns the loss and the outputs; see the class."""
        c, op = self.config, "MAE"
        tokens = self.encoder.embed(self.encoder.patches(images))
        shape = (len(images), c.side**2)
        if noise is None:
            noise = torch.rand(shape, device=images.device)
        require_float(op, "noise", noise)
        require_shape(op, "noise", noise, shape)
        order = noise.argsort(dim=1, stable=True)
        rank = order.argsort(1)
        kept = order[:, : c.kept, None].expand(-1, -1, c.dim)
        seen = torch.cat([tokens[:, :1], tokens[:, 1:].gather(1, kept)], 1)
        logits = self._decoded(self.encoder.encode(seen), rank)
        mask = rank >= c.kept
        errors = (logits - self.targets(images)).square().mean(-1)
        loss = (errors * mask).sum() / mask.sum()
        return loss, MAEOutput(logits, mask)

    def _decoded(self, encoded: Tensor, rank: Tensor) -> Tensor:
        """Returns the pixels (B, patches, pixels) from the tokens of the encoder."""
        c, x = self.config, self.decoder_embed(encoded)
        masks = self.mask_token.to(x.dtype).expand(len(x), rank.shape[1] - c.kept, -1)
        patches = torch.cat([x[:, 1:], masks], 1)
        patches = patches.gather(1, rank[..., None].expand(-1, -1, c.decoder_dim))
        x, residual = self.decoder_positions(torch.cat([x[:, :1], patches], 1)), None
        for layer in self.decoder_layers:
            x, residual = layer(x, residual)
        x = x[:, 1:] if residual is None else x[:, 1:] + residual[:, 1:]
        y: Tensor = self.decoder_pred(self.decoder_norm(x))
        return y

    @torch.no_grad()
    def targets(self, images: Tensor) -> Tensor:
        """Returns the pixels (B, patches, patch^2 channels) that `logits` should equal."""
        pixels = self._pixels(images)
        if self.config.norm_pix:
            mean, deviation = _scale(pixels)
            pixels = (pixels - mean) / deviation
        return pixels

    def _pixels(self, images: Tensor) -> Tensor:
        """Maps images to their patches' pixels, by rows, columns and channels of a patch."""
        p = self.config.patch
        split = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # (B, C, rows, p, columns, p)
        return split.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    @torch.no_grad()
    def restored(self, images: Tensor, outputs: MAEOutput) -> Tensor:
        """Returns the images with their masked patches replaced by the predicted ones."""
        c, pixels = self.config, outputs.logits
        if c.norm_pix:
            mean, deviation = _scale(self._pixels(images))
            pixels = pixels * deviation + mean
        grid = pixels.unflatten(1, (c.side, c.side)).unflatten(-1, (c.patch, c.patch, -1))
        whole = grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        mask = outputs.mask.unflatten(1, (c.side, c.side))[:, None]
        mask = mask.repeat_interleave(c.patch, 2).repeat_interleave(c.patch, 3)
        return torch.where(mask, whole.to(images.dtype), images)


def _scale(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean and the deviation of each patch, from the unbiased variance."""
    variance, mean = torch.var_mean(pixels, -1, keepdim=True)
    return mean, (variance + 1e-6).sqrt()
