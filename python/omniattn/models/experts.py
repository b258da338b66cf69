"""Decoders of the Llama family whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omniattn.models.family import HF_OPTIONS, HF_WEIGHTS, GroupedQueryConfig
from omniattn.models.hf import Counterpart
from omniattn.modules import MLP, MoE
from omniattn.modules.layer import LayerConfig


@dataclass(frozen=True)
class MixtralConfig(GroupedQueryConfig):
    """Sizes of a Mixtral: each layer has `experts` SwiGLUs of `hidden_dim`, a token uses `top_k`.

    Reference:
        Jiang et al., "Mixtral of Experts", 2024, arXiv 2401.04088.
    """

    architecture = "mixtral"
    hf = Counterpart(
        "MixtralForCausalLM",
        HF_OPTIONS
        | {
            "num_kv_heads": "num_key_value_heads",
            "experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
        },
        HF_WEIGHTS,
    )

    experts: int = 8
    top_k: int = 2

    def feed_forward(self, layer: int) -> LayerConfig:
        return MoE.Config.mixtral(
            self.dim, self.hidden_dim, self.experts, self.top_k, **self.common
        )

    def hf_values(self) -> dict[str, Any]:
        return super().hf_values() | {"sliding_window": None, "router_jitter_noise": 0.0}


@dataclass(frozen=True)
class SwitchConfig(GroupedQueryConfig):
    """Sizes of a Switch Transformer's feed-forward layers in a decoder of the Llama family.

    Every other layer, from the second on, has `experts` ReLU layers of `hidden_dim`, of which a
    token uses one, while it has room; the others have one such layer.

    Reference:
        Fedus, Zoph, Shazeer, "Switch Transformers", 2021, arXiv 2101.03961.
    """

    architecture = "switch"

    experts: int = 8

    def feed_forward(self, layer: int) -> LayerConfig:
        if layer % 2 == 0:
            return MLP.Config(
                self.dim,
                self.hidden_dim,
                "relu",
                bias=False,
                **self.common,
            )
        return MoE.Config.switch(self.dim, self.hidden_dim, self.experts, **self.common)
