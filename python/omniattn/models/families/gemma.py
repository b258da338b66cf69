"""Gemma 2: norms around each layer, capped scores and logits, windows in every other layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omniattn.models.decoders.family import HEAD_DIM, WINDOWS, WindowedConfig, llama_counterpart
from omniattn.models.hf import Conversion
from omniattn.modules import Attention, DecoderBlock, GatedMLP, RMSNorm
from omniattn.modules.base.fields import Epsilon, Size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _scores_to_hf(ours: Gemma2Config) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": ours.query_scalar or ours.attention(0).head_size,
        "attn_logit_softcapping": ours.softcap or None,
        "final_logit_softcapping": ours.logit_softcap or None,
    }


def _scores_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    scalar = theirs.query_pre_attn_scalar
    return {
        "query_scalar": None if scalar == theirs.head_dim else scalar,
        "softcap": theirs.attn_logit_softcapping or 0.0,
        "logit_softcap": theirs.final_logit_softcapping or 0.0,
    }


@dataclass(frozen=True)
class Gemma2Config(WindowedConfig):
    """Config of a Gemma 2; norms have the factor 1 + w, and embeddings the factor sqrt(dim).

    Args:
        num_kv_heads, head_dim: as in LlamaConfig.
        window: number of keys that a windowed layer sees, counting the token's own.
        schedule: which layers have the window, as in :func:`layer_schedule`.
        query_scalar: scores are divided by its square root; default: the size of a head.
        softcap, logit_softcap: caps of the scores and of the logits, 0 for none.

    Reference:
        Gemma Team, "Gemma 2", 2024, arXiv 2408.00118.
    """

    architecture = "gemma2"
    hf = replace(
        llama_counterpart(
            "Gemma2ForCausalLM",
            {"num_kv_heads": "num_key_value_heads"},
            {},
            HEAD_DIM,
            WINDOWS,
            Conversion(_scores_to_hf, _scores_from_hf),
            weights=(
                (r"post_attention_layernorm", "pre_feedforward_layernorm"),
                (r"mixer_output_norm", "post_attention_layernorm"),
                (r"mlp_output_norm", "post_feedforward_layernorm"),
            ),
        ),
        fixed={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_bidirectional_attention": None,
        },
    )

    tie_embeddings: bool = True
    norm_eps: Epsilon = 1e-6
    window: Size | None = 4096
    schedule: str | tuple[str, ...] = ("swa", "full")
    query_scalar: Size | None = None
    softcap: float = 50.0
    logit_softcap: float = 30.0

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.dim)

    @property
    def norm(self) -> RMSNorm.Config:
        return replace(super().norm, offset=1.0)

    def attention(self, layer: int) -> Attention.Config:
        scale = None if self.query_scalar is None else self.query_scalar**-0.5
        return replace(super().attention(layer), scale=scale, softcap=self.softcap)

    def feed_forward(self, layer: int) -> GatedMLP.Config:
        return GatedMLP.Config(self.dim, self.hidden_dim, "geglu_tanh", **self.common)

    def block(self, layer: int) -> DecoderBlock.Config:
        return replace(super().block(layer), placement="sandwich")
