"""Qwen3-Next: Gated DeltaNet in most layers, gated attention in the others, experts in all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omniattn.checks.arguments import shown
from omniattn.models.decoders.family import HEAD_DIM, llama_counterpart, rope_to_hf, shortest_period
from omniattn.models.families.qwen import DENSE, EXPERTS, GROUPED, QwenExpertsConfig
from omniattn.models.hf import Conversion, Renames
from omniattn.modules import Attention, GatedDeltaNet, RMSNorm, RotaryEmbedding
from omniattn.modules.base.fields import Epsilon, Size
from omniattn.modules.base.layer import LayerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_KINDS = ("linear", "full")


def _to_hf(ours: Qwen3NextConfig) -> dict[str, Any]:
    rope = rope_to_hf(ours)["rope_parameters"]
    kinds = [f"{ours.kind(layer)}_attention" for layer in range(ours.num_layers)]
    return {
        "rope_parameters": rope | {"partial_rotary_factor": ours.rotary_share},
        "layer_types": kinds,
    }


def _from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    kinds = tuple(kind.removesuffix("_attention") for kind in theirs.layer_types)
    share = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    return {"schedule": shortest_period(kinds), "rotary_share": share}


def _weights(c: Qwen3NextConfig) -> Renames:
    linear = "|".join(str(i) for i in range(c.num_layers) if c.kind(i) == "linear")
    return (
        (rf"layers\.({linear})\.mixer", r"layers.\1.linear_attn"),
        (r"linear_attn\.[qkv]_conv1d", "linear_attn.conv1d"),
        (r"linear_attn\.[qkvg]_proj", "linear_attn.in_proj_qkvz"),
        (r"linear_attn\.[ba]_proj", "linear_attn.in_proj_ba"),
        (r"linear_attn\.o_norm", "linear_attn.norm"),
        (r"linear_attn\.o_proj", "linear_attn.out_proj"),
        (r"mixer\.g_proj", "mixer.q_proj"),
        (r"shared_experts", "shared_expert"),
    )


@dataclass(frozen=True)
class Qwen3NextConfig(QwenExpertsConfig):
    """Config of a Qwen3-Next; norms have the factor 1 + w, except those inside Gated DeltaNet.

    Args:
        num_kv_heads, head_dim: of attention, as in LlamaConfig.
        experts, top_k, expert_dim, shared_dim, renormalize, expert_period, dense_layers: as in
            QwenExpertsConfig.
        schedule: kinds of the layers, repeated: "linear" for Gated DeltaNet and "full" for
            attention with normed queries and keys and a gate for each number of each head.
        rotary_share: share of a head that attention rotates.
        linear_heads, linear_v_heads: number of heads of Gated DeltaNet's queries and keys, and of
            its values.
        linear_head_dim, linear_v_head_dim: sizes of these heads.
        conv_size: taps of its convolutions.

    Reference:
        Qwen Team, "Qwen3-Next", 2025; Yang et al., "Gated Delta Networks", 2024, arXiv 2412.06464.
    """

    architecture = "qwen3-next"
    hf = llama_counterpart(
        "Qwen3NextForCausalLM",
        {
            **GROUPED,
            **EXPERTS,
            "shared_dim": "shared_expert_intermediate_size",
            "linear_heads": "linear_num_key_heads",
            "linear_v_heads": "linear_num_value_heads",
            "linear_head_dim": "linear_key_head_dim",
            "linear_v_head_dim": "linear_value_head_dim",
            "conv_size": "linear_conv_kernel_dim",
        },
        {"attention_bias": False},
        HEAD_DIM,
        DENSE,
        Conversion(_to_hf, _from_hf),
        layer_weights=_weights,
        interleaved={
            r"linear_attn\.conv1d": lambda c: 1,
            r"in_proj_(qkvz|ba)": lambda c: c.linear_heads,
            r"self_attn\.q_proj": lambda c: c.num_heads,
        },
    )

    norm_eps: Epsilon = 1e-6
    renormalize: bool = True
    schedule: tuple[str, ...] = ("linear", "linear", "linear", "full")
    rotary_share: float = 0.25
    linear_heads: Size = 2
    linear_v_heads: Size = 4
    linear_head_dim: Size = 32
    linear_v_head_dim: Size = 32
    conv_size: Size = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedule or not set(self.schedule) <= set(_KINDS):
            raise ValueError(
                "Qwen3NextConfig: schedule must be kinds of layers, 'linear' and 'full', "
                f"got schedule={shown(self.schedule)}"
            )

    def kind(self, layer: int) -> str:
        """Returns the kind of a layer, "linear" or "full"."""
        return self.schedule[layer % len(self.schedule)]

    @property
    def norm(self) -> RMSNorm.Config:
        return replace(super().norm, offset=1.0)

    @property
    def rope(self) -> RotaryEmbedding.Config:
        rotary_dim = int(self.attention(0).head_size * self.rotary_share)
        return RotaryEmbedding.Config(rotary_dim, self.rope_base, self.rope_scaling)

    def attention(self, layer: int) -> Attention.Config:
        attention = replace(super().attention(layer), gate="elementwise", qk_norm="rms")
        return replace(attention, qk_norm_eps=self.norm_eps, qk_norm_offset=1.0)

    def mixer(self, layer: int) -> LayerConfig:
        if self.kind(layer) == "full":
            return self.attention(layer)
        return GatedDeltaNet.Config(
            self.dim,
            self.linear_heads,
            self.linear_v_heads,
            self.linear_head_dim,
            self.linear_v_head_dim,
            self.conv_size,
            norm_eps=self.norm_eps,
            init_std=self.init_std,
            backend=self.backend,
        )
