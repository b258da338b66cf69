"""Zamba: Mamba with heads, and one transformer block shared by all hybrid layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from omniattn.models.decoders.decoder import Decoder
from omniattn.models.decoders.zamba2 import Zamba2, check_wiring, hybrid_weights, layers_to_hf
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import DecoderBlock, Mamba, RMSNorm
from omniattn.modules.base.fields import Epsilon, Size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _to_hf(ours: ZambaConfig) -> dict[str, Any]:
    return layers_to_hf(ours) | {
        "mamba_dt_rank": ours.dt_rank or math.ceil(ours.dim / 16),
        "attention_hidden_size": 2 * ours.dim,
        "attention_head_dim": ours.head_dim,
    }


def _from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    kinds = theirs.layers_block_type
    rank = theirs.mamba_dt_rank
    return {
        "hybrid_layers": tuple(i for i, kind in enumerate(kinds) if kind == "hybrid"),
        "dt_rank": None if rank == math.ceil(theirs.hidden_size / 16) else rank,
    }


@dataclass(frozen=True)
class ZambaConfig(Decoder.Config):
    """Sizes and options of a Zamba.

    Args:
        hybrid_layers: layers that add the output of the shared transformer to their Mamba's input;
            the other layers are Mamba only.
        num_heads, num_kv_heads, hidden_dim: sizes of the shared transformer, whose heads have the
            size 2 dim / num_heads.
        mamba_heads, d_state, d_conv, expand, dt_rank, conv_bias, mamba_bias: of the Mambas, as in
            :class:`omniattn.modules.Mamba`.
        norm_eps: epsilon of all norms.
        tie_embeddings: the head shares the embedding's weight; True by default.

    Reference:
        Glorioso et al., "Zamba: A Compact 7B SSM Hybrid Model", 2024, arXiv 2405.16712.
    """

    architecture = "zamba"
    hf = Counterpart(
        "ZambaForCausalLM",
        {
            "vocab_size": "vocab_size",
            "dim": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "hidden_dim": "intermediate_size",
            "mamba_heads": "n_mamba_heads",
            "d_state": "mamba_d_state",
            "d_conv": "mamba_d_conv",
            "expand": "mamba_expand",
            "conv_bias": "mamba_conv_bias",
            "mamba_bias": "mamba_proj_bias",
            "norm_eps": "rms_norm_eps",
            "init_std": "initializer_range",
        },
        (
            (r"^norm", "final_layernorm"),
            (r"^(?!lm_head)", "model."),
            (r"([qkvo]_proj)", r"self_attn.\1"),
            (r"gate_up_proj", "feed_forward.{gate_proj,up_proj}"),
            (r"shared_transf\.down_proj", "shared_transf.feed_forward.down_proj"),
            (r"\.mixer", ".mamba"),
            (r"(x|dt)_proj\.(weight|bias)", r"\1_proj_\2"),
        ),
        alternating=r"mamba\.in_proj",
        fixed={
            "hidden_act": "gelu",
            "hidden_mamba_act": "silu",
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
        },
        conversions=(Conversion(_to_hf, _from_hf),),
    )
    #: Options of Zamba2's wiring that Zamba lacks.
    num_transformers = 1
    adapter_rank = 0
    adapt_attention = False
    bias = False

    tie_embeddings: bool = True
    hybrid_layers: tuple[int, ...] = (1, 3)
    num_heads: Size = 6
    num_kv_heads: Size = 6
    hidden_dim: Size = 512
    mamba_heads: Size = 2
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: Size | None = None
    conv_bias: bool = True
    mamba_bias: bool = False
    norm_eps: Epsilon = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wiring(self)

    @property
    def head_dim(self) -> int:
        """Head size of the shared transformer."""
        return 2 * self.dim // self.num_heads

    @property
    def counterpart(self) -> Counterpart:
        """Returns `hf` with the weight names that depend on which layers are hybrid."""
        own = hybrid_weights(self, "shared_transf")
        return replace(self.hf, weights=(*own, *self.hf.weights))

    @property
    def norm(self) -> RMSNorm.Config:
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    def block(self, layer: int) -> DecoderBlock.Config:
        mixer = Mamba.Config(
            self.dim,
            self.d_state,
            self.d_conv,
            self.expand,
            dt_rank=self.dt_rank,
            conv_bias=self.conv_bias,
            bias=self.mamba_bias,
            num_heads=self.mamba_heads,
            **self.common,
        )
        return DecoderBlock.Config(
            mixer,
            None,
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Zamba2:
        return Zamba2(self, device=device, dtype=dtype)
