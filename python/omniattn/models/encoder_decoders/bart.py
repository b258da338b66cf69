"""The Transformer of 2017, BART, mBART and Marian: encoder-decoders with LayerNorms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omniattn.checks.arguments import require_choice
from omniattn.models.encoder_decoders.encoder_decoder import EncoderDecoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import (
    MLP,
    Attention,
    DecoderBlock,
    LayerNorm,
    LearnedPositional,
    SinusoidalPositional,
)
from omniattn.modules.base.fields import Epsilon, Probability, Size
from omniattn.modules.base.layer import LayerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class LayerNormConfig(EncoderDecoder.Config):
    """Sizes and options of encoder-decoders with LayerNorms and MLPs with biases.

    Args:
        num_heads, hidden_dim: sizes.
        dropout_p: dropout of embeddings and of each layer's output.
        attention_dropout_p, activation_dropout_p: dropout of attention weights and of hidden
            layers.
        norm_eps: epsilon of the norms.
        init_std: standard deviation of all initial weights.
    """

    num_heads: Size = 5
    hidden_dim: Size = 640
    dropout_p: Probability = 0.0
    attention_dropout_p: Probability = 0.0
    activation_dropout_p: Probability = 0.0
    norm_eps: Epsilon = 1e-5
    init_std: float = 0.02

    #: True for biases of the projections of attention.
    biased = True

    @property
    def ffn_activation(self) -> str:
        """Activation of the feed-forward layers."""
        return "gelu"

    @property
    def norm_placement(self) -> str:
        """Place of the norms, "post", or "pre" with a norm after each stack."""
        return "post"

    @property
    def layer_norm(self) -> LayerNorm.Config:
        """Config of all norms."""
        return LayerNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def norm(self) -> LayerConfig | None:
        return self.layer_norm if self.norm_placement == "pre" else None

    @property
    def embedding_std(self) -> float:
        return self.init_std

    def block(self, layer: int, *, decoder: bool) -> DecoderBlock.Config:
        common: dict[str, Any] = {
            "init_std": self.init_std,
            "out_init_std": self.init_std,
            "backend": self.backend,
        }

        def attention(*, causal: bool, cross: bool) -> Attention.Config:
            return Attention.Config(
                self.dim,
                self.num_heads,
                causal=causal,
                cross=cross,
                bias=self.biased,
                out_bias=self.biased,
                dropout_p=self.attention_dropout_p,
                **common,
            )

        return DecoderBlock.Config(
            attention(causal=decoder, cross=False),
            MLP.Config(
                self.dim,
                self.hidden_dim,
                self.ffn_activation,
                dropout_p=self.activation_dropout_p,
                **common,
            ),
            self.layer_norm,
            cross=attention(causal=False, cross=True) if decoder else None,
            dropout_p=self.dropout_p,
            placement=self.norm_placement,
        )


@dataclass(frozen=True)
class TransformerConfig(LayerNormConfig):
    """Config of the Transformer of 2017: post-norm, sinusoidal positions, one embedding for all.

    The projections of attention have no biases, and embeddings are multiplied by sqrt(dim).

    Args:
        activation: activation of the feed-forward layers.
        placement: "post", or "pre" with a norm after each stack.

    Reference:
        Vaswani et al., "Attention Is All You Need", 2017, arXiv 1706.03762.
    """

    architecture = "transformer"
    biased = False

    activation: str = "relu"
    placement: str = "post"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("TransformerConfig", "placement", self.placement, ("pre", "post"))

    @property
    def ffn_activation(self) -> str:
        return self.activation

    @property
    def norm_placement(self) -> str:
        return self.placement

    @property
    def positions(self) -> LayerConfig:
        return SinusoidalPositional.Config(self.dim)

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.dim)

    @property
    def embedding_std(self) -> float:
        return self.dim**-0.5


def _layers_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    own = theirs.decoder_layers
    return {"decoder_layers": None if own == theirs.encoder_layers else own}


def _norms(post: bool) -> tuple[tuple[str, str], ...]:
    """Returns the names of a block's norms in transformers, before or after the layers."""
    ours = (
        ("input_layernorm", "self_attn_layer_norm", "mixer_output_norm"),
        ("cross_attention_layernorm", "encoder_attn_layer_norm", "cross_attn_output_norm"),
        ("post_attention_layernorm", "final_layer_norm", "mlp_output_norm"),
    )
    return tuple((after if post else before, theirs) for before, theirs, after in ours)


def _counterpart(
    model: str,
    *,
    post: bool,
    options: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
    conversions: Sequence[Conversion] = (),
    unused: str = "^$",
) -> Counterpart:
    """Returns the counterpart of a BART with further options; see Counterpart."""
    return Counterpart(
        model,
        {
            "vocab_size": "vocab_size",
            "dim": "d_model",
            "num_layers": "encoder_layers",
            "num_heads": "encoder_attention_heads",
            "hidden_dim": "encoder_ffn_dim",
            "max_positions": "max_position_embeddings",
            "dropout_p": "dropout",
            "attention_dropout_p": "attention_dropout",
            "activation_dropout_p": "activation_dropout",
            "scale_embedding": "scale_embedding",
            "init_std": "init_std",
            **(options or {}),
        },
        (
            *_norms(post),
            (r"^head_bias", "final_logits_bias"),
            (r"^embed_tokens", "model.shared"),
            (r"^(en|de)coder", r"model.\1coder"),
            (r"coder\.embed_norm", "coder.layernorm_embedding"),
            (r"coder\.norm", "coder.layer_norm"),
            (r"mixer", "self_attn"),
            (r"cross_attn\.", "encoder_attn."),
            (r"\.o_proj", ".out_proj"),
            (r"mlp\.up_proj", "fc1"),
            (r"mlp\.down_proj", "fc2"),
        ),
        fixed={
            "decoder_layers": lambda c: c.depth(decoder=True),
            "decoder_attention_heads": lambda c: c.num_heads,
            "decoder_ffn_dim": lambda c: c.hidden_dim,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "tie_word_embeddings": True,
            **(fixed or {}),
        },
        conversions=(Conversion(lambda _: {}, _layers_from_hf), *conversions),
        unused=unused,
    )


_GELU = {"activation_function": "gelu"}


@dataclass(frozen=True)
class BartConfig(LayerNormConfig):
    """Config of a BART: learned positions, a norm of the embeddings, biases, exact GELU.

    Args:
        max_positions: longest sequence; the learned table has two more rows, as its releases have.
        scale_embedding: True to multiply token embeddings by sqrt(dim).

    Reference:
        Lewis et al., "BART", 2019, arXiv 1910.13461.
    """

    architecture = "bart"
    hf = _counterpart("BartForConditionalGeneration", post=True, fixed=_GELU)
    head_bias = True
    position_offset = 2

    max_positions: Size = 1024
    scale_embedding: bool = False

    @property
    def longest(self) -> int:
        return self.max_positions

    @property
    def positions(self) -> LayerConfig:
        rows = self.max_positions + self.position_offset
        return LearnedPositional.Config(rows, self.dim, self.init_std)

    @property
    def embedding_norm(self) -> LayerConfig:
        return self.layer_norm

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.dim) if self.scale_embedding else 1.0


@dataclass(frozen=True)
class MBartConfig(BartConfig):
    """Config of an mBART: a BART with norms before the layers and after each stack.

    Args:
        max_positions, scale_embedding: as in BartConfig.

    Reference:
        Liu et al., "Multilingual Denoising Pre-training for Neural Machine Translation", 2020,
        arXiv 2001.08210.
    """

    architecture = "mbart"
    hf = _counterpart("MBartForConditionalGeneration", post=False, fixed=_GELU)

    scale_embedding: bool = True

    @property
    def norm_placement(self) -> str:
        return "pre"


def _marian_ids(c: MarianConfig) -> dict[str, Any]:
    """Returns ids of tokens for transformers, whose defaults suit its vocabulary of 58,101."""
    return dict.fromkeys(("pad_token_id", "decoder_start_token_id"), c.vocab_size - 1)


@dataclass(frozen=True)
class MarianConfig(LayerNormConfig):
    """Config of a Marian, the architecture of the OPUS-MT translators: post-norm, biases,
    sinusoidal positions, one embedding for both languages.

    Args:
        activation: activation of the feed-forward layers.
        max_positions: longest sequence.
        scale_embedding: True to multiply token embeddings by sqrt(dim).

    Reference:
        Junczys-Dowmunt et al., "Marian: Fast Neural Machine Translation in C++", 2018, arXiv
        1804.00344.
    """

    architecture = "marian"
    hf = _counterpart(
        "MarianMTModel",
        post=True,
        options={"activation": "activation_function"},
        fixed={
            "decoder_vocab_size": lambda c: c.vocab_size,
            "share_encoder_decoder_embeddings": True,
        },
        conversions=(Conversion(_marian_ids, lambda _: {}),),
        unused=r"embed_positions",  # the sinusoids, which are computed here
    )
    head_bias = True

    activation: str = "silu"
    max_positions: Size = 512
    scale_embedding: bool = True

    @property
    def ffn_activation(self) -> str:
        return self.activation

    @property
    def longest(self) -> int:
        return self.max_positions

    @property
    def positions(self) -> LayerConfig:
        return SinusoidalPositional.Config(self.dim, layout="concat")

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.dim) if self.scale_embedding else 1.0
