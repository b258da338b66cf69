"""CLIP: a ViT and a causal text model whose embeddings of pairs are trained to agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_tensor, shown
from omniattn.models.decoders.blocks import BlocksConfig
from omniattn.models.decoders.decoder import Decoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.models.model import Model, require_token_ids
from omniattn.models.vision.vit import ViT, ViTConfig, require_options, without
from omniattn.modules import MLP, Attention, DecoderBlock, LayerNorm, LearnedPositional, Linear
from omniattn.modules.base.fields import Epsilon, Size, SizeOrZero

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Largest factor of the logits in training.
LARGEST_SCALE = 100.0
_VISION = {
    "channels": "num_channels",
    "image": "image_size",
    "patch": "patch_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_TEXT = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "text_dim": "hidden_size",
    "text_layers": "num_hidden_layers",
    "text_heads": "num_attention_heads",
}
#: eos_token_id of configs whose end of a text is the largest id.
_LARGEST_ID = 2


def _towers(ours: CLIPConfig) -> dict[str, Any]:
    common = {
        "norm_eps": "layer_norm_eps",
        "projection_dim": "projection_dim",
        "init_std": "initializer_range",
    }
    fixed = {"hidden_act": "quick_gelu", "attention_dropout": 0.0}

    def tower(names: dict[str, str], **more: Any) -> dict[str, Any]:
        values = {theirs: getattr(ours, name) for name, theirs in (names | common).items()}
        return fixed | values | {"intermediate_size": 4 * values["hidden_size"]} | more

    eot = _LARGEST_ID if ours.eot is None else ours.eot
    return {"vision_config": tower(_VISION), "text_config": tower(_TEXT, eos_token_id=eot)}


def _from_towers(theirs: PreTrainedConfig) -> dict[str, Any]:
    vision, text = theirs.vision_config, theirs.text_config
    found = {name: getattr(vision, their) for name, their in _VISION.items()}
    found |= {name: getattr(text, their) for name, their in _TEXT.items()}
    found["eot"] = None if text.eos_token_id == _LARGEST_ID else text.eos_token_id
    found |= {"norm_eps": vision.layer_norm_eps, "init_std": vision.initializer_range}
    for tower in (vision, text):
        for name, wanted in (
            ("hidden_act", "quick_gelu"),
            ("attention_dropout", 0.0),
            ("intermediate_size", 4 * tower.hidden_size),
            ("layer_norm_eps", vision.layer_norm_eps),
        ):
            if (value := getattr(tower, name)) != wanted:
                raise NotImplementedError(
                    f"CLIPConfig: {name} of {tower.base_config_key} must be {wanted!r}, "
                    f"got {name}={shown(value)}"
                )
    return found


@dataclass(frozen=True)
class CLIPConfig(ViTConfig):
    """Sizes and options of a CLIP.

    Args:
        dim, num_layers, num_heads: sizes of the image model, as in ViTConfig.
        vocab_size, context: number of token ids, and of positions of a text.
        text_dim, text_layers, text_heads: sizes of the text model, whose MLPs are 4 text_dim wide.
        projection_dim: width of the embeddings.
        eot: id of the token that ends a text, None for the largest id in it.
        log_scale: initial logarithm of the logits' factor.

    Reference:
        Radford et al., "Learning Transferable Visual Models From Natural Language Supervision",
        2021, arXiv 2103.00020.
    """

    architecture = "clip"
    hf = Counterpart(
        "CLIPModel",
        {"projection_dim": "projection_dim", "log_scale": "logit_scale_init_value"},
        (
            (r"^vision\.class_token", "vision_model.embeddings.class_embedding"),
            (r"^vision\.embed_positions", "vision_model.embeddings.position_embedding"),
            (r"^vision\.embed_patches", "vision_model.embeddings.patch_embedding"),
            (r"^vision\.pre_norm", "vision_model.pre_layrnorm"),
            (r"^vision\.norm", "vision_model.post_layernorm"),
            (r"^text\.embed_tokens", "text_model.embeddings.token_embedding"),
            (r"^text\.embed_positions", "text_model.embeddings.position_embedding"),
            (r"^text\.norm", "text_model.final_layer_norm"),
            (r"^(vision|text)\.layers", r"\1_model.encoder.layers"),
            (r"mixer\.o_proj", "self_attn.out_proj"),
            (r"mixer", "self_attn"),
            (r"input_layernorm", "layer_norm1"),
            (r"post_attention_layernorm", "layer_norm2"),
            (r"up_proj", "fc1"),
            (r"down_proj", "fc2"),
            (r"^log_scale", "logit_scale"),
        ),
        conversions=(Conversion(_towers, _from_towers),),
    )
    activation: ClassVar[str] = "quick_gelu"

    norm_eps: Epsilon = 1e-5
    classes: SizeOrZero = 0
    patch_bias: bool = False
    pre_norm: bool = True
    vocab_size: Size = 256
    context: Size = 64
    text_dim: Size = 64
    text_layers: Size = 4
    text_heads: Size = 4
    projection_dim: Size = 64
    eot: int | None = None
    log_scale: float = 2.659260036932778  # ln(1 / 0.07)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_options(self, without() | {"pre_norm": True, "patch_bias": False, "classes": 0})

    @property
    def longest(self) -> int:
        return self.context

    @property
    def token_std(self) -> float:
        return self.dim**-0.5

    def block(self, layer: int) -> DecoderBlock.Config:
        return _block(self, self.dim, self.num_heads, self.num_layers, causal=False)

    @property
    def text(self) -> BlocksConfig:
        """Config of the text model."""
        return BlocksConfig(
            vocab_size=self.vocab_size,
            dim=self.text_dim,
            num_layers=self.text_layers,
            tie_embeddings=True,
            init_std=self.init_std,
            blocks=(_block(self, self.text_dim, self.text_heads, self.text_layers, causal=True),),
            positions=LearnedPositional.Config(self.context, self.text_dim, self.init_std),
            backend=self.backend,
        )

    def build(  # type: ignore[override]
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> CLIP:
        return CLIP(self, device=device, dtype=dtype)


def _block(
    config: CLIPConfig, dim: int, heads: int, layers: int, *, causal: bool
) -> DecoderBlock.Config:
    """Returns the config of a block, with the initial weights of the release."""
    inner, deep = dim**-0.5, dim**-0.5 * (2 * layers) ** -0.5
    attention = Attention.Config(
        dim,
        heads,
        causal=causal,
        bias=True,
        out_bias=True,
        init_std=deep,
        out_init_std=inner,
        backend=config.backend,
    )
    wide = (2 * dim) ** -0.5
    mlp = MLP.Config(
        *(dim, 4 * dim, config.activation),
        init_std=wide,
        out_init_std=deep,
        backend=config.backend,
    )
    norm = LayerNorm.Config(dim, config.norm_eps, backend=config.backend)
    return DecoderBlock.Config(attention, mlp, norm)


class CLIPOutput(NamedTuple):
    """Results of a CLIP.

    Args:
        logits_per_image: scaled similarities (B, texts); logits_per_text is its transpose.
        image_embeds, text_embeds: embeddings (B, projection_dim) of length 1.
    """

    logits_per_image: Tensor
    image_embeds: Tensor
    text_embeds: Tensor

    @property
    def logits_per_text(self) -> Tensor:
        """Scaled similarities (texts, B)."""
        return self.logits_per_image.T


class CLIP(Model):
    """Two models of images and of texts whose embeddings of a pair are trained to be similar.

    The loss is the mean of the cross-entropies of choosing the text of each image and the image of
    each text within the batch. In training the factor of the logits is at most 100.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        images (B, channels, image, image), tokens (B, T) -> (loss, outputs).

    Example:
        >>> model = CLIP(CLIPConfig())
        >>> images, tokens = torch.rand(3, 1, 8, 8), torch.tensor([[7, 255], [3, 255], [9, 255]])
        >>> loss, outputs = model(images, tokens)
        >>> outputs.logits_per_image.shape
        torch.Size([3, 3])
        >>> model.zero_shot(images, tokens[:2]).shape
        torch.Size([3, 2])
    """

    config: CLIPConfig

    def __init__(
        self,
        config: CLIPConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = c = config
        self.vision = ViT(c, **factory)
        self.text = Decoder(c.text, **factory)

        def projection(dim: int) -> Linear:
            linear = Linear.Config(dim, c.projection_dim, False, dim**-0.5, c.backend)
            return Linear(linear, **factory)

        self.visual_projection = projection(c.dim)
        self.text_projection = projection(c.text_dim)
        self.log_scale = nn.Parameter(torch.empty((), **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the logarithm of the logits' factor."""
        nn.init.constant_(self.log_scale, self.config.log_scale)

    def encode_image(self, images: Tensor) -> Tensor:
        """Returns embeddings (B, projection_dim) of length 1."""
        return _unit(self.visual_projection(self.vision(images)))

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Returns embeddings (B, projection_dim) of length 1 of texts (B, T)."""
        require_token_ids("CLIP", "tokens", tokens)
        if tokens.shape[1] > self.config.context:
            raise ValueError(
                f"CLIP: tokens must have at most {self.config.context} positions, "
                f"got tokens.shape={tuple(tokens.shape)}"
            )
        states = self.text.hidden(tokens)
        return _unit(self.text_projection(states[torch.arange(len(states)), self._ends(tokens)]))

    def _ends(self, tokens: Tensor) -> Tensor:
        """Returns the place of the token that ends each text."""
        if self.config.eot is None:
            return tokens.argmax(-1)
        ends = tokens == self.config.eot
        if not ends.is_meta and not ends.any(-1).all():
            raise ValueError(
                f"CLIP: each row of tokens must have the id eot={self.config.eot}, "
                f"got none in row {int((~ends.any(-1)).nonzero()[0])}"
            )
        return ends.int().argmax(-1)

    def scale(self) -> Tensor:
        """Returns the factor of the logits; in training its parameter is limited first."""
        if self.training:
            with torch.no_grad():
                self.log_scale.clamp_(max=math.log(LARGEST_SCALE))
        return self.log_scale.exp()

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, CLIPOutput]:
        """Returns the loss and the outputs; see the class."""
        require_tensor("CLIP", "tokens", tokens)
        image, text = self.encode_image(images), self.encode_text(tokens)
        if len(image) != len(text):
            raise ValueError(
                "CLIP: images and tokens must be pairs, got images.shape="
                f"{tuple(images.shape)}, tokens.shape={tuple(tokens.shape)}"
            )
        logits = self.scale() * (image @ text.T)
        pairs = torch.arange(len(image), device=logits.device)
        backend = self.config.backend
        by_image = functional.cross_entropy(logits, pairs, backend=backend)
        by_text = functional.cross_entropy(logits.T, pairs, backend=backend)
        return (by_image + by_text) / 2, CLIPOutput(logits, image, text)

    def zero_shot(self, images: Tensor, prompts: Tensor) -> Tensor:
        """Returns logits (B, classes) of images by the similarity to texts of classes.

        Args:
            images: (B, channels, image, image).
            prompts: texts (classes, T), or several of each class (classes, texts, T), whose
                embeddings are averaged.
        """
        require_tensor("CLIP", "prompts", prompts)
        if prompts.dim() == 2:
            prompts = prompts[:, None]
        texts = self.encode_text(prompts.flatten(0, -2)).unflatten(0, prompts.shape[:-1])
        return self.scale() * (self.encode_image(images) @ _unit(texts.mean(1)).T)


def _unit(x: Tensor) -> Tensor:
    return nn.functional.normalize(x, dim=-1)


def recall(queries: Tensor, keys: Tensor, k: int = 1) -> float:
    """Returns the share of queries (N, d) whose own key (N, d) is among the k most similar ones.

    Example:
        >>> recall(torch.eye(3), torch.eye(3)[[0, 2, 1]])
        0.3333333333333333
    """
    scores = queries @ keys.T
    better = (scores > scores.diagonal()[:, None]).sum(-1)
    return float((better < k).double().mean())
