"""A model, its states and the encoder's output during one generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omniattn.functional.masks import KeyPadding
from omniattn.models.generation.options import Generation
from omniattn.models.generation.protocol import Generator
from omniattn.modules.base.state import State, parts_of


class Run:
    """Feeds tokens to a model and keeps its states.

    Args:
        model: the model, in eval mode.
        batch, max_length: sizes of the states.
        options: options of the call, for the encoder's input, and for the caches their eviction
            policy and the dtype in which they store keys and values.
    """

    def __init__(self, model: Generator, batch: int, max_length: int, options: Generation) -> None:
        self.model = model
        new_state: Callable[..., Any] = model.new_state
        more = {"eviction": options.eviction, "kv_dtype": options.kv_dtype}
        asked = {name: value for name, value in more.items() if value is not None}
        self._state = new_state(batch, max_length, **asked)
        self._memory: tuple[Tensor, ...] = ()
        self._real: Tensor | None = None  # which tokens of the source are no padding
        if options.source is not None:
            self._real = options.source_mask
            given = {} if self._real is None else {"mask": KeyPadding(self._real)}
            self._memory = (_encoder(model)(options.source, **given),)
        #: Number of tokens that the states have read.
        self.length = 0

    def hidden(self, tokens: Tensor) -> Tensor:
        """Feeds tokens (B, T) and returns their hidden states (B, T, dim)."""
        self.length += tokens.shape[1]
        more = {} if self._real is None else {"memory_mask": KeyPadding(self._real)}
        return self.model.hidden(tokens, *self._memory, state=self._state, **more)

    @property
    def states(self) -> list[State]:
        """States of all layers."""
        return [part for entry in self._state for part in parts_of(entry)]

    def logits(self, tokens: Tensor) -> Tensor:
        """Feeds tokens (B, T) and returns the logits (B, V) after the last one."""
        return self.model.head(self.hidden(tokens)[:, -1:])[:, 0]

    def reorder(self, index: Tensor) -> None:
        """Replaces sequence b by sequence index[b]; index (B',) int repeats or drops sequences."""
        self._memory = tuple(m[index] for m in self._memory)
        self._real = None if self._real is None else self._real[index]
        for entry in self._state:
            for state in entry if isinstance(entry, tuple) else (entry,):
                state.reorder(index)

    def crop(self, length: int) -> None:
        """Forgets the tokens from position `length` on."""
        if length < self.length:
            for state in self.states:
                state.crop(length)
        self.length = length


def _encoder(model: Generator) -> Callable[..., Tensor]:
    encode: Callable[..., Tensor] | None = getattr(model, "encode", None)
    if encode is None:
        raise ValueError(
            f"generate: source must be None, since {type(model).__name__} has no encoder"
        )
    return encode


class Endings:
    """Tells which sequences have ended: by a token of `eos` or a sequence of `stop`.

    Args:
        options: options of the call.
        prompts: (B, T) int64, which are not searched for `stop`.
    """

    def __init__(self, options: Generation, prompts: Tensor) -> None:
        self._start = prompts.shape[1]
        self._eos = prompts.new_tensor(options.ends)
        self._stop = [prompts.new_tensor(sequence) for sequence in options.stop]

    def hits(self, tokens: Tensor) -> Tensor:
        """Returns for tokens (..., T) whether their last one ends the sequence: (...) bool."""
        hit = torch.isin(tokens[..., -1], self._eos)
        for stop in self._stop:
            if tokens.shape[-1] - self._start >= len(stop):
                hit |= (tokens[..., -len(stop) :] == stop).all(-1)
        return hit
