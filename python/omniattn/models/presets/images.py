"""Published sizes of the models of images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omniattn.models.model import ModelConfig
from omniattn.models.vision import (
    CLIPConfig,
    DeiTConfig,
    DINOFeaturesConfig,
    Dinov2Config,
    Dinov2RegistersConfig,
    MAEConfig,
    PVTConfig,
    PVTv2Config,
    SwinConfig,
    ViTConfig,
)

_IMAGES: dict[str, Any] = {"classes": 1000, "channels": 3, "image": 224}
_TINY: dict[str, Any] = {"dim": 192, "num_layers": 12, "num_heads": 3}
_SMALL: dict[str, Any] = {"dim": 384, "num_layers": 12, "num_heads": 6}
_BASE: dict[str, Any] = {"dim": 768, "num_layers": 12, "num_heads": 12}
_LARGE: dict[str, Any] = {"dim": 1024, "num_layers": 24, "num_heads": 16}
_HUGE: dict[str, Any] = {"dim": 1280, "num_layers": 32, "num_heads": 16}
_GIANT: dict[str, Any] = {"dim": 1536, "num_layers": 40, "num_heads": 24, "gated": True}

_VIT = ViTConfig(**_IMAGES, **_BASE, patch=16)
_DEIT = DeiTConfig(**_IMAGES, **_BASE, patch=16)
_DINO = DINOFeaturesConfig(channels=3, image=224, **_BASE, patch=16)
_MAE = MAEConfig(
    **_BASE, channels=3, image=224, patch=16, decoder_dim=512, decoder_layers=8, decoder_heads=16
)
_CLIP = CLIPConfig(
    **_BASE,
    channels=3,
    image=224,
    patch=32,
    vocab_size=49408,
    context=77,
    text_dim=512,
    text_layers=12,
    text_heads=8,
    projection_dim=512,
)
_CLIP_LARGE = replace(_CLIP, **_LARGE, patch=14, text_dim=768, text_heads=12, projection_dim=768)
_DINOV2: dict[str, Any] = {"channels": 3, "image": 518, "patch": 14}
_SWIN = SwinConfig(
    **_IMAGES,
    patch=4,
    dim=96,
    depths=(2, 2, 6, 2),
    heads=(3, 6, 12, 24),
    window=7,
    drop_path_p=0.2,
)
_PVT = PVTConfig(
    **_IMAGES,
    patch=4,
    dims=(64, 128, 320, 512),
    depths=(2, 2, 2, 2),
    heads=(1, 2, 5, 8),
    sr_ratios=(8, 4, 2, 1),
    mlp_ratios=(8, 8, 4, 4),
)
_PVT_V2 = PVTv2Config(
    **_IMAGES,
    patch=4,
    dims=(64, 128, 320, 512),
    depths=(2, 2, 2, 2),
    heads=(1, 2, 5, 8),
    sr_ratios=(8, 4, 2, 1),
    mlp_ratios=(8, 8, 4, 4),
    norm_eps=1e-6,
)
_DINOV2_SIZES = {"small": _SMALL, "base": _BASE, "large": _LARGE, "giant": _GIANT}

IMAGES: dict[str, ModelConfig] = {
    "vit-s-16": replace(_VIT, **_SMALL),
    "vit-b-16": _VIT,
    "vit-b-32": replace(_VIT, patch=32),
    "vit-l-16": replace(_VIT, **_LARGE),
    "vit-l-32": replace(_VIT, **_LARGE, patch=32),
    "vit-h-14": replace(_VIT, **_HUGE, patch=14),
    "deit-tiny": replace(_VIT, **_TINY),
    "deit-small": replace(_VIT, **_SMALL),
    "deit-base": _VIT,
    "deit-tiny-distilled": replace(_DEIT, **_TINY),
    "deit-small-distilled": replace(_DEIT, **_SMALL),
    "deit-base-distilled": _DEIT,
    "vit-mae-base": _MAE,
    "vit-mae-large": replace(_MAE, **_LARGE),
    "vit-mae-huge": replace(_MAE, **_HUGE, patch=14),
    "clip-vit-b-32": _CLIP,
    "clip-vit-b-16": replace(_CLIP, patch=16),
    "clip-vit-l-14": _CLIP_LARGE,
    "clip-vit-l-14-336": replace(_CLIP_LARGE, image=336),
    "dino-vits16": replace(_DINO, **_SMALL),
    "dino-vits8": replace(_DINO, **_SMALL, patch=8),
    "dino-vitb16": _DINO,
    "dino-vitb8": replace(_DINO, patch=8),
    **{f"dinov2-{name}": Dinov2Config(**_DINOV2, **size) for name, size in _DINOV2_SIZES.items()},
    **{
        f"dinov2-{name}-registers": Dinov2RegistersConfig(**_DINOV2, **size)
        for name, size in _DINOV2_SIZES.items()
    },
    "swin-t": _SWIN,
    "swin-s": replace(_SWIN, depths=(2, 2, 18, 2), drop_path_p=0.3),
    "swin-b": replace(_SWIN, dim=128, depths=(2, 2, 18, 2), heads=(4, 8, 16, 32), drop_path_p=0.5),
    "pvt-tiny": _PVT,
    "pvt-small": replace(_PVT, depths=(3, 4, 6, 3)),
    "pvt-medium": replace(_PVT, depths=(3, 4, 18, 3)),
    "pvt-large": replace(_PVT, depths=(3, 8, 27, 3)),
    "pvt-v2-b0": replace(_PVT_V2, dims=(32, 64, 160, 256)),
    "pvt-v2-b1": _PVT_V2,
    "pvt-v2-b2": replace(_PVT_V2, depths=(3, 4, 6, 3)),
    "pvt-v2-b2-linear": replace(_PVT_V2, depths=(3, 4, 6, 3), linear_attention=True),
    "pvt-v2-b3": replace(_PVT_V2, depths=(3, 4, 18, 3)),
    "pvt-v2-b4": replace(_PVT_V2, depths=(3, 8, 27, 3)),
    "pvt-v2-b5": replace(_PVT_V2, depths=(3, 6, 40, 3), mlp_ratios=(4, 4, 4, 4)),
}
