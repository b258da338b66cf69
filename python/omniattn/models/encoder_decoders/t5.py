"""T5: an encoder-decoder with a relative position bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omniattn.models.encoder_decoders.encoder_decoder import EncoderDecoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import (
    MLP,
    Attention,
    DecoderBlock,
    GatedMLP,
    RMSNorm,
    T5RelativeBias,
)
from omniattn.modules.base.fields import Epsilon, Probability, Size
from omniattn.modules.base.layer import LayerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def _decoder_layers(theirs: PreTrainedConfig) -> dict[str, Any]:
    own = theirs.num_decoder_layers
    return {"decoder_layers": None if own == theirs.num_layers else own}


#: Our option -> transformers' option, for T5 and Switch.
HF_OPTIONS = {
    "vocab_size": "vocab_size",
    "dim": "d_model",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "head_dim": "d_kv",
    "hidden_dim": "d_ff",
    "buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
    "dropout_p": "dropout_rate",
    "norm_eps": "layer_norm_epsilon",
}
HF_WEIGHTS = (
    (r"^embed_tokens", "shared"),
    (r"coder\.relative", "coder.block.0.layer.0.SelfAttention.relative"),
    (r"coder\.norm", "coder.final_layer_norm"),
    (r"layers", "block"),
    (r"input_layernorm", "layer.0.layer_norm"),
    (r"mixer\.(.)_proj", r"layer.0.SelfAttention.\1"),
    (r"cross_attention_layernorm", "layer.1.layer_norm"),
    (r"cross_attn\.(.)_proj", r"layer.1.EncDecAttention.\1"),
    (r"(encoder.*)post_attention_layernorm", r"\1layer.1.layer_norm"),
    (r"(encoder.*)mlp", r"\1layer.1.mlp"),
    (r"(decoder.*)post_attention_layernorm", r"\1layer.2.layer_norm"),
    (r"(decoder.*)mlp", r"\1layer.2.mlp"),
)
DECODER_LAYERS = Conversion(lambda _: {}, _decoder_layers)


@dataclass(frozen=True)
class T5Config(EncoderDecoder.Config):
    """Sizes and options of a T5.

    Args:
        vocab_size, dim, num_heads, head_dim, hidden_dim: sizes.
        num_layers: number of layers of the encoder and, unless decoder_layers differs, of the
            decoder.
        buckets, max_distance: buckets of relative positions, and distance of the last one.
        gated: GEGLU instead of ReLU, and an untied head (version 1.1).
        dropout_p: dropout of embeddings, attention weights, hidden layers and each layer's output.
        norm_eps: epsilon of the norms.
        residual_in_fp32: keep the residual stream in float32 if the weights have 16 bits.

    Reference:
        Raffel et al., "Exploring the Limits of Transfer Learning", 2020, arXiv 1910.10683.
    """

    architecture = "t5"
    hf = Counterpart(
        "T5ForConditionalGeneration",
        HF_OPTIONS,
        (*HF_WEIGHTS, (r"mlp", "DenseReluDense"), (r"gate_proj", "wi_0"), (r"down_proj", "wo")),
        fixed={
            "num_decoder_layers": lambda c: c.depth(decoder=True),
            "feed_forward_proj": lambda c: "gated-gelu" if c.gated else "relu",
            "scale_decoder_outputs": lambda c: not c.gated,
        },
        conversions=(
            Conversion(lambda _: {}, lambda theirs: {"gated": theirs.is_gated_act}),
            DECODER_LAYERS,
        ),
    )

    vocab_size: Size = 358  # bytes, sentinels, end and start
    dim: Size = 160
    num_layers: Size = 3
    num_heads: Size = 5
    head_dim: Size = 32
    hidden_dim: Size = 640
    buckets: int = 32
    max_distance: Size = 128
    gated: bool = False
    dropout_p: Probability = 0.0
    norm_eps: Epsilon = 1e-6
    residual_in_fp32: bool = False
    drops_output = True

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> T5:
        return T5(self, device=device, dtype=dtype)

    @property
    def counterpart(self) -> Counterpart:
        names = super().counterpart
        up = (r"up_proj", "wi_1" if self.gated else "wi")
        return replace(names, weights=(*names.weights, up))

    def build_hf(self) -> PreTrainedModel:
        model = super().build_hf()
        if self.gated:  # transformers ties the head until a checkpoint has a weight for it
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
        return model

    @property
    def norm(self) -> RMSNorm.Config:
        """Config of all norms."""
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def tied(self) -> bool:
        return not self.gated

    @property
    def embedding_std(self) -> float:
        return 1.0

    @property
    def head_std(self) -> float:
        return self.dim**-0.5

    @property
    def output_scale(self) -> float:
        return self.dim**-0.5 if self.tied else 1.0

    def relative_bias(self, *, decoder: bool) -> T5RelativeBias.Config:
        return T5RelativeBias.Config(
            *(self.num_heads, self.buckets, self.max_distance, not decoder),
            init_std=self.dim**-0.5,
        )

    def feed_forward(self, layer: int, *, decoder: bool) -> LayerConfig:
        """Returns the config of a layer's channel mixer."""
        kind = GatedMLP.Config if self.gated else MLP.Config
        return kind(
            self.dim,
            self.hidden_dim,
            "geglu_tanh" if self.gated else "relu",
            bias=False,
            init_std=self.dim**-0.5,
            out_init_std=self.hidden_dim**-0.5,
            dropout_p=self.dropout_p,
            backend=self.backend,
        )

    def block(self, layer: int = 0, *, decoder: bool) -> DecoderBlock.Config:
        """Returns the config of a layer; decoder layers are causal and attend to the encoder."""

        def attention(*, causal: bool, cross: bool) -> Attention.Config:
            return Attention.Config(
                self.dim,
                self.num_heads,
                head_dim=self.head_dim,
                causal=causal,
                cross=cross,
                scale=1.0,
                dropout_p=self.dropout_p,
                init_std=self.dim**-0.5,
                # Scores are not divided by sqrt(D), so the initial query weights are.
                q_init_std=(self.dim * self.head_dim) ** -0.5,
                out_init_std=(self.num_heads * self.head_dim) ** -0.5,
                backend=self.backend,
            )

        return DecoderBlock.Config(
            attention(causal=decoder, cross=False),
            self.feed_forward(layer, decoder=decoder),
            self.norm,
            cross=attention(causal=False, cross=True) if decoder else None,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )


class T5(EncoderDecoder):
    """Computes logits = head(Decoder(E[tokens], Encoder(E[source]))).

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        source (B, S), tokens (B, T) int -> logits (B, T, vocab_size), or the mean loss with
        `targets` (B, T). Tokens are a start token and the targets, shifted right by one.

    Example:
        >>> model = T5(T5Config(dim=32, num_layers=1, hidden_dim=64))
        >>> model(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)).shape
        torch.Size([1, 3, 358])
    """

    config: T5Config
