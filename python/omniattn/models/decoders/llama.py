"""Llama (Touvron et al. 2023, arXiv 2302.13971; Llama 3: arXiv 2407.21783).

Pre-norm with RMSNorm, grouped-query attention with half-split RoPE, SwiGLU, no biases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omniattn.models.decoders.decoder import Decoder
from omniattn.models.decoders.family import HEAD_DIM, GroupedConfig, llama_counterpart


@dataclass(frozen=True)
class LlamaConfig(GroupedConfig):
    """Sizes and options of a Llama.

    Args:
        num_kv_heads: number of key and value heads.
        head_dim: size of a head, default dim / num_heads.
    """

    architecture = "llama"
    hf = llama_counterpart(
        "LlamaForCausalLM",
        {"num_kv_heads": "num_key_value_heads"},
        {"attention_bias": False, "mlp_bias": False},
        HEAD_DIM,
    )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Llama:
        return Llama(self, device=device, dtype=dtype)


class Llama(Decoder):
    """The shared decoder with a LlamaConfig.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Example:
        >>> model = Llama(LlamaConfig(dim=48, num_layers=2))
        >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 256])
    """

    config: LlamaConfig
