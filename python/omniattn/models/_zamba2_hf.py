"""What transformers calls Zamba2's layers and rotary embedding, and what it has not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from omniattn.models.zamba2 import Zamba2Config


def layers_to_hf(ours: Zamba2Config) -> dict[str, Any]:
    if not ours.tie_embeddings:
        raise NotImplementedError(
            "Zamba2Config: tie_embeddings must be True in transformers, which shares the "
            "transformers only then, got tie_embeddings=False"
        )
    if ours.adapt_attention and ours.num_kv_heads != ours.num_heads:
        raise NotImplementedError(
            "Zamba2Config: num_kv_heads must be num_heads where transformers adapts the attention, "
            f"got num_kv_heads={ours.num_kv_heads}, num_heads={ours.num_heads}"
        )
    kinds = ["linear_attention"] * ours.num_layers
    for layer in ours.hybrid_layers:
        kinds[layer] = "hybrid"
    return {"layers_block_type": kinds}


def rope_to_hf(ours: Zamba2Config) -> dict[str, Any]:
    base = 10000.0 if ours.rope_base is None else ours.rope_base
    rope = {"rope_type": "default", "rope_theta": base}
    return {"use_mem_rope": ours.rope_base is not None, "rope_parameters": rope}


def rope_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    rope = theirs.rope_parameters
    if not theirs.use_mem_rope:
        return {"rope_base": None}
    if rope["rope_type"] != "default":
        raise NotImplementedError(
            f"Zamba2Config: rope_type must be 'default', got rope_type={rope['rope_type']!r}"
        )
    return {"rope_base": rope["rope_theta"]}
