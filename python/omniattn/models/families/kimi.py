"""Kimi Linear: Kimi delta attention in most layers, latent attention without positions in some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omniattn.checks.arguments import shown
from omniattn.models.decoders.deepseek import FIRST_DENSE, LATENT_NAMES, LatentExpertsConfig
from omniattn.models.decoders.family import llama_counterpart, shortest_period
from omniattn.models.hf import Conversion
from omniattn.modules import KimiDeltaAttention, MoE, MultiHeadLatentAttention
from omniattn.modules.base.fields import Epsilon, Size
from omniattn.modules.base.layer import LayerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_KINDS = ("linear", "full")


def _to_hf(ours: KimiLinearConfig) -> dict[str, Any]:
    if ours.mscale != 1.0:
        raise NotImplementedError(
            f"KimiLinearConfig: mscale must be 1 in transformers, got mscale={ours.mscale}"
        )
    kinds = [f"{ours.kind(layer)}_attention" for layer in range(ours.num_layers)]
    # The default is an id of the release's vocabulary, and needs an embedding.
    return {"layer_types": kinds, "pad_token_id": None}


def _from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    kinds = tuple(kind.removesuffix("_attention") for kind in theirs.layer_types)
    return {"schedule": shortest_period(kinds)}


_COUNTERPART = llama_counterpart(
    "KimiLinearForCausalLM",
    {
        **LATENT_NAMES,
        "experts": "num_local_experts",
        "groups": "n_group",
        "top_groups": "topk_group",
        "linear_heads": "linear_num_heads",
        "linear_head_dim": "linear_head_dim",
        "conv_size": "linear_conv_kernel_dim",
    },
    {
        "num_key_value_heads": lambda c: c.num_heads,
        "norm_topk_prob": True,
        "attention_bias": False,
    },
    weights=(
        (r"mixer\.f_proj\.0", "mixer.forget_gate.f_a_proj"),
        (r"mixer\.f_proj\.1", "mixer.forget_gate.f_b_proj"),
        (r"mixer\.(A_log|dt_bias)", r"mixer.forget_gate.\1"),
        (r"mixer\.g_proj\.0", "mixer.g_a_proj"),
        (r"mixer\.g_proj\.1", "mixer.g_b_proj"),
        (r"mixer\.[qkv]_conv1d", "mixer.conv1d"),
    ),
    interleaved={r"self_attn\.conv1d": lambda c: 1},
)


@dataclass(frozen=True)
class KimiLinearConfig(LatentExpertsConfig):
    """Config of a Kimi Linear, in which no layer has positions.

    Args:
        q_lora_rank, kv_lora_rank, qk_nope_dim, qk_rope_dim, v_dim, mscale: as in MLAConfig; the
            part of `qk_rope_dim` is shared by the heads, and not rotated.
        dense_layers, expert_dim, experts, top_k, shared, groups, top_groups, route_scale: as in
            DeepSeekConfig.
        schedule: kinds of the layers, repeated: "linear" for Kimi delta attention, "full" for
            latent attention.
        linear_heads, linear_head_dim: number and size of the heads of Kimi delta attention.
        conv_size: taps of its convolutions.
        latent_norm_eps: epsilon of the norms of latents.
        bias_rate: step size of the routers' bias updates.

    Reference:
        Kimi Team, "Kimi Linear", 2025, arXiv 2510.26692.
    """

    architecture = "kimi-linear"
    hf = replace(_COUNTERPART, conversions=(Conversion(_to_hf, _from_hf), FIRST_DENSE))

    route_scale: float = 2.446
    schedule: tuple[str, ...] = ("linear", "linear", "linear", "full")
    linear_heads: Size = 3
    linear_head_dim: Size = 64
    conv_size: Size = 4
    latent_norm_eps: Epsilon = 1e-6
    bias_rate: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedule or not set(self.schedule) <= set(_KINDS):
            raise ValueError(
                "KimiLinearConfig: schedule must be kinds of layers, 'linear' and 'full', "
                f"got schedule={shown(self.schedule)}"
            )

    def kind(self, layer: int) -> str:
        """Returns the kind of a layer, "linear" or "full"."""
        return self.schedule[layer % len(self.schedule)]

    @property
    def rope(self) -> None:
        return None

    def attention(self, layer: int) -> MultiHeadLatentAttention.Config:
        return replace(super().attention(layer), norm_eps=self.latent_norm_eps, rotary=False)

    def mixer(self, layer: int) -> LayerConfig:
        if self.kind(layer) == "full":
            return self.attention(layer)
        return KimiDeltaAttention.Config(
            self.dim,
            self.linear_heads,
            head_dim=self.linear_head_dim,
            conv_size=self.conv_size,
            norm_eps=self.norm_eps,
            gate_bias=False,
            init_std=self.init_std,
            backend=self.backend,
        )

    def routed(self) -> MoE.Config:
        options = {"bias_rate": self.bias_rate, **self.expert_options}
        return MoE.Config.deepseek_v3(
            self.dim, self.expert_dim, self.experts, self.top_k, **options
        )
