"""Llama (Touvron et al. 2023, arXiv 2302.13971; Llama 3: arXiv 2407.21783).

RMSNorm in front, grouped-query attention with half-split rotary embedding, SwiGLU, no biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from omniattn.models.decoder import Decoder
from omniattn.models.family import HF_OPTIONS, HF_WEIGHTS, GroupedQueryConfig
from omniattn.models.hf import Counterpart


@dataclass(frozen=True)
class LlamaConfig(GroupedQueryConfig):
    """Sizes and options of a Llama."""

    architecture = "llama"
    hf = Counterpart(
        "LlamaForCausalLM", HF_OPTIONS | {"num_kv_heads": "num_key_value_heads"}, HF_WEIGHTS
    )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Llama:
        return Llama(self, device=device, dtype=dtype)

    def hf_values(self) -> dict[str, Any]:
        return super().hf_values() | {"attention_bias": False, "mlp_bias": False}


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
