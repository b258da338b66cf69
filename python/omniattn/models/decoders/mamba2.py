"""Mamba-2: RMSNorm and Mamba2 layers, without feed-forward layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omniattn.models.decoders.decoder import Decoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import DecoderBlock, Mamba2, RMSNorm
from omniattn.modules.base.fields import Epsilon, Size


@dataclass(frozen=True)
class Mamba2Config(Decoder.Config):
    """Sizes and options of a Mamba-2.

    Args:
        d_state, d_conv, expand, headdim, ngroups, dt_limit, bias, conv_bias: as in Mamba2.
        norm_eps: epsilon of all norms.

    Reference:
        Dao and Gu, "Transformers are SSMs", 2024, arXiv 2405.21060.
    """

    architecture = "mamba2"
    hf = Counterpart(
        "Mamba2ForCausalLM",
        {
            "vocab_size": "vocab_size",
            "dim": "hidden_size",
            "num_layers": "num_hidden_layers",
            "d_state": "state_size",
            "d_conv": "conv_kernel",
            "expand": "expand",
            "headdim": "head_dim",
            "ngroups": "n_groups",
            "bias": "use_bias",
            "conv_bias": "use_conv_bias",
            "norm_eps": "layer_norm_epsilon",
            "residual_in_fp32": "residual_in_fp32",
            "tie_embeddings": "tie_word_embeddings",
            "init_std": "initializer_range",
        },
        (
            (r"^(?!lm_head)", "backbone."),
            (r"embed_tokens", "embeddings"),
            (r"^backbone\.norm", "backbone.norm_f"),
            (r"input_layernorm", "norm"),
        ),
        fixed={"hidden_act": "silu", "num_heads": lambda c: c.expand * c.dim // c.headdim},
        conversions=(
            Conversion(
                lambda ours: {"time_step_limit": ours.dt_limit},
                lambda theirs: {"dt_limit": tuple(theirs.time_step_limit)},
            ),
        ),
    )

    d_state: int = 128
    d_conv: int = 4
    expand: int = 2
    headdim: Size = 64
    ngroups: Size = 1
    dt_limit: tuple[float, float] = (0.0, math.inf)
    bias: bool = False
    conv_bias: bool = True
    norm_eps: Epsilon = 1e-5

    @property
    def norm(self) -> RMSNorm.Config:
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    def block(self, layer: int) -> DecoderBlock.Config:
        mixer = Mamba2.Config(
            self.dim,
            self.d_state,
            self.d_conv,
            self.expand,
            self.headdim,
            self.ngroups,
            self.dt_limit,
            self.bias,
            self.conv_bias,
            self.norm_eps,
            init_std=self.init_std,
            backend=self.backend,
        )
        return DecoderBlock.Config(
            mixer,
            None,
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )
