"""BLOOM and MPT: pre-norm with LayerNorm, ALiBi in each layer, GELU."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omniattn.models.decoders.decoder import Decoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import MLP, Attention, DecoderBlock, LayerNorm
from omniattn.modules.base.fields import Epsilon, Size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class AlibiConfig(Decoder.Config):
    """Sizes and options of decoders with ALiBi; feed-forward layers are 4 dim wide.

    Args:
        num_heads: number of heads, a divisor of dim.
        norm_eps: epsilon of the norms.
    """

    tie_embeddings: bool = True
    num_heads: Size = 6
    norm_eps: Epsilon = 1e-5

    @property
    @abstractmethod
    def biased(self) -> bool:
        """True if linear layers and norms have biases."""

    @property
    @abstractmethod
    def activation(self) -> str:
        """Activation of the feed-forward layers."""

    @property
    def norm(self) -> LayerNorm.Config:
        return LayerNorm.Config(self.dim, self.norm_eps, self.biased, backend=self.backend)

    def block(self, layer: int) -> DecoderBlock.Config:
        attention = Attention.Config(
            self.dim,
            self.num_heads,
            bias=self.biased,
            out_bias=self.biased,
            alibi=8.0,
            **self.common,
        )
        mlp = MLP.Config(self.dim, 4 * self.dim, self.activation, self.biased, **self.common)
        return DecoderBlock.Config(
            attention,
            mlp,
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )


@dataclass(frozen=True)
class BloomConfig(AlibiConfig):
    """Config of a BLOOM, whose embeddings have a norm.

    Args:
        num_heads, norm_eps: as in AlibiConfig.

    Reference:
        BigScience, "BLOOM", 2022, arXiv 2211.05100.
    """

    architecture = "bloom"
    hf = Counterpart(
        "BloomForCausalLM",
        {
            "vocab_size": "vocab_size",
            "dim": "hidden_size",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "norm_eps": "layer_norm_epsilon",
            "init_std": "initializer_range",
            "tie_embeddings": "tie_word_embeddings",
        },
        (
            (r"^embed_tokens", "transformer.word_embeddings"),
            (r"^embed_norm", "transformer.word_embeddings_layernorm"),
            (r"^norm", "transformer.ln_f"),
            (r"^layers", "transformer.h"),
            (r"mixer\.[qkv]_proj", "self_attention.query_key_value"),
            (r"mixer\.o_proj", "self_attention.dense"),
            (r"up_proj", "dense_h_to_4h"),
            (r"down_proj", "dense_4h_to_h"),
        ),
        fixed={
            "apply_residual_connection_post_layernorm": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "slow_but_exact": False,
        },
        interleaved={r"query_key_value": lambda c: c.num_heads},
    )
    biased = True
    activation = "gelu_tanh"

    @property
    def embedding_norm(self) -> LayerNorm.Config:
        return self.norm


def _no_options(theirs: PreTrainedConfig) -> dict[str, Any]:
    attention = theirs.attn_config
    for name, plain in (
        ("alibi", True),
        ("alibi_bias_max", 8),  # which transformers ignores
        ("attn_pdrop", 0.0),
        ("clip_qkv", None),
        ("softmax_scale", None),
        ("qk_ln", False),
        ("prefix_lm", False),
        ("attn_type", "multihead_attention"),
        ("attn_uses_sequence_id", False),
    ):
        if (value := getattr(attention, name)) != plain:
            raise NotImplementedError(
                f"MPTConfig: {name} of attn_config must be {plain!r}, got {name}={value!r}"
            )
    return {}


@dataclass(frozen=True)
class MPTConfig(AlibiConfig):
    """Config of an MPT, without biases.

    Args:
        num_heads, norm_eps: as in AlibiConfig.

    Reference:
        MosaicML, "MPT-7B", 2023.
    """

    architecture = "mpt"
    hf = Counterpart(
        "MptForCausalLM",
        {
            "vocab_size": "vocab_size",
            "dim": "d_model",
            "num_layers": "n_layers",
            "num_heads": "n_heads",
            "norm_eps": "layer_norm_epsilon",
            "init_std": "initializer_range",
            "tie_embeddings": "tie_word_embeddings",
        },
        (
            (r"^embed_tokens", "transformer.wte"),
            (r"^norm", "transformer.norm_f"),
            (r"^layers", "transformer.blocks"),
            (r"input_layernorm", "norm_1"),
            (r"post_attention_layernorm", "norm_2"),
            (r"mixer\.[qkv]_proj", "attn.Wqkv"),
            (r"mixer\.o_proj", "attn.out_proj"),
            (r"mlp", "ffn"),
        ),
        fixed={
            "expansion_ratio": 4,
            "resid_pdrop": 0.0,
            "emb_pdrop": 0.0,
            "logit_scale": None,
            "no_bias": True,
        },
        conversions=(Conversion(lambda ours: {}, _no_options),),
    )
    biased = False
    activation = "gelu"
