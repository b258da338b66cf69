"""Mixture of memories of `fla.layers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn import modules
from omniattn.checks.arguments import require_choice
from omniattn.compat._errors import require_form, require_real
from omniattn.compat.fla_layers.base import (
    get_layer_cache,
    repad_hidden_states,
    unpad_hidden_states,
    update_layer_cache,
)
from omniattn.modules.base.jagged import Sequences


class MomAttention(modules.MixtureOfMemories):
    """Computes :class:`omniattn.modules.MixtureOfMemories`, with fla's arguments and results.

    Args:
        hidden_size: width of x and y.
        head_dim, num_heads: width and number of heads.
        expand_v: width of a head of v, as a multiple of head_dim.
        mode: "chunk" or "fused_recurrent"; has no effect.
        use_output_gate: True for a gate of the outputs.
        use_short_conv, conv_size, conv_bias: short convolutions; without them q, k and v are SiLU
            of their projections.
        layer_idx: number of the layer, for a cache.
        norm_eps: eps of the output norm.
        num_memories, topk: number of memories, and number that a token uses.
        capacity: has no effect, as in fla.
        shared_mem: True for one more memory with all tokens.
        single_kv_proj: True for one projection of all memories.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        head_dim: int = 256,
        num_heads: int = 4,
        expand_v: float = 2,
        mode: str = "chunk",
        use_output_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        num_memories: int = 8,
        topk: int = 2,
        capacity: float = 1.0,
        shared_mem: bool = False,
        single_kv_proj: bool = False,
    ) -> None:
        require_choice("MomAttention", "mode", mode, ("chunk", "fused_recurrent"))
        config = modules.MixtureOfMemories.Config(
            hidden_size,
            num_heads,
            head_dim=head_dim,
            v_head_dim=int(head_dim * expand_v),
            conv_size=conv_size if use_short_conv else 0,
            conv_bias=conv_bias,
            gate="silu" if use_output_gate else None,
            norm_eps=norm_eps,
            num_memories=num_memories,
            top_k=topk,
            shared_memory=shared_mem,
            shared_projections=single_kv_proj,
        )
        super().__init__(config)
        self.mode, self.layer_idx = mode, layer_idx

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any, Tensor]:
        """Returns y, None, the cache, and the router's logits (B * T, num_memories).

        `cu_seqlens` are the boundaries of packed sequences.
        """
        op = "MomAttention"
        require_real(op, hidden_states=hidden_states)
        require_form(op, "hidden_states", hidden_states, "B, T, hidden_size")
        batch, tokens = hidden_states.shape[:2]
        found = get_layer_cache(self, past_key_values)
        x, indices, cu = unpad_hidden_states(
            hidden_states, kwargs.get("cu_seqlens"), attention_mask, tokens
        )
        state = None if found is None else found["recurrent_state"]
        parts = None if cu is None else torch.nested.nested_tensor_from_jagged(x[0], cu.long())
        y, after = self._mix(x, state, Sequences(parts))
        update_layer_cache(self, past_key_values, recurrent_state=after, offset=tokens)
        logits: Tensor = self.gate(hidden_states).flatten(0, 1)
        return repad_hidden_states(y, indices, batch, tokens), None, past_key_values, logits
