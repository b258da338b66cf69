"""Mamba and FalconMamba: RMSNorm and selective scans, without feed-forward layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omniattn.models.decoders.decoder import Decoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import DecoderBlock, Mamba, RMSNorm
from omniattn.modules.base.fields import Epsilon, Size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _rank_to_hf(ours: Any) -> dict[str, Any]:
    return {"time_step_rank": ours.dt_rank or math.ceil(ours.dim / 16)}


def _rank_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    rank: int = theirs.time_step_rank
    return {"dt_rank": None if rank == math.ceil(theirs.hidden_size / 16) else rank}


_HF = Counterpart(
    "MambaForCausalLM",
    {
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "d_state": "state_size",
        "d_conv": "conv_kernel",
        "expand": "expand",
        "dt_min": "time_step_min",
        "dt_max": "time_step_max",
        "dt_init": "time_step_init_scheme",
        "dt_scale": "time_step_scale",
        "dt_init_floor": "time_step_floor",
        "conv_bias": "use_conv_bias",
        "bias": "use_bias",
        "norm_eps": "layer_norm_epsilon",
        "init_std": "initializer_range",
        "residual_in_fp32": "residual_in_fp32",
        "tie_embeddings": "tie_word_embeddings",
    },
    (
        (r"^embed_tokens", "backbone.embeddings"),
        (r"^norm", "backbone.norm_f"),
        (r"^layers", "backbone.layers"),
        (r"input_layernorm", "norm"),
    ),
    fixed={"hidden_act": "silu", "intermediate_size": lambda c: c.expand * c.dim},
    conversions=(Conversion(_rank_to_hf, _rank_from_hf),),
)


@dataclass(frozen=True)
class MambaConfig(Decoder.Config):
    """Sizes and options of a Mamba.

    Args:
        d_state, d_conv, expand, dt_rank: as in :class:`omniattn.modules.Mamba`.
        dt_min, dt_max, dt_init, dt_scale, dt_init_floor, conv_bias, bias: as there.
        norm_eps: epsilon of the norms.

    Reference:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv 2312.00752.
    """

    architecture = "mamba"
    hf = _HF

    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: Size | None = None
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init: str = "random"
    dt_scale: float = 1.0
    dt_init_floor: float = 1e-4
    conv_bias: bool = True
    bias: bool = False
    norm_eps: Epsilon = 1e-5

    @property
    def norm(self) -> RMSNorm.Config:
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def mixer(self) -> Mamba.Config:
        """Returns the config of all layers' token mixer."""
        return Mamba.Config(
            self.dim,
            self.d_state,
            self.d_conv,
            self.expand,
            None,
            self.dt_rank,
            self.dt_min,
            self.dt_max,
            self.dt_init,
            self.dt_scale,
            self.dt_init_floor,
            self.conv_bias,
            self.bias,
            **self.common,
        )

    def block(self, layer: int) -> DecoderBlock.Config:
        return DecoderBlock.Config(
            self.mixer,
            None,
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )


@dataclass(frozen=True)
class FalconMambaConfig(MambaConfig):
    """Sizes and options of a FalconMamba: Mamba with weightless norms of dt, B and C.

    Args:
        mixer_norm_eps: epsilon of these norms.

    Reference:
        Zuo et al., "Falcon Mamba: The First Competitive Attention-free 7B Language Model", 2024,
        arXiv 2410.05355.
    """

    architecture = "falcon_mamba"
    hf = replace(
        _HF,
        model="FalconMambaForCausalLM",
        options={**_HF.options, "mixer_norm_eps": "mixer_rms_eps"},
    )

    mixer_norm_eps: Epsilon = 1e-6

    @property
    def mixer(self) -> Mamba.Config:
        return replace(super().mixer, norm_eps=self.mixer_norm_eps, norm_weights=False)
