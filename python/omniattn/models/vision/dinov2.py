"""DINOv2: ViTs with factors per channel, registers and, in the largest, gated MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omniattn.models.hf import Counterpart
from omniattn.models.vision.classifier import HF_FIXED
from omniattn.models.vision.vit import VIT_OPTIONS, ViTConfig, only_plain, vit_weights, without
from omniattn.modules.base.fields import Positive, SizeOrZero

_OPTIONS = VIT_OPTIONS | {"layer_scale": "layerscale_value", "gated": "use_swiglu_ffn"}
_SAME = ("layer_scale", "gated")
_WEIGHTS = (
    (r"input_layernorm", "norm1"),
    (r"post_attention_layernorm", "norm2"),
    (r"^head", "classifier"),
)


def _mlp_weights(ours: Dinov2Config) -> tuple[tuple[str, str], ...]:
    return () if ours.gated else ((r"up_proj", "fc1"), (r"down_proj", "fc2"))


def _counterpart(model: str, trunk: str, option: tuple[str, str], **plain: Any) -> Counterpart:
    """Returns the counterpart of a model with a further option; `plain` are ours without theirs."""
    ours, theirs = option
    rest = without(*_SAME, ours) | plain
    return Counterpart(
        model,
        _OPTIONS | {ours: theirs},
        (*vit_weights(trunk, "encoder.layer"), *_WEIGHTS),
        fixed=HF_FIXED | {"mlp_ratio": 4, "drop_path_rate": 0.0},
        conversions=(only_plain(rest),),
        layer_weights=_mlp_weights,
    )


_MASK = ("mask_token", "use_mask_token")
_REGISTERS = ("registers", "num_register_tokens")


@dataclass(frozen=True)
class Dinov2Config(ViTConfig):
    """Sizes and options of a DINOv2 without a head, which returns the normed class token.

    Args:
        dim, num_layers, num_heads: as in ViTConfig, also its other options.

    Reference:
        Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision", 2023, arXiv
        2304.07193.
    """

    architecture = "dinov2"
    hf = _counterpart("Dinov2Model", "", _MASK, interpolate="bicubic")

    classes: SizeOrZero = 0
    interpolate: str | None = "bicubic"
    mask_token: bool = True
    layer_scale: Positive | None = 1.0


@dataclass(frozen=True)
class Dinov2ClassifierConfig(Dinov2Config):
    """Sizes and options of a DINOv2 with a head on the class token and the mean of the patches.

    Args:
        classes, dim, num_layers, num_heads: as in ViTConfig, also its other options.
    """

    architecture = "dinov2-classifier"
    hf = _counterpart(
        *("Dinov2ForImageClassification", "dinov2.", _MASK),
        pool="token_mean",
        interpolate="bicubic",
    )

    classes: SizeOrZero = 1000
    pool: str = "token_mean"


@dataclass(frozen=True)
class Dinov2RegistersConfig(Dinov2Config):
    """Sizes and options of a DINOv2 with registers and without a head.

    Args:
        registers, dim, num_layers, num_heads: as in ViTConfig, also its other options.

    Reference:
        Darcet et al., "Vision Transformers Need Registers", 2023, arXiv 2309.16588.
    """

    architecture = "dinov2-registers"
    hf = _counterpart(
        *("Dinov2WithRegistersModel", "", _REGISTERS), mask_token=True, interpolate="antialias"
    )

    registers: SizeOrZero = 4
    interpolate: str | None = "antialias"


@dataclass(frozen=True)
class Dinov2RegistersClassifierConfig(Dinov2RegistersConfig):
    """Sizes and options of a DINOv2 with registers, and a head as in Dinov2ClassifierConfig.

    Args:
        classes, registers, dim, num_layers, num_heads: as in ViTConfig, also its other options.
    """

    architecture = "dinov2-registers-classifier"
    hf = _counterpart(
        *("Dinov2WithRegistersForImageClassification", "dinov2_with_registers.", _REGISTERS),
        pool="token_mean",
        mask_token=True,
        interpolate="antialias",
    )

    classes: SizeOrZero = 1000
    pool: str = "token_mean"
