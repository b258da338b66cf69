"""Forgetting attention, wall attention, PaTH and DeltaFormer of `fla.layers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.compat._errors import errors_of
from omniattn.compat._fla.attention import parallel_forgetting_attn, parallel_path_attn
from omniattn.compat._fla.conv import ShortConvolution
from omniattn.compat._fla.norms import RMSNorm
from omniattn.compat._fla.parts import RotaryEmbedding, l2norm
from omniattn.compat.fla_layers.attention import SoftmaxLayer
from omniattn.compat.fla_layers.base import (
    Result,
    get_layer_cache,
    repad_hidden_states,
    unpad_hidden_states,
    update_layer_cache,
)
from omniattn.functional import masks
from omniattn.reference.attention.forgetting import LEAST_LOG_GATE
from omniattn.reference.precision import widen


class ForgettingAttention(SoftmaxLayer):
    """Softmax attention with forget gates, see :func:`functional.forgetting_attention`.

    Args:
        hidden_size, num_heads, num_kv_heads, qkv_bias, layer_idx: see :class:`Attention`.
        qk_norm: True for a norm of the heads of q and k with factors for each head.
        window_size: has no effect on results: fla's attention has no window, only its cache.
        use_output_gate: True for a gate of the outputs.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window_size: int | None = None,
        use_output_gate: bool = False,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._project(hidden_size, num_heads, num_kv_heads, qkv_bias)
        self.qk_norm, self.use_output_gate, self.layer_idx = qk_norm, use_output_gate, layer_idx
        self.f_proj = nn.Linear(hidden_size, num_heads)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self._norm_projections(num_heads)

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
        op = "ForgettingAttention"
        _, tokens = self._checked(hidden_states, attention_mask)
        x, cu = hidden_states, kwargs.get("cu_seqlens")
        if cu is not None and past_key_values is not None:
            raise ValueError(f"{op}: cu_seqlens must be None with past_key_values")
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        f = nnf.logsigmoid(self.f_proj(x).float())
        q, k = self._norm_heads(q, k)
        if past_key_values is not None:
            states = {"attn_state": (k, v, f), "offset": tokens}
            k, v, f = update_layer_cache(self, past_key_values, **states)["attn_state"]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if cu is not None or attention_mask is None:
            o = parallel_forgetting_attn(q, k, v, f, cu_seqlens=cu)
        else:  # gates of padding are 1
            kept = attention_mask[:, -k.shape[1] :].bool()
            f = f * kept[..., None]
            with errors_of(op):
                o = functional.forgetting_attention(q, k, v, f, mask=masks.KeyPadding(kept))
            o = o * kept[:, -tokens:, None, None].to(o.dtype)
        o = o.flatten(-2)
        if self.use_output_gate:
            o = self.g_proj(x).sigmoid() * o
        return self.o_proj(o), None, past_key_values


class WallAttention(SoftmaxLayer):
    """Softmax attention with decays of channels, see :func:`functional.wall_attention`.

    Args:
        hidden_size, num_heads, num_kv_heads, qkv_bias, layer_idx: see :class:`Attention`.
        qk_norm: True for a norm of the heads of q and k with factors for each head.
        window_size: must be None.
        use_output_gate: True for a gate of the outputs.
        use_scalar_gate: True for a forget gate of each head, too.
        gate_init_bias: bias of both gates that fla's models draw; the layer keeps it.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window_size: int | None = None,
        use_output_gate: bool = False,
        use_scalar_gate: bool = False,
        gate_init_bias: float = 8.0,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        if window_size is not None:
            raise NotImplementedError(
                f"WallAttention: window_size is not supported, got window_size={shown(window_size)}"
            )
        self._project(hidden_size, num_heads, num_kv_heads, qkv_bias)
        self.qk_norm, self.use_output_gate, self.layer_idx = qk_norm, use_output_gate, layer_idx
        self.use_scalar_gate, self.gate_init_bias = use_scalar_gate, gate_init_bias
        self.g_proj = nn.Linear(hidden_size, hidden_size)
        if use_scalar_gate:
            self.gs_proj = nn.Linear(hidden_size, num_heads)
        if use_output_gate:
            self.o_gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self._norm_projections(num_heads)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; `cu_seqlens` are the boundaries of packed sequences.

        Unlike fla's, the layer also leaves padding out with a cache.
        """
        op, cache = "WallAttention", past_key_values
        batch, tokens = self._checked(hidden_states, attention_mask)
        cu = kwargs.get("cu_seqlens")
        if cache is not None and cu is not None:
            raise ValueError(f"{op}: cu_seqlens must be None with past_key_values")
        x, places = hidden_states, None
        if cache is None:
            x, places, cu = unpad_hidden_states(x, cu, attention_mask, tokens)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k = self._norm_heads(q, k)
        rows = q, k, v, nnf.logsigmoid(widen(self.g_proj(x)))
        q, k, v, g = (t.unflatten(-1, (-1, self.head_dim)) for t in rows)
        gs = nnf.logsigmoid(widen(self.gs_proj(x))) if self.use_scalar_gate else None
        if cache is None:
            with errors_of(op):
                o = functional.wall_attention(q, k, v, g, gs, cu_seqlens=cu)
        else:
            o = self._step(q, k, v, g, gs, attention_mask, cache)
        o = o.flatten(-2)
        if self.use_output_gate:
            o = self.o_gate_proj(x).sigmoid() * o
        return repad_hidden_states(self.o_proj(o), places, batch, tokens), None, cache

    def _step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        gs: Tensor | None,
        attention_mask: Tensor | None,
        cache: Any,
    ) -> Tensor:
        """Returns o of the tokens after those in the cache, 0 for padding, which is on the left.

        The cache has the keys, decayed to the last token, and the values of all query heads. A
        forget gate closes off keys of padding.
        """
        state, tokens = get_layer_cache(self, cache), q.shape[1]
        mask, first = _new_tokens("WallAttention", attention_mask, tokens)
        if first is not None:
            gs = g.new_zeros(*q.shape[:3]) if gs is None else gs
            gs = gs.masked_fill(first[..., None], LEAST_LOG_GATE)
        k, v = (t.repeat_interleave(self.num_kv_groups, 2) for t in (k, v))
        if state is not None:
            past_k, past_v, past_gs = state["attn_state"]
            k, v = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
            gs = _joined(past_gs, gs, k.shape[1] - tokens, tokens)
        with errors_of("WallAttention"):
            o, k = functional.wall_attention(q, k, v, g, gs, return_keys=True)
        update_layer_cache(self, cache, offset=tokens)
        cache[self.layer_idx]["attn_state"] = (k, v, gs)
        return o if mask is None else o * mask[..., None, None].to(o.dtype)


class PaTHAttention(SoftmaxLayer):
    """PaTH attention, see :func:`functional.path_attention`; gates are times ``head_dim^-0.5``.

    Args:
        hidden_size, num_heads, num_kv_heads, layer_idx: see :class:`Attention`.
        use_forget_gate: True for forget gates (PaTH-FoX).
        use_qk_norm: True for a norm of the heads of q and k, which fla leaves out with a mask.
        use_low_rank_w: False for one linear map to w in place of two of width 32 between them.
        use_w_shortconv, conv_size, conv_bias: short convolution of w.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        use_forget_gate: bool = False,
        use_qk_norm: bool = False,
        layer_idx: int | None = None,
        use_low_rank_w: bool = True,
        use_w_shortconv: bool = True,
        conv_size: int = 3,
        conv_bias: bool = False,
    ) -> None:
        super().__init__()
        self._project(hidden_size, num_heads, num_kv_heads, False)
        self.layer_idx, self.use_forget_gate = layer_idx, use_forget_gate
        self.w_proj: nn.Module = (
            nn.Sequential(
                nn.Linear(hidden_size, 32, bias=False), nn.Linear(32, self.kv_dim, bias=False)
            )
            if use_low_rank_w
            else nn.Linear(hidden_size, self.kv_dim, bias=False)
        )
        norms = [
            RMSNorm(self.head_dim, dtype=torch.float32) if use_qk_norm else nn.Identity()
            for _ in range(2)
        ]
        self.maybe_q_norm, self.maybe_k_norm = norms
        self.use_w_shortconv = use_w_shortconv
        if use_w_shortconv:
            self.w_conv1d = ShortConvolution(self.kv_dim, conv_size, conv_bias, "silu")
        self.bt_proj = nn.Linear(hidden_size, self.num_kv_heads)
        if use_forget_gate:
            self.g_proj = nn.Linear(hidden_size, num_heads)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; `cu_seqlens` are the boundaries of packed sequences.

        Unlike fla's, the layer also takes a cache in training, and without a mask.
        """
        batch, tokens = self._checked(hidden_states, attention_mask)
        cu, cache = kwargs.get("cu_seqlens"), past_key_values
        if cache is not None:
            return self._step(hidden_states, attention_mask, cache), None, cache
        x, places, cu = unpad_hidden_states(hidden_states, cu, attention_mask, tokens)
        q, k, v, w, beta, g, _ = self._parts(x, None, cu_seqlens=cu)
        o, _ = parallel_path_attn(q, k, v, w, beta, g, cu_seqlens=cu)
        return repad_hidden_states(self.o_proj(o.flatten(-2)), places, batch, tokens), None, None

    def _parts(self, x: Tensor, conv: Tensor | None, **options: Any) -> tuple[Any, ...]:
        """Returns q, k, v, w, beta, g and the state of the convolution."""
        q, k, v = self._qkv(x)
        w = self.w_proj(x)
        if self.use_w_shortconv:
            w, conv = self.w_conv1d(w, cache=conv, **options)
        w = l2norm(w.unflatten(-1, (-1, self.head_dim)), output_dtype=torch.float32)
        beta = 2 * self.bt_proj(x).float().sigmoid()
        g = nnf.logsigmoid(self.g_proj(x).float()) if self.use_forget_gate else None
        return self.maybe_q_norm(q), self.maybe_k_norm(k), v, w, beta, g, conv

    def _step(self, x: Tensor, attention_mask: Tensor | None, cache: Any) -> Tensor:
        """Returns y of the tokens after those in the cache.

        Keys of padding, which is on the left, are closed off by a gate, so that the cache has gates
        where a mask was given.
        """
        state, tokens = get_layer_cache(self, cache), x.shape[1]
        conv = None if state is None else state["conv_state"]
        mask, first = _new_tokens("PaTHAttention", attention_mask, tokens)
        options: dict[str, Any] = {"output_final_state": True}
        if state is None and mask is not None:
            options["mask"] = mask
        q, k, v, w, beta, g, conv = self._parts(x, conv, **options)
        if mask is not None and first is not None:
            beta = beta * mask[..., None]
            g = beta.new_zeros(*x.shape[:2], self.num_heads) if g is None else g * mask[..., None]
            g = g.masked_fill(first[..., None], LEAST_LOG_GATE * self.head_dim**0.5)
        if state is not None:
            past_k, past_v, past_g = state["attn_state"]
            k, v = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
            g = _joined(past_g, g, k.shape[1] - tokens, tokens)
        o, k = parallel_path_attn(q, k, v, w, beta, g, use_cache=True)
        update_layer_cache(self, cache, conv_state=conv, offset=tokens)
        cache[self.layer_idx]["attn_state"] = (k, v, g)
        y: Tensor = self.o_proj(o.flatten(-2))
        return y if mask is None else y * mask[..., None].to(y.dtype)


class DeltaFormerAttention(SoftmaxLayer):
    """DeltaFormer, see :func:`functional.deltaformer_attention`.

    Unlike fla's layer, this one reads no padding, and has a cache.

    Args:
        hidden_size, num_heads, num_kv_heads, qkv_bias, qk_norm, rope_theta: see
            :class:`Attention`.
        max_position_embeddings, layer_idx: see there.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        rope_theta: float = 10000.0,
        max_position_embeddings: int | None = None,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._project(hidden_size, num_heads, num_kv_heads, qkv_bias)
        self.qk_norm, self.rope_theta, self.layer_idx = qk_norm, rope_theta, layer_idx
        self.max_position_embeddings = max_position_embeddings
        self.b_proj = nn.Linear(hidden_size, num_heads)
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, dtype=torch.float32)
            self.k_norm = RMSNorm(self.head_dim, dtype=torch.float32)
        self.rotary = RotaryEmbedding(self.head_dim, rope_theta)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; `cu_seqlens` are the boundaries of packed sequences.

        A mask is not supported together with a cache.
        """
        op, cache = "DeltaFormerAttention", past_key_values
        batch, tokens = self._checked(hidden_states, attention_mask)
        if cache is not None and (attention_mask is not None or "cu_seqlens" in kwargs):
            raise NotImplementedError(
                f"{op}: attention_mask and cu_seqlens must be None with past_key_values"
            )
        x, places, cu = unpad_hidden_states(
            hidden_states, kwargs.get("cu_seqlens"), attention_mask, tokens
        )
        q, k, v = self._qkv(x)
        q, k = self._placed(*self._norm_heads(q, k), None, cu, cache)
        k, v = (t.repeat_interleave(self.num_kv_groups, 2) for t in (k, v))
        state, past = get_layer_cache(self, cache), None
        if state is not None:
            former, past = (
                t.unflatten(-1, (self.num_heads, self.head_dim)) for t in state["attn_state"]
            )
            k = torch.cat((former, k), 1)
        with errors_of(op):
            o, u = functional.deltaformer_attention(
                q, k, v, self.b_proj(x), past=past, cu_seqlens=cu
            )
        new = k[:, -tokens:].flatten(2), u.flatten(2)
        update_layer_cache(self, cache, attn_state=new, offset=tokens)
        return repad_hidden_states(self.o_proj(o.flatten(-2)), places, batch, tokens), None, cache


def _new_tokens(
    op: str, attention_mask: Tensor | None, tokens: int
) -> tuple[Tensor | None, Tensor | None]:
    """Returns where the last `tokens` tokens are real, and where the first after padding is."""
    if attention_mask is None:
        return None, None
    kept = attention_mask.bool()
    if bool((kept[:, :-1] & ~kept[:, 1:]).any()):
        raise ValueError(
            f"{op}: attention_mask must have padding on the left with past_key_values, got a 0 "
            "after a 1"
        )
    first = kept & ~nnf.pad(kept[:, :-1], (1, 0), value=True)
    start = kept.shape[1] - tokens
    return kept[:, start:], first[:, start:]


def _joined(past: Tensor | None, new: Tensor | None, before: int, tokens: int) -> Tensor | None:
    """Returns the logarithms of the gates of all tokens; gates that are None are 1."""
    like = past if new is None else new
    if like is None:
        return None
    zeros = like.new_zeros(len(like), before + tokens, like.shape[2])
    past = zeros[:, :before] if past is None else past
    return torch.cat((past, zeros[:, before:] if new is None else new), 1)
