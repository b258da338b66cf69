"""Caches, padding, short convolutions and output norms that fla's layers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_choice, require_tensor
from omniattn.compat._errors import require_form, require_real
from omniattn.compat._fla.conv import ShortConvolution
from omniattn.compat._fla.norms import FusedRMSNormGated, RMSNorm
from omniattn.compat._fla.parts import prepare_lens_from_mask

#: y, None for the weights of attention, and the cache.
Result = tuple[Tensor, None, Any]
#: Functions that arguments name.
ACT2FN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nnf.relu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": nnf.logsigmoid,
    "silu": nnf.silu,
    "swish": nnf.silu,
    "sqrelu": lambda x: nnf.relu(x) ** 2,
    "gelu": lambda x: nnf.gelu(x, approximate="tanh"),
}


class FLACache:
    """States of the layers of a model, `past_key_values` of each layer.

    A layer's states are a dict with `recurrent_state`, `attn_state`, `conv_state`, `ffn_state` and
    `A_state`.
    """

    def __init__(self, seen_tokens: int = 0) -> None:
        self.states: list[dict[str, Any]] = []
        self._seen = [seen_tokens]

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        if layer_idx >= len(self.states):
            raise KeyError(f"FLACache: layer_idx must be below {len(self.states)}, got {layer_idx}")
        return self.states[layer_idx]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.states

    def update(
        self,
        recurrent_state: Any = None,
        attn_state: tuple[Tensor, ...] | None = None,
        conv_state: Any = None,
        ffn_state: Any = None,
        layer_idx: int = 0,
        offset: int = 1,
        cache_kwargs: dict[str, Any] | None = None,
        A_state: Tensor | None = None,
    ) -> dict[str, Any]:
        """Replaces the states of a layer, appends keys and values, and returns the states.

        Args:
            recurrent_state, conv_state, ffn_state, A_state: new states, or None to keep them.
            attn_state: tensors (B, T, ..) that are appended to the former ones.
            layer_idx: number of the layer.
            offset: number of new tokens.
            cache_kwargs: {"window_size": W} keeps the last W tokens of attn_state.
        """
        while len(self.states) <= layer_idx:
            names = "recurrent_state", "attn_state", "conv_state", "ffn_state", "A_state"
            self.states.append(dict.fromkeys(names))
            if len(self._seen) < len(self.states):
                self._seen.append(0)
        state = self.states[layer_idx]
        given = {"recurrent_state": recurrent_state, "conv_state": conv_state}
        given |= {"ffn_state": ffn_state, "A_state": A_state}
        state.update({name: value for name, value in given.items() if value is not None})
        if attn_state is not None:
            former = state["attn_state"]
            if former is not None:
                pairs = zip(former, attn_state, strict=True)
                attn_state = tuple(torch.cat(pair, 1) for pair in pairs)
            window = (cache_kwargs or {}).get("window_size")
            state["attn_state"] = tuple(x if window is None else x[:, -window:] for x in attn_state)
        self._seen[layer_idx] += offset
        return state

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Returns the number of tokens that a layer has seen."""
        layer = layer_idx or 0
        return self._seen[layer] if layer < len(self.states) else 0

    def reset(self) -> None:
        """Forgets all states."""
        self.states.clear()
        self._seen = [0]


#: Name that fla gives to the cache of the installed transformers.
Cache = FLACache


def require_cache_layer_idx(module: nn.Module, past_key_values: Any) -> Any:
    """Returns the `layer_idx` of a layer, which must be given if there is a cache."""
    layer_idx = getattr(module, "layer_idx", None)
    if past_key_values is not None and layer_idx is None:
        raise ValueError(
            f"{type(module).__name__}: layer_idx must be given with past_key_values, got None"
        )
    return layer_idx


def get_layer_cache(module: nn.Module, past_key_values: Any) -> dict[str, Any] | None:
    """Returns the states of a layer, or None."""
    layer_idx = require_cache_layer_idx(module, past_key_values)
    if past_key_values is None or len(past_key_values) <= layer_idx:
        return None
    found: dict[str, Any] = past_key_values[layer_idx]
    return found


def update_layer_cache(module: nn.Module, past_key_values: Any, **states: Any) -> Any:
    """Calls `update` of a cache for a layer; returns its states, or None without a cache."""
    layer_idx = require_cache_layer_idx(module, past_key_values)
    if past_key_values is None:
        return None
    return past_key_values.update(layer_idx=layer_idx, **states)


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Returns the rows of real tokens, cumulated lengths, and the longest length."""
    require_tensor("get_unpad_data", "attention_mask", attention_mask)
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    boundaries = nnf.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return indices, boundaries, int(lengths.max()) if len(lengths) else 0


def unpad_hidden_states(
    hidden_states: Tensor,
    cu_seqlens: Tensor | None,
    attention_mask: Tensor | None,
    q_len: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns hidden states without padding (1, total, ...), their rows and boundaries.

    With `cu_seqlens` or without a mask, hidden states stay as they are.
    """
    if cu_seqlens is not None or attention_mask is None:
        return hidden_states, None, cu_seqlens
    indices, boundaries, _ = get_unpad_data(attention_mask[:, -q_len:])
    return hidden_states.flatten(0, 1)[indices][None], indices, boundaries


def repad_hidden_states(
    hidden_states: Tensor, indices: Tensor | None, batch_size: int, q_len: int
) -> Tensor:
    """Undoes :func:`unpad_hidden_states`; padding is 0."""
    if indices is None:
        return hidden_states
    rows = hidden_states[0]
    padded = rows.new_zeros(batch_size * q_len, *rows.shape[1:]).index_copy(0, indices, rows)
    return padded.unflatten(0, (batch_size, q_len))


def unpad_input(
    q: Tensor | tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    attention_mask: Tensor,
    q_len: int,
    keepdim: bool = False,
) -> tuple[Any, tuple[Tensor, ...], Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """Returns queries and keys without padding, as packed rows.

    Args:
        q: (B, q_len, ...), or several such tensors.
        states: tensors (B, T, ...), whose last tokens are those of q.
        attention_mask: (B, T), 0 for padding.
        q_len: number of queries.
        keepdim: True for results (1, total, ...) in place of (total, ...).

    Returns:
        q and states; places of the queries in the flattened batch; boundaries of queries and of
        keys; and the longest lengths of both.
    """
    places, of_keys, longest = get_unpad_data(attention_mask)
    places_q, of_queries, longest_q = get_unpad_data(attention_mask[:, -q_len:])

    def rows(x: Tensor, kept: Tensor) -> Tensor:
        return x.flatten(0, 1)[kept][None] if keepdim else x.flatten(0, 1)[kept]

    packed = (
        rows(q, places_q) if isinstance(q, Tensor) else tuple(rows(each, places_q) for each in q)
    )
    keys = tuple(rows(x, places) for x in states)
    return packed, keys, places_q, (of_queries, of_keys), (longest_q, longest)


class Layer(nn.Module):
    """Base class: checks, convolutions, and the norm of outputs."""

    layer_idx: int | None
    g_norm: nn.Module
    modes: tuple[str, ...] = ("chunk", "fused_recurrent")

    def _start(self, mode: str, layer_idx: int | None) -> None:
        require_choice(type(self).__name__, "mode", mode, self.modes)
        self.mode, self.layer_idx = mode, layer_idx

    def _sizes(self, hidden_size: int, expand_k: float, expand_v: float, num_heads: int) -> None:
        """Sets the widths of keys and values, which heads divide."""
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.expand_k, self.expand_v = expand_k, expand_v
        self.key_dim, self.value_dim = int(hidden_size * expand_k), int(hidden_size * expand_v)
        for name, size in (("expand_k", self.key_dim), ("expand_v", self.value_dim)):
            if size % num_heads:
                raise ValueError(
                    f"{type(self).__name__}: hidden_size * {name} must be a multiple of num_heads, "
                    f"got {size} and num_heads={num_heads}"
                )
        self.head_k_dim, self.head_v_dim = self.key_dim // num_heads, self.value_dim // num_heads

    def _group(self, num_kv_heads: int | None) -> None:
        """Sets the number of query heads that share keys and values."""
        self.num_kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{type(self).__name__}: num_kv_heads must divide num_heads, got "
                f"num_kv_heads={num_kv_heads}, num_heads={self.num_heads}"
            )
        self.num_kv_groups = self.num_heads // self.num_kv_heads
        self.key_dim_per_group = self.key_dim // self.num_kv_groups
        self.value_dim_per_group = self.value_dim // self.num_kv_groups

    def _convolutions(
        self, use: bool, size: int, bias: bool, activation: str | None, **widths: int
    ) -> None:
        """Creates the short convolutions `q_conv1d` and so on."""
        self.use_short_conv, self.conv_size, self.conv_bias = use, size, bias
        for name, width in widths.items() if use else ():
            setattr(self, f"{name}_conv1d", ShortConvolution(width, size, bias, activation))

    def _output_norm(
        self, gate_fn: str, fuse: bool, affine: bool | None, eps: float, gated: bool = True
    ) -> None:
        """Creates `g_norm_swish_gate`, or `g_norm` with a function of the gate."""
        require_choice(type(self).__name__, "gate_fn", gate_fn, ACT2FN)
        self.fuse_norm_and_gate = gate_fn == "swish" and fuse and gated
        if self.fuse_norm_and_gate:
            self.g_norm_swish_gate = FusedRMSNormGated(self.head_v_dim, bool(affine), eps)
        else:
            self.g_norm = RMSNorm(self.head_v_dim, bool(affine), eps=eps, dtype=torch.float32)
            self.gate_fn = ACT2FN[gate_fn]

    def _normed(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """Returns the heads o (B, T, H, V), normalized and gated, as one dimension."""
        if gate is not None and self.fuse_norm_and_gate:
            return self.g_norm_swish_gate(o, gate.unflatten(-1, o.shape[2:])).flatten(-2)
        normed: Tensor = self.g_norm(o).flatten(-2)
        return normed if gate is None else normed * self.gate_fn(gate)

    def _checked(self, hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[int, int]:
        """Returns the batch size and the number of tokens."""
        op = type(self).__name__
        require_real(op, hidden_states=hidden_states)
        require_form(op, "hidden_states", hidden_states, "B, T, hidden_size")
        batch, tokens = hidden_states.shape[:2]
        if attention_mask is not None:
            require_tensor(op, "attention_mask", attention_mask)
            wanted = attention_mask.ndim == 2 and len(attention_mask) == batch
            if not wanted or attention_mask.shape[1] < tokens:
                raise ValueError(
                    f"{op}: attention_mask must have shape (B, T) with T >= {tokens}, got "
                    f"attention_mask.shape={tuple(attention_mask.shape)}"
                )
        return batch, tokens

    def _convolved(
        self, x: Tensor, state: dict[str, Any] | None, use_cache: bool | None, **options: Any
    ) -> tuple[list[Tensor], tuple[Any, ...] | None]:
        """Returns the projections of x, convolved, and the states of the convolutions."""
        names = self._projected
        projected = [getattr(self, f"{name}_proj")(x) for name in names]
        if not self.use_short_conv:
            return projected, None
        caches = state["conv_state"] if state is not None else (None,) * len(names)
        results = [
            getattr(self, f"{name}_conv1d")(
                y, cache=cache, output_final_state=bool(use_cache), **options
            )
            for name, y, cache in zip(names, projected, caches, strict=True)
        ]
        return [y for y, _ in results], tuple(cache for _, cache in results)

    #: Names of projections that are convolved.
    _projected: tuple[str, ...] = ("q", "k", "v")


class RecurrentLayer(Layer):
    """Base class of layers whose `_mix` reads tokens without padding."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; `cu_seqlens` are the boundaries of packed sequences."""
        batch, tokens = self._checked(hidden_states, attention_mask)
        state = get_layer_cache(self, past_key_values)
        x, indices, cu = unpad_hidden_states(
            hidden_states, kwargs.get("cu_seqlens"), attention_mask, tokens
        )
        projected, conv = self._convolved(x, state, use_cache, cu_seqlens=cu)
        sequences = {
            "initial_state": None if state is None else state["recurrent_state"],
            "output_final_state": bool(use_cache),
            "cu_seqlens": cu,
        }
        given = {"attention_mask": attention_mask, "past_key_values": past_key_values, **kwargs}
        y, recurrent = self._mix(x, projected, sequences, tokens=tokens, **given)
        states = recurrent if isinstance(recurrent, dict) else {"recurrent_state": recurrent}
        states = states | {"conv_state": conv}
        update_layer_cache(self, past_key_values, **states, offset=tokens)
        return repad_hidden_states(y, indices, batch, tokens), None, past_key_values

    def _rotated(
        self, q: Tensor, k: Tensor, sequences: dict[str, Any], given: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Rotates q and k at positions after those in the cache; the others are those of `_mix`."""
        attention_mask, cache = given["attention_mask"], given["past_key_values"]
        offset: int | Tensor = 0
        longest = q.shape[1]
        if cache is not None:
            offset = cache.get_seq_length(self.layer_idx)
            longest = q.shape[1] + int(offset)
            if attention_mask is not None and int(offset) > 0:  # padding has no positions
                seen: Tensor = prepare_lens_from_mask(attention_mask) - given["tokens"]
                offset, longest = seen, q.shape[1] + int(seen.max())
        rotary: Any = self.rotary
        turned: tuple[Tensor, Tensor] = rotary(
            q, k, seqlen_offset=offset, max_seqlen=longest, cu_seqlens=sequences["cu_seqlens"]
        )
        return turned

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        """Returns y and the new state of tokens x without padding, or a dict of new states.

        Args:
            x, projected: tokens, and their projections after the convolutions.
            sequences: options of all recurrences.
            given: number of new tokens, attention_mask, past_key_values and `kwargs` of the call.
        """
        raise NotImplementedError


def feature_map_of(op: str, name: str | None) -> Callable[[Tensor], Tensor] | None:
    """Returns the function that `feature_map` names."""
    if name is None:
        return None
    require_choice(op, "feature_map", name, ACT2FN)
    return ACT2FN[name]
