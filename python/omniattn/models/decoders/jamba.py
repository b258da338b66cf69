"""Jamba: Mamba with attention in some layers and experts in some."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omniattn.models.decoders.decoder import Decoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import Attention, DecoderBlock, GatedMLP, Mamba, MoE, RMSNorm
from omniattn.modules.base.fields import Epsilon, Size
from omniattn.modules.base.layer import LayerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _rank_to_hf(ours: Any) -> dict[str, Any]:
    return {"mamba_dt_rank": ours.dt_rank or math.ceil(ours.dim / 16)}


def _rank_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    rank: int = theirs.mamba_dt_rank
    return {"dt_rank": None if rank == math.ceil(theirs.hidden_size / 16) else rank}


@dataclass(frozen=True)
class JambaConfig(Decoder.Config):
    """Sizes and options of a Jamba. There is no position encoding; Mamba layers order the tokens.

    Args:
        num_heads, num_kv_heads: numbers of attention heads.
        hidden_dim: hidden size of the SwiGLUs and of each expert.
        attention_period, attention_offset: layers i with i % period == offset have attention, all
            others Mamba, with norms of dt, B and C.
        experts, top_k: number of experts in layers with experts, and of experts per token; 1 expert
            disables routing.
        expert_period, expert_offset: layers i with i % period == offset have experts.
        d_state, d_conv, expand, dt_rank, conv_bias, bias: as in :class:`omniattn.modules.Mamba`.
        norm_eps: epsilon of all norms.

    Reference:
        Lieber et al., "Jamba: A Hybrid Transformer-Mamba Language Model", 2024, arXiv 2403.19887.

    Example:
        >>> config = JambaConfig(num_layers=16)
        >>> [i for i in range(16) if type(config.mixer(i)).layer.__name__ == "Attention"]
        [4, 12]
    """

    architecture = "jamba"
    hf = Counterpart(
        "JambaForCausalLM",
        {
            "vocab_size": "vocab_size",
            "dim": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "hidden_dim": "intermediate_size",
            "attention_period": "attn_layer_period",
            "attention_offset": "attn_layer_offset",
            "experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "expert_period": "expert_layer_period",
            "expert_offset": "expert_layer_offset",
            "d_state": "mamba_d_state",
            "d_conv": "mamba_d_conv",
            "expand": "mamba_expand",
            "conv_bias": "mamba_conv_bias",
            "bias": "mamba_proj_bias",
            "norm_eps": "rms_norm_eps",
            "init_std": "initializer_range",
            "tie_embeddings": "tie_word_embeddings",
        },
        (
            (r"^norm", "final_layernorm"),
            (r"^(?!lm_head)", "model."),
            (r"mixer\.([qkvo]_proj)", r"self_attn.\1"),
            (r"mixer", "mamba"),
            (r"post_attention_layernorm", "pre_ff_layernorm"),
            (r"mlp\.gate\.", "mlp.router."),
            (r"mlp", "feed_forward"),
        ),
        fixed={"hidden_act": "silu", "attention_dropout": 0.0},
        conversions=(Conversion(_rank_to_hf, _rank_from_hf),),
    )

    num_layers: Size = 8  # one has attention
    num_heads: Size = 6
    num_kv_heads: Size = 2
    hidden_dim: Size = 512
    attention_period: int = 8
    attention_offset: int = 4
    experts: Size = 16
    top_k: Size = 2
    expert_period: int = 2
    expert_offset: int = 1
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: Size | None = None
    conv_bias: bool = True
    bias: bool = False
    norm_eps: Epsilon = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in ("attention", "expert"):
            period, offset = (getattr(self, f"{kind}_{name}") for name in ("period", "offset"))
            if not 0 <= offset < period:
                raise ValueError(
                    f"JambaConfig: {kind}_offset must be in [0, {kind}_period), got "
                    f"{kind}_offset={offset}, {kind}_period={period}"
                )

    @property
    def norm(self) -> RMSNorm.Config:
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    def mixer(self, layer: int) -> LayerConfig:
        """Returns the config of a layer's token mixer."""
        if layer % self.attention_period == self.attention_offset:
            return Attention.Config(self.dim, self.num_heads, self.num_kv_heads, **self.common)
        return Mamba.Config(
            self.dim,
            self.d_state,
            self.d_conv,
            self.expand,
            dt_rank=self.dt_rank,
            conv_bias=self.conv_bias,
            bias=self.bias,
            norm_eps=self.norm_eps,
            **self.common,
        )

    def feed_forward(self, layer: int) -> LayerConfig:
        """Returns the config of a layer's channel mixer."""
        if self.experts == 1 or layer % self.expert_period != self.expert_offset:
            return GatedMLP.Config(self.dim, self.hidden_dim, **self.common)
        own: dict[str, Any] = {"renormalize": False, "balance_coefficient": 1e-3}
        return MoE.Config.mixtral(
            self.dim, self.hidden_dim, self.experts, self.top_k, **own, **self.common
        )

    def block(self, layer: int) -> DecoderBlock.Config:
        return DecoderBlock.Config(
            self.mixer(layer),
            self.feed_forward(layer),
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )
