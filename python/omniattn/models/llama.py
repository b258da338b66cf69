"""Llama (Touvron et al. 2023, arXiv 2302.13971; Llama 3: arXiv 2407.21783).

RMSNorm in front, grouped-query attention with half-split rotary embedding, SwiGLU, no biases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from omniattn.models.decoder import Decoder
from omniattn.models.family import GroupedQueryConfig
from omniattn.reference import scaling_from_hf, scaling_to_hf

if TYPE_CHECKING:
    from transformers import LlamaConfig as HFLlamaConfig
    from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class LlamaConfig(GroupedQueryConfig):
    """Sizes and options of a Llama, and conversion from and to those of Hugging Face."""

    architecture = "llama"

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Llama:
        return Llama(self, device=device, dtype=dtype)

    @classmethod
    def from_hf(cls, config: HFLlamaConfig) -> LlamaConfig:
        """From a transformers LlamaConfig.

        Raises:
            NotImplementedError: for biases or another activation.
            ValueError: for an unknown rotary scaling.
        """
        rope = dict(config.rope_parameters or {})
        scaling = scaling_from_hf(rope, max_positions=config.max_position_embeddings)
        for name, supported in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
        ):
            if getattr(config, name) != supported:
                raise NotImplementedError(
                    f"LlamaConfig: {name} must be {supported!r}, "
                    f"got {name}={getattr(config, name)!r}"
                )
        heads, head_dim = config.num_attention_heads, config.head_dim
        if head_dim is not None and heads * head_dim == config.hidden_size:
            head_dim = None
        return cls(
            vocab_size=config.vocab_size,
            dim=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads or heads,
            hidden_dim=config.intermediate_size,
            head_dim=head_dim,
            max_positions=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_base=rope["rope_theta"],
            rope_scaling=scaling,
            tie_embeddings=config.tie_word_embeddings,
            init_std=config.initializer_range,
        )

    def to_hf(self) -> HFLlamaConfig:
        """To a transformers LlamaConfig."""
        from transformers import LlamaConfig as HFLlamaConfig

        rope = scaling_to_hf(self.rope_scaling) | {"rope_theta": self.rope_base}
        return HFLlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.dim,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            intermediate_size=self.hidden_dim,
            head_dim=self.head_dim or self.dim // self.num_heads,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=self.tie_embeddings,
            initializer_range=self.init_std,
        )


class Llama(Decoder):
    """The shared decoder with a LlamaConfig, and conversion from and to Hugging Face.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Example:
        >>> model = Llama(LlamaConfig(dim=48, num_layers=2))
        >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 256])
    """

    config: LlamaConfig

    @classmethod
    def from_hf(cls, model: LlamaForCausalLM, *, backend: str | None = None) -> Llama:
        """A copy of a transformers LlamaForCausalLM, on its device and in its dtype.

        Both keep rotary pairs half-split, so the weights are equal under equal names.
        """
        weight = model.model.embed_tokens.weight
        config = replace(LlamaConfig.from_hf(model.config), backend=backend)
        ours = cls(config, device=weight.device, dtype=weight.dtype)
        state = {name.removeprefix("model."): w for name, w in model.state_dict().items()}
        if config.tie_embeddings:
            state.pop("lm_head.weight", None)
        ours.load_state_dict(state)
        return ours.train(model.training)

    def to_hf(self) -> LlamaForCausalLM:
        """A copy as a transformers LlamaForCausalLM, on the same device and in the same dtype."""
        from transformers import LlamaForCausalLM

        weight = self.embed_tokens.weight
        model = LlamaForCausalLM(self.config.to_hf())
        torch.nn.Module.to(model, weight.device, weight.dtype)
        state = {
            name if name.startswith("lm_head.") else f"model.{name}": w
            for name, w in self.state_dict().items()
        }
        state["lm_head.weight"] = self.head_weight
        model.load_state_dict(state)
        model.train(self.training)
        return model
