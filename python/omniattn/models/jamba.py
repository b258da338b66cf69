"""Jamba: a schedule of Mamba and attention, of feed-forward layers and mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omniattn.models.decoder import Decoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import Attention, DecoderBlock, GatedMLP, Mamba, MoE, RMSNorm

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _rank_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    rank = theirs.mamba_dt_rank
    return {"dt_rank": None if rank == math.ceil(theirs.hidden_size / 16) else rank}


@dataclass(frozen=True)
class JambaConfig(Decoder.Config):
    """Sizes and options. No layer is told positions: those of Mamba read the tokens in order.

    Args:
        num_heads, num_kv_heads: of attention.
        hidden_dim: of feed-forward layers and of experts.
        attention_period, attention_offset: layer i is attention if i % period == offset, Mamba
            otherwise.
        experts_period, experts_offset: layer i has experts if i % period == offset.
        experts, top_k: of a layer, and those of them that a token uses, whose weights are not
            renormalised.
        d_state, d_conv, expand, dt_rank, conv_bias, bias: as in Mamba.
        norm_eps: of all norms, those within Mamba too.

    Reference:
        Lieber et al., "Jamba: A Hybrid Transformer-Mamba Language Model", 2024, arXiv 2403.19887.

    Example:
        >>> config = JambaConfig(num_layers=16)
        >>> [i for i in range(16) if type(config.block(i).mixer).layer.__name__ == "Attention"]
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
            "experts_period": "expert_layer_period",
            "experts_offset": "expert_layer_offset",
            "experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "d_state": "mamba_d_state",
            "d_conv": "mamba_d_conv",
            "expand": "mamba_expand",
            "conv_bias": "mamba_conv_bias",
            "bias": "mamba_proj_bias",
            "norm_eps": "rms_norm_eps",
            "tie_embeddings": "tie_word_embeddings",
            "init_std": "initializer_range",
        },
        (
            (r"^(?!lm_head)", "model."),
            (r"^model\.norm", "model.final_layernorm"),
            (r"mixer(?=\.[qkvo]_proj)", "self_attn"),
            (r"mixer", "mamba"),
            (r"post_attention_layernorm", "pre_ff_layernorm"),
            (r"mlp\.gate\.", "mlp.router."),
            (r"mlp", "feed_forward"),
        ),
        fixed={"hidden_act": "silu", "attention_dropout": 0.0},
        conversions=(Conversion(lambda ours: {"mamba_dt_rank": ours.mamba.rank}, _rank_from_hf),),
    )

    num_heads: int = 6
    num_kv_heads: int = 2
    hidden_dim: int = 512
    attention_period: int = 8
    attention_offset: int = 4
    experts_period: int = 2
    experts_offset: int = 1
    experts: int = 16
    top_k: int = 2
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: int | None = None
    conv_bias: bool = True
    bias: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in ("attention", "experts"):
            period, offset = (getattr(self, f"{kind}_{name}") for name in ("period", "offset"))
            if not 0 <= offset < period:
                raise ValueError(
                    f"JambaConfig: {kind}_offset must be in [0, {kind}_period), "
                    f"got {kind}_offset={offset}, {kind}_period={period}"
                )

    @property
    def norm(self) -> RMSNorm.Config:
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def mamba(self) -> Mamba.Config:
        """Of the layers that are not attention."""
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

    def block(self, layer: int) -> DecoderBlock.Config:
        mixer: Attention.Config | Mamba.Config = self.mamba
        if layer % self.attention_period == self.attention_offset:
            mixer = Attention.Config(self.dim, self.num_heads, self.num_kv_heads, **self.common)
        mlp: GatedMLP.Config | MoE.Config = GatedMLP.Config(
            self.dim, self.hidden_dim, **self.common
        )
        if layer % self.experts_period == self.experts_offset:
            sizes = (self.dim, self.hidden_dim, self.experts, self.top_k)
            mlp = MoE.Config.of(*sizes, renormalize=False, balance_coefficient=1e-3, **self.common)
        return DecoderBlock.Config(
            mixer,
            mlp,
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )
