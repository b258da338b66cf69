"""RWKV-4 to 7: a recurrence and a feed-forward layer with token shift, without positions."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from omniattn.models.decoders.decoder import Decoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import (
    DecoderBlock,
    LayerNorm,
    RWKV4TimeMix,
    RWKV5TimeMix,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVChannelMix,
)
from omniattn.modules.base.fields import Epsilon, Size
from omniattn.modules.base.layer import LayerConfig


@dataclass(frozen=True)
class RWKVConfig(Decoder.Config):
    """Sizes and options that all versions share; the embeddings have a norm (ln0).

    Args:
        hidden_dim: hidden size of the feed-forward layers, default 4 dim.
        norm_eps: epsilon of the norms.
        l2_wrap: c of the penalty ``c/2 mean(max logit^2)``, 1e-4 in RWKV-LM, which acts on the
            gradient of the training loss and not on its value; 0 for none.
    """

    hidden_dim: Size | None = None
    norm_eps: Epsilon = 1e-5
    l2_wrap: float = 0.0

    @property
    def norm(self) -> LayerNorm.Config:
        return LayerNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def embedding_norm(self) -> LayerNorm.Config:
        return self.norm

    @abstractmethod
    def mixer(self, layer: int) -> LayerConfig:
        """Returns the config of a layer's token mixer."""

    def of_layer(self, layer: int) -> dict[str, Any]:
        """Returns the options that both parts of a layer share."""
        return {
            "dim": self.dim,
            "layer_idx": layer,
            "num_layers": max(self.num_layers, layer + 1),
            "init_std": self.init_std,
            "backend": self.backend,
        }

    def block(self, layer: int) -> DecoderBlock.Config:
        mlp = RWKVChannelMix.Config(
            **self.of_layer(layer),
            hidden_dim=self.hidden_dim,
            receptance=not isinstance(self, RWKV7Config),
        )
        return DecoderBlock.Config(
            self.mixer(layer),
            mlp,
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )


def _one_epsilon(ours: RWKV4Config) -> dict[str, Any]:
    if ours.norm_eps != 1e-5:
        raise NotImplementedError(
            f"RWKV4Config: norm_eps must be 1e-05 in transformers, got norm_eps={ours.norm_eps}"
        )
    return {}


def _hidden_from_hf(theirs: Any) -> dict[str, Any]:
    hidden = theirs.intermediate_size
    return {"hidden_dim": None if hidden == 4 * theirs.hidden_size else hidden}


def _require_whole(theirs: Any) -> None:
    if theirs.rwkv.layers_are_rescaled and theirs.config.rescale_every > 0:
        raise NotImplementedError(
            "RWKV4Config: the first forward of transformers' model in eval mode divides weights in "
            "place; model must be one before that forward, or in train mode after a forward, or "
            f"have rescale_every=0, got rescale_every={theirs.config.rescale_every}"
        )


@dataclass(frozen=True)
class RWKV4Config(RWKVConfig):
    """Config of an RWKV-4.

    Args:
        hidden_dim, l2_wrap: as in RWKVConfig.
        norm_eps: epsilon of the norms; transformers' model has 1e-5 before the head always.

    Reference:
        Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", 2023, arXiv 2305.13048.
    """

    architecture = "rwkv4"
    hf = Counterpart(
        "RwkvForCausalLM",
        {
            "vocab_size": "vocab_size",
            "dim": "hidden_size",
            "num_layers": "num_hidden_layers",
            "tie_embeddings": "tie_word_embeddings",
        },
        (
            (r"^lm_head", "head"),
            (r"^(?!head)", "rwkv."),
            (r"embed_tokens", "embeddings"),
            (r"embed_norm", "blocks.0.pre_ln"),
            (r"rwkv\.norm", "rwkv.ln_out"),
            (r"layers", "blocks"),
            (r"input_layernorm", "ln1"),
            (r"post_attention_layernorm", "ln2"),
            (r"mixer", "attention"),
            (r"mlp", "feed_forward"),
            (r"(x|time_maa)_k$", "time_mix_key"),
            (r"(x|time_maa)_v$", "time_mix_value"),
            (r"(x|time_maa)_r$", "time_mix_receptance"),
        ),
        fixed={
            "layer_norm_epsilon": 1e-5,
            "attention_hidden_size": lambda c: c.dim,
            "intermediate_size": lambda c: c.hidden_dim or 4 * c.dim,
        },
        conversions=(Conversion(_one_epsilon, _hidden_from_hf),),
        complemented=r"time_mix_\w+$",
        require=_require_whole,
    )

    def mixer(self, layer: int) -> RWKV4TimeMix.Config:
        return RWKV4TimeMix.Config(**self.of_layer(layer))


@dataclass(frozen=True)
class RWKV5Config(RWKVConfig):
    """Config of an RWKV-5 (Eagle).

    Args:
        hidden_dim, norm_eps, l2_wrap: as in RWKVConfig; releases have 3.5 dim for `hidden_dim`.
        head_dim, head_norm_eps: size of a head of the time mix, and epsilon of its norm.

    Reference:
        Peng et al., "Eagle and Finch", 2024, arXiv 2404.05892.
    """

    architecture = "rwkv5"

    head_dim: Size = 64
    head_norm_eps: Epsilon = 64e-5

    def mixer(self, layer: int) -> RWKV5TimeMix.Config:
        return RWKV5TimeMix.Config(
            **self.of_layer(layer), head_dim=self.head_dim, head_norm_eps=self.head_norm_eps
        )


@dataclass(frozen=True)
class RWKV6Config(RWKVConfig):
    """Config of an RWKV-6 (Finch).

    Args:
        hidden_dim, norm_eps, l2_wrap, head_dim, head_norm_eps: as in RWKV5Config.
        mix_rank, decay_rank: inner widths of the projections of token shifts and of decays.

    Reference:
        Peng et al., "Eagle and Finch", 2024, arXiv 2404.05892.
    """

    architecture = "rwkv6"

    head_dim: Size = 64
    mix_rank: Size = 32
    decay_rank: Size = 64
    head_norm_eps: Epsilon = 64e-5

    def mixer(self, layer: int) -> RWKV6TimeMix.Config:
        return RWKV6TimeMix.Config(
            **self.of_layer(layer),
            head_dim=self.head_dim,
            mix_rank=self.mix_rank,
            decay_rank=self.decay_rank,
            head_norm_eps=self.head_norm_eps,
        )


@dataclass(frozen=True)
class RWKV7Config(RWKVConfig):
    """Config of an RWKV-7 (Goose).

    Args:
        hidden_dim, norm_eps, l2_wrap: as in RWKVConfig.
        head_dim, decay_rank, a_rank, v_rank, gate_rank, head_norm_eps: as in RWKV7TimeMix.

    Reference:
        Peng et al., "RWKV-7 Goose", 2025, arXiv 2503.14456.
    """

    architecture = "rwkv7"

    head_dim: Size = 64
    decay_rank: Size | None = None
    a_rank: Size | None = None
    v_rank: Size | None = None
    gate_rank: Size | None = None
    head_norm_eps: Epsilon = 64e-5

    def mixer(self, layer: int) -> RWKV7TimeMix.Config:
        return RWKV7TimeMix.Config(
            **self.of_layer(layer),
            head_dim=self.head_dim,
            decay_rank=self.decay_rank,
            a_rank=self.a_rank,
            v_rank=self.v_rank,
            gate_rank=self.gate_rank,
            head_norm_eps=self.head_norm_eps,
        )
