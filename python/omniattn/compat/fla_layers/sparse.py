"""Native sparse attention, MoBA and multi-head latent attention of `fla.layers`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from omniattn.compat._fla.attention import Boundaries, parallel_moba, parallel_nsa
from omniattn.compat._fla.norms import FusedRMSNormGated, RMSNorm
from omniattn.compat._fla.parts import RotaryEmbedding
from omniattn.compat.fla_layers.attention import SoftmaxLayer
from omniattn.compat.fla_layers.base import (
    Result,
    repad_hidden_states,
    unpad_input,
    update_layer_cache,
)


class NativeSparseAttention(SoftmaxLayer):
    """Native sparse attention with means of blocks as compressed keys, see `parallel_nsa`.

    Args:
        hidden_size: width of x and y.
        num_heads, num_kv_heads: number of heads of queries, and of keys and values; any ratio.
        head_dim: width of a head.
        qkv_bias: True for biases of q, k and v.
        block_size, block_counts: keys of a block, and selected blocks of a query.
        window_size: number of keys in the window.
        rope_theta: base of the rotary positions.
        max_position_embeddings: has no effect: tables of positions grow.
        layer_idx: number of the layer, for a cache.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 64,
        num_kv_heads: int | None = 4,
        head_dim: int = 64,
        qkv_bias: bool = False,
        block_size: int | None = 64,
        block_counts: Tensor | int | None = 16,
        window_size: int | None = 512,
        rope_theta: float | None = 10000.0,
        max_position_embeddings: int | None = None,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._sizes(num_heads * head_dim, 1.0, 1.0, num_heads)
        self._group(num_kv_heads)
        self.hidden_size, self.head_dim, self.qkv_bias = hidden_size, head_dim, qkv_bias
        self.kv_dim, self.layer_idx = self.key_dim_per_group, layer_idx
        self.block_size, self.block_counts, self.window = block_size, block_counts, window_size
        self.max_position_embeddings = max_position_embeddings
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.g_proj = nn.Linear(hidden_size, num_heads * 3, bias=False)
        self.o_proj = nn.Linear(self.key_dim, hidden_size, bias=False)
        self.rope_theta = 10000.0 if rope_theta is None else rope_theta
        self.rotary = RotaryEmbedding(head_dim, self.rope_theta)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; `cu_seqlens` are the boundaries of packed sequences."""
        batch, tokens = self._checked(hidden_states, attention_mask)
        cu: Boundaries = kwargs.get("cu_seqlens")
        q, k, v = self._qkv(hidden_states)
        q, k = self._placed(q, k, attention_mask, kwargs.get("cu_seqlens"), past_key_values)
        gates = self.g_proj(hidden_states).unflatten(-1, (-1, 3)).sigmoid()
        if past_key_values is not None:
            k, v = self._cached(k, v, tokens, past_key_values)
        places = None
        if attention_mask is not None:
            mask = attention_mask[:, -k.shape[1] :]
            (q, gates), (k, v), places, cu, _ = unpad_input((q, gates), (k, v), mask, tokens, True)
        compressed, selected, near = gates.unbind(-1)
        o = parallel_nsa(
            q, k, v, compressed, selected, near, block_size=self.block_size or 64,
            block_counts=16 if self.block_counts is None else self.block_counts,
            window_size=self.window or 0, cu_seqlens=cu,
        )  # fmt: skip
        o = repad_hidden_states(o.flatten(-2), places, batch, tokens)
        return self.o_proj(o), None, past_key_values


class MoBA(SoftmaxLayer):
    """Mixture of block attention, see :func:`functional.moba_attention`.

    Steps after a cached prefix see all earlier keys, as in fla.

    Args:
        hidden_size, num_heads, num_kv_heads, qkv_bias, qk_norm, window_size, rope_theta: see
            :class:`Attention`; the window holds for cached keys only.
        max_position_embeddings, layer_idx: see there.
        moba_chunk_size, moba_topk: keys of a block, and blocks of a query, its own included.
        use_output_gate: True for a gate of low rank on the normed outputs.
        use_flash_moba: has no effect: one algorithm serves both.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window_size: int | None = None,
        rope_theta: float | None = 10000.0,
        max_position_embeddings: int | None = None,
        layer_idx: int | None = None,
        moba_chunk_size: int = 256,
        moba_topk: int = 4,
        use_output_gate: bool = False,
        use_flash_moba: bool = False,
    ) -> None:
        super().__init__()
        self._project(hidden_size, num_heads, num_kv_heads, qkv_bias)
        self.qk_norm, self.window_size, self.layer_idx = qk_norm, window_size, layer_idx
        self.moba_chunk_size, self.moba_topk = moba_chunk_size, moba_topk
        self.use_output_gate, self.use_flash_moba = use_output_gate, use_flash_moba
        self.max_position_embeddings = max_position_embeddings
        if qk_norm:
            self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)
        self.rope_theta = 10000.0 if rope_theta is None else rope_theta
        self.rotary = RotaryEmbedding(self.head_dim, self.rope_theta)
        self.o_norm: nn.Module
        if use_output_gate:
            self.g_proj = nn.Sequential(
                nn.Linear(hidden_size, self.head_dim, bias=False),
                nn.Linear(self.head_dim, hidden_size, bias=False),
            )
            self.o_norm = FusedRMSNormGated(self.head_dim, activation="sigmoid", eps=1e-6)
        else:
            self.o_norm = RMSNorm(self.head_dim, eps=1e-6)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; `cu_seqlens` are the boundaries of packed sequences."""
        self._checked(hidden_states, attention_mask)
        cu = kwargs.get("cu_seqlens")
        q, k, v = self._queries_and_seen(hidden_states, attention_mask, cu, past_key_values)
        o = self._blocks(q, k, v, None if cu is not None else attention_mask, cu)
        if self.use_output_gate:
            o = self.o_norm(o, self.g_proj(hidden_states).unflatten(-1, (-1, self.head_dim)))
        else:
            o = self.o_norm(o)
        return self.o_proj(o.flatten(-2)), None, past_key_values

    def _blocks(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu: Tensor | None
    ) -> Tensor:
        batch, tokens = q.shape[:2]
        if k.shape[1] != tokens:  # cached keys are within the window already
            return self._attend(q, k, v, mask, None, None)
        places = None
        if mask is not None:
            q, (k, v), places, (cu, _), _ = unpad_input(q, (k, v), mask[:, -tokens:], tokens, True)
        elif cu is None:
            cu = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * tokens
            q, k, v = (t.flatten(0, 1)[None] for t in (q, k, v))
        o = parallel_moba(q, k, v, cu, tokens, self.moba_chunk_size, self.moba_topk)
        if places is not None:
            return repad_hidden_states(o, places, batch, tokens)
        return o.view(batch, tokens, *o.shape[2:])


def yarn_get_mscale(scale: float = 1, mscale: float = 1) -> float:
    """Computes ``0.1 mscale ln(scale) + 1``, and 1 for scales up to 1."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


class MultiheadLatentAttention(SoftmaxLayer):
    """Multi-head latent attention, see :class:`omniattn.modules.MLA`; the cache has whole heads.

    Args:
        hidden_size: width of x and y.
        num_heads: number of heads.
        q_lora_rank, kv_lora_rank: widths of the latent queries (None for none), keys and values.
        qk_rope_head_dim, qk_nope_head_dim: channels of q and k with and without positions.
        v_head_dim: width of a head of values.
        qk_head_dim: sum of both widths of q and k, or None.
        window_size: number of keys that a query sees, or None.
        rope_theta: base of the rotary positions.
        max_position_embeddings: has no effect: tables of positions grow.
        rope_scaling: sets `scaling`, which affects no results, as in fla.
        layer_idx: number of the layer, for a cache.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 16,
        q_lora_rank: int | None = 1536,
        qk_rope_head_dim: int = 64,
        kv_lora_rank: int = 512,
        v_head_dim: int = 128,
        qk_nope_head_dim: int = 128,
        qk_head_dim: int | None = 192,
        window_size: int | None = None,
        rope_theta: float = 10000.0,
        max_position_embeddings: int | None = None,
        rope_scaling: dict[str, Any] | None = None,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        width = qk_nope_head_dim + qk_rope_head_dim
        if qk_head_dim not in (None, width):
            raise ValueError(
                "MultiheadLatentAttention: qk_head_dim must be qk_nope_head_dim + "
                f"qk_rope_head_dim, got {qk_head_dim=}, {qk_nope_head_dim=}, {qk_rope_head_dim=}"
            )
        self.hidden_size, self.num_heads, self.q_lora_rank = hidden_size, num_heads, q_lora_rank
        self.qk_rope_head_dim, self.qk_nope_head_dim = qk_rope_head_dim, qk_nope_head_dim
        self.qk_head_dim, self.kv_lora_rank, self.v_head_dim = width, kv_lora_rank, v_head_dim
        self.window_size, self.rope_theta, self.layer_idx = window_size, rope_theta, layer_idx
        self.max_position_embeddings = max_position_embeddings

        def low_rank(rank: int, width: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(hidden_size, rank, bias=False),
                RMSNorm(rank, dtype=torch.float32),
                nn.Linear(rank, width, bias=False),
            )

        self.q_proj = (
            nn.Linear(hidden_size, num_heads * width, bias=False)
            if q_lora_rank is None
            else low_rank(q_lora_rank, num_heads * width)
        )
        self.k_rope = nn.Linear(hidden_size, qk_rope_head_dim, bias=False)
        self.kv_proj = low_rank(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=False)
        self.scaling = width**-0.5
        if rope_scaling is not None and rope_scaling.get("rope_type", "default") != "default":
            factor, all_dims = rope_scaling["factor"], rope_scaling.get("mscale_all_dim", 0)
            self.scaling *= yarn_get_mscale(factor, all_dims) ** 2
        self.rotary = RotaryEmbedding(qk_rope_head_dim, rope_theta)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; `cu_seqlens` are the boundaries of packed sequences."""
        _, tokens = self._checked(hidden_states, attention_mask)
        cu = kwargs.get("cu_seqlens")
        widths = self.qk_nope_head_dim, self.qk_rope_head_dim
        q, q_rope = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1)).split(widths, -1)
        kv = self.kv_proj(hidden_states).unflatten(-1, (self.num_heads, -1))
        k, v = kv.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        k_rope = self.k_rope(hidden_states)[:, :, None]
        q_rope, k_rope = self._placed(q_rope, k_rope, attention_mask, cu, past_key_values)
        q = torch.cat((q, q_rope), -1)
        k = torch.cat((k, k_rope.expand(*k.shape[:3], -1)), -1)
        if past_key_values is not None:
            states = {"attn_state": (k, v), "offset": tokens}
            k, v = update_layer_cache(self, past_key_values, **states)["attn_state"]
        o = self._attend(q, k, v, attention_mask, cu, self.window_size)
        return self.o_proj(o.flatten(-2)), None, past_key_values
