"""States of a decoder of this package with the interface of transformers' caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.models import Decoder
from omniattn.modules import State

__all__ = ["DecoderStates"]


class DecoderStates:
    """Holds the caches and recurrent states of all layers, allocated at the first tokens.

    Args:
        decoder: the decoder that uses the states.
        max_length: initial capacity in tokens; it doubles when exceeded.
        kv_dtype: torch.int8 to store keys and values in int8, as in `Attention.new_state`.
    """

    #: Attributes that transformers reads from a cache.
    is_compileable = False
    is_croppable = False
    is_sliding = (False,)
    is_linear = (False,)

    def __init__(
        self, decoder: Decoder, max_length: int = 64, kv_dtype: torch.dtype | None = None
    ) -> None:
        self.decoder = decoder
        self.max_length = max_length
        self.kv_dtype = kv_dtype
        self.states: list[State] | None = None

    def __repr__(self) -> str:
        return f"DecoderStates(length={self.get_seq_length()}, max_length={self.max_length})"

    def of(self, tokens: Tensor, dtype: torch.dtype) -> list[State]:
        """Returns the states before these tokens (B, T), with capacity for them."""
        batch, needed = tokens.shape[0], self.get_seq_length() + tokens.shape[1]
        if self.states is not None and needed <= self.max_length:
            return self.states
        before = self.states
        self.max_length = max(needed, self.max_length * (1 if before is None else 2))
        self.states = self.decoder.new_state(
            batch, self.max_length, kv_dtype=self.kv_dtype, dtype=dtype
        )
        for after, state in zip(self.states, before or (), strict=False):
            after.load_state_dict(state.state_dict())
        return self.states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens seen."""
        return 0 if self.states is None else self.states[layer_idx].length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces sequence b by sequence beam_idx[b]."""
        for state in self.states or ():
            state.reorder(beam_idx.to(self.decoder.embed_tokens.weight.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences at `indices`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence."""
        if self.states is not None:
            self.reorder_cache(torch.arange(self._batch()).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        """Drops tokens from position `max_length` on; if negative, the last -max_length tokens."""
        length = max_length if max_length >= 0 else self.get_seq_length() + max_length
        for state in self.states or ():
            state.crop(min(length, state.length))

    def reset(self) -> None:
        """Drops all states."""
        self.states = None

    def _batch(self) -> int:
        assert self.states is not None
        saved: Any = self.states[0].state_dict()
        while isinstance(saved, dict):
            saved = next(iter(saved.values()))
        return int(saved.shape[0])
