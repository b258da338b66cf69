"""Image to text: a vision encoder, and a decoder like GPT-2 that attends to its tokens."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from omniattn.checks.arguments import shown
from omniattn.functional.masks import Mask
from omniattn.models.decoders.gpt2 import GPT2Config
from omniattn.models.encoder_decoders.bart import LayerNormConfig
from omniattn.models.encoder_decoders.encoder_decoder import EncoderDecoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.models.vision import VisionConfig, ViTConfig
from omniattn.modules import LearnedPositional, Linear
from omniattn.modules.base.fields import Size
from omniattn.modules.base.layer import LayerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Fields that the decoder shares with GPT2Config.
_OF_TEXT = (
    *("vocab_size", "dim", "num_layers", "num_heads", "max_positions", "norm_eps", "init_std"),
    "dropout_p",
)


def _text_of(ours: ImageToTextConfig) -> GPT2Config:
    """Returns the decoder without its cross-attention."""
    for name, wanted in (
        ("hidden_dim", 4 * ours.dim),
        ("attention_dropout_p", ours.dropout_p),
        ("activation_dropout_p", 0.0),
        ("decoder_layers", None),
    ):
        if (value := getattr(ours, name)) != wanted:
            raise NotImplementedError(
                f"ImageToTextConfig: {name} must be {wanted!r} in transformers, "
                f"got {name}={shown(value)}"
            )
    return GPT2Config(**{name: getattr(ours, name) for name in _OF_TEXT})


def _to_hf(ours: ImageToTextConfig) -> dict[str, Any]:
    if not isinstance(ours.vision, ViTConfig):
        raise NotImplementedError(
            f"ImageToTextConfig: vision must be a ViTConfig in transformers, got {ours.vision}"
        )
    text = _text_of(ours).to_hf().to_dict() | {"add_cross_attention": True, "is_decoder": True}
    return {"encoder": replace(ours.vision, classes=1).to_hf().to_dict(), "decoder": text}


def _from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    decoder = copy.copy(theirs.decoder)
    decoder.add_cross_attention = False
    text = GPT2Config.from_hf(decoder)
    found = {name: getattr(text, name) for name in _OF_TEXT}
    found |= {"hidden_dim": 4 * text.dim, "attention_dropout_p": text.dropout_p}
    # The config comes back from its plain values, in which nested configs keep their type.
    return found | {"vision": replace(ViTConfig.from_hf(theirs.encoder), classes=0, token_ids=())}


def _of_vision(name: re.Match[str]) -> str:
    """Renames a weight of the encoder as ViT's own weights are renamed."""
    renamed = name[1]
    assert ViTConfig.hf is not None
    for pattern, replacement in ViTConfig.hf.weights:
        renamed = re.sub(pattern, replacement, renamed)
    return f"encoder.{renamed.removeprefix('vit.')}"


@dataclass(frozen=True)
class ImageToTextConfig(LayerNormConfig):
    """Config of an image encoder with a text decoder, such as ViT and GPT-2.

    The decoder has the layers of GPT-2, each with a cross-attention to the normed tokens of the
    encoder, which a linear layer maps to the decoder's width where their widths differ.

    Args:
        vision: config of the encoder without a head (classes=0): a ViT, DeiT, Swin or PVT.
        num_layers: number of layers of the decoder.
        max_positions: number of learned positions of the text.

    Reference:
        Li et al., "TrOCR", 2021, arXiv 2109.10282; Radford et al., "Language Models are
        Unsupervised Multitask Learners", 2019.
    """

    architecture = "image-to-text"
    hf = Counterpart(
        "VisionEncoderDecoderModel",
        {},
        (
            (r"^encoder\.(.*)", _of_vision),
            (r"^bridge", "enc_to_dec_proj"),
            (r"^embed_tokens", "decoder.transformer.wte"),
            (r"^decoder\.embed_positions", "decoder.transformer.wpe"),
            (r"^decoder\.norm", "decoder.transformer.ln_f"),
            (r"^decoder\.layers", "decoder.transformer.h"),
            (r"\.input_layernorm", ".ln_1"),
            (r"cross_attention_layernorm", "ln_cross_attn"),
            (r"post_attention_layernorm", "ln_2"),
            (r"cross_attn\.q_proj", "crossattention.q_attn"),
            (r"cross_attn\.[kv]_proj", "crossattention.c_attn"),
            (r"cross_attn\.o_proj", "crossattention.c_proj"),
            (r"mixer\.[qkv]_proj", "attn.c_attn"),
            (r"mixer\.o_proj", "attn.c_proj"),
            (r"mlp\.up_proj", "mlp.c_fc"),
            (r"mlp\.down_proj", "mlp.c_proj"),
        ),
        transposed=r"\.(c_\w+|q_attn)\.weight$",
        unused=r"^encoder\.pooler\.",
        conversions=(Conversion(_to_hf, _from_hf),),
    )

    vision: VisionConfig = field(default_factory=lambda: ViTConfig(classes=0))
    vocab_size: Size = 256
    hidden_dim: Size = 640
    max_positions: Size = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vision.classes:
            raise ValueError(
                "ImageToTextConfig: vision must have no head, classes=0, "
                f"got vision.classes={self.vision.classes}"
            )

    @property
    def image(self) -> int:
        """Side of the images."""
        return self.vision.image

    @property
    def channels(self) -> int:
        """Number of channels of the images."""
        return self.vision.channels

    @property
    def longest(self) -> int:
        return self.max_positions

    @property
    def ffn_activation(self) -> str:
        return "gelu_tanh"

    @property
    def norm_placement(self) -> str:
        return "pre"

    @property
    def positions(self) -> LayerConfig:
        return LearnedPositional.Config(self.max_positions, self.dim, self.init_std)

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ImageToText:
        return ImageToText(self, device=device, dtype=dtype)


class ImageToText(EncoderDecoder):
    """Computes logits = head(Decoder(E[tokens], Encoder(images))).

    `generate(model, start, 20, source=images)` writes captions.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        images (B, channels, image, image), tokens (B, T) int -> logits (B, T, vocab_size), or the
        mean loss with `targets` (B, T). Tokens are a start token and the targets, shifted right by
        one.

    Example:
        >>> model = ImageToText(ImageToTextConfig(dim=32, num_layers=1, num_heads=2))
        >>> model(torch.zeros(2, 1, 8, 8), torch.zeros(2, 3, dtype=torch.long)).shape
        torch.Size([2, 3, 256])
    """

    config: ImageToTextConfig

    def __init__(
        self,
        config: ImageToTextConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        width = self.encoder.norm.weight.shape[0]
        self.bridge: Linear | None = None
        if width != config.dim:
            bridge = Linear.Config(width, config.dim, True, config.init_std, config.backend)
            self.bridge = Linear(bridge, device=device, dtype=dtype)

    def _new_encoder(self, **factory: Any) -> nn.Module:
        return self.config.vision.build(**factory)

    def encode(self, source: Tensor, *, mask: Tensor | Mask | None = None) -> Tensor:
        """Encodes images (B, channels, image, image) to states (B, S, dim) of all patches."""
        if mask is not None:
            raise ValueError(f"ImageToText: mask must be None for images, got mask={shown(mask)}")
        states: Tensor = self.encoder.forward_features(source)
        states = states.flatten(1, -2)  # of the tokens in a row, or of a grid
        return states if self.bridge is None else self.bridge(states)

    def forward(  # type: ignore[override]
        self, images: Tensor, tokens: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Returns logits (B, T, vocab_size), or with targets the mean loss; -100 is ignored."""
        return super().forward(images, tokens, targets)
