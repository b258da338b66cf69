"""Softmax attention of `fla.layers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.compat._errors import errors_of
from omniattn.compat._fla.norms import GroupNorm, RMSNorm
from omniattn.compat._fla.parts import RotaryEmbedding, prepare_lens_from_mask
from omniattn.compat.fla_layers.base import Layer, Result
from omniattn.functional import masks


class SoftmaxLayer(Layer):
    """Base class of layers whose cache has the keys and values of all tokens."""

    q_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    rotary: RotaryEmbedding
    qk_norm: bool = False
    window_size: int | None = None

    def _project(
        self, hidden_size: int, num_heads: int, num_kv_heads: int | None, bias: bool
    ) -> None:
        """Creates the projections of a layer whose heads have hidden_size channels together."""
        self._sizes(hidden_size, 1.0, 1.0, num_heads)
        self._group(num_kv_heads)
        self.head_dim, self.kv_dim, self.qkv_bias = self.head_k_dim, self.key_dim_per_group, bias
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, self.kv_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, self.kv_dim, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def _norm_projections(self, num_heads: int) -> None:
        """Creates norms of projected queries and keys with factors for each head, for `qk_norm`."""
        if self.qk_norm:
            self.q_norm = GroupNorm(num_heads, self.hidden_size, is_rms_norm=True)
            self.k_norm = GroupNorm(self.num_kv_heads, self.kv_dim, is_rms_norm=True)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the heads (B, T, H, D) of queries, keys and values."""
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in layers)
        return q, k, v

    def _norm_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalises the heads of q and k if the layer does so."""
        return (self.q_norm(q), self.k_norm(k)) if self.qk_norm else (q, k)

    def _queries_and_seen(
        self, x: Tensor, attention_mask: Tensor | None, cu: Tensor | None, cache: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries, and all keys and values that they see."""
        q, k, v = self._qkv(x)
        q, k = self._placed(*self._norm_heads(q, k), attention_mask, cu, cache)
        if cache is not None:
            k, v = self._cached(k, v, x.shape[1], cache)
        return q, k, v

    def _placed(
        self, q: Tensor, k: Tensor, attention_mask: Tensor | None, cu: Tensor | None, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """Rotates q and k at the positions after those in the cache."""
        tokens = q.shape[1]
        offset = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        if attention_mask is None or cu is not None:
            options: dict[str, Any] = {"max_seqlen": tokens + offset, "cu_seqlens": cu}
            return self.rotary(q, k, seqlen_offset=offset, **options)
        return self._rotated(q, k, attention_mask, offset)

    def _rotated(
        self, q: Tensor, k: Tensor, attention_mask: Tensor, offset: int
    ) -> tuple[Tensor, Tensor]:
        """Rotates q and k at positions that count real tokens only."""
        tokens = q.shape[1]
        cos, sin = self.rotary._updated(q, 0, tokens + offset)[:2]
        padding = attention_mask.shape[-1] - prepare_lens_from_mask(attention_mask)
        places = torch.arange(tokens, device=q.device) + offset - padding[:, None]
        with errors_of(type(self).__name__):
            return functional.apply_rotary(q, k, cos, sin, positions=places.clamp(min=0))

    def _cached(self, k: Tensor, v: Tensor, tokens: int, cache: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values to the cache, and returns all that queries see."""
        filled = cache.get_seq_length(self.layer_idx) > 0
        kept = cache.update(
            attn_state=(k.flatten(2), v.flatten(2)),
            layer_idx=self.layer_idx,
            offset=tokens,
            cache_kwargs={"window_size": self.window_size},
        )["attn_state"]
        if not filled:
            return k, v
        keys, values = (t.unflatten(-1, (-1, self.head_dim)) for t in kept)
        return keys, values

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        cu: Tensor | None,
        window: int | None,
    ) -> Tensor:
        sizes = (-1, -1) if window is None else (window - 1, 0)
        options: dict[str, Any] = {"causal": True, "window_size": sizes}
        with errors_of(type(self).__name__):
            if cu is not None:
                rows = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
                packed: Tensor = functional.attention_varlen(*rows, cu, cu, **options)
                return packed.view(*q.shape[:2], *packed.shape[1:])
            if mask is not None:
                options["mask"] = masks.KeyPadding(mask[:, -k.shape[1] :].bool())
            out: Tensor = functional.attention(q, k, v, **options)
        return out if mask is None else out * mask[:, -q.shape[1] :, None, None].to(out.dtype)


class Attention(SoftmaxLayer):
    """Causal softmax attention with rotary positions.

    Args:
        hidden_size: width of x and y.
        num_heads, num_kv_heads: number of heads of queries, and of keys and values.
        qkv_bias: True for biases of q, k and v.
        qk_norm: True for a norm of the heads of q and k.
        window_size: number of keys that a query sees, or None.
        rope_theta: base of the rotary positions.
        max_position_embeddings: has no effect: tables of positions grow.
        layer_idx: number of the layer, for a cache.
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
    ) -> None:
        super().__init__()
        self._project(hidden_size, num_heads, num_kv_heads, qkv_bias)
        self.qk_norm, self.window_size = qk_norm, window_size
        self.rope_theta, self.layer_idx = rope_theta, layer_idx
        self.max_position_embeddings = max_position_embeddings
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, dtype=torch.float32)
            self.k_norm = RMSNorm(self.head_dim, dtype=torch.float32)
        self.rotary = RotaryEmbedding(self.head_dim, 10000.0 if rope_theta is None else rope_theta)

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
        y = self.o_proj(self._attend(q, k, v, attention_mask, cu, self.window_size).flatten(-2))
        return y, None, past_key_values


class Parallax(Attention):
    """Attention minus a covariance times a second query, see `functional.parallax_attention`.

    Arguments are those of :class:`Attention`. The second queries r_proj x have the positions of the
    queries, and with `qk_norm` a norm of their own.
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
    ) -> None:
        rest = qk_norm, window_size, rope_theta, max_position_embeddings, layer_idx
        super().__init__(hidden_size, num_heads, num_kv_heads, qkv_bias, *rest)
        self.r_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        if qk_norm:
            self.r_norm = RMSNorm(self.head_dim, dtype=torch.float32)

    def _norm_projections(self, num_heads: int) -> None:
        """Creates norms of projected queries and keys with factors for each head, for `qk_norm`."""
        if self.qk_norm:
            self.q_norm = GroupNorm(num_heads, self.hidden_size, is_rms_norm=True)
            self.k_norm = GroupNorm(self.num_kv_heads, self.kv_dim, is_rms_norm=True)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns both queries of each head as heads (B, T, 2 H, D) of one tensor, k and v."""
        q, k, v = super()._qkv(x)
        return torch.cat((q, self.r_proj(x).unflatten(-1, (-1, self.head_dim))), 2), k, v

    def _norm_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not self.qk_norm:
            return q, k
        q, r = q.chunk(2, 2)
        return torch.cat((self.q_norm(q), self.r_norm(r)), 2), self.k_norm(k)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        cu: Tensor | None,
        window: int | None,
    ) -> Tensor:
        q, r = q.chunk(2, 2)
        options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
        with errors_of("Parallax"):
            if mask is None or cu is not None:
                return functional.parallax_attention(q, r, k, v, cu_seqlens=cu, **options)
            o = torch.zeros_like(q)
            kept = mask[:, -k.shape[1] :].bool()
            for n in range(len(q)):  # sequences without their padding, which is at the left
                keys = kept[n].nonzero()[:, 0]
                queries = kept[n, -q.shape[1] :].nonzero()[:, 0]
                row = functional.parallax_attention(
                    *(t[n, queries][None] for t in (q, r)),
                    *(t[n, keys][None] for t in (k, v)),
                    **options,
                )
                o = o.index_put((torch.tensor(n, device=o.device), queries), row[0])
        return o
