"""Interface of models that generate tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class Sized(Protocol):
    """A config with a vocabulary size."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids are in [0, vocab_size)."""


class Generator(Protocol):
    """Interface of models for `generate`."""

    training: bool

    @property
    def config(self) -> Sized:
        """Config of the model."""

    def new_state(self, batch: int, max_length: int) -> Any:
        """Returns the empty state, which `hidden` reads and updates."""

    @property
    def hidden(self) -> Callable[..., Tensor]:
        """Function hidden(tokens (B, T), state=state) -> hidden states (B, T, dim) for the head.

        With an encoder: hidden(tokens, memory, state=state), where memory is encode(source).
        """

    def head(self, x: Tensor, /) -> Tensor:
        """Maps hidden states (B, dim) to logits (B, vocab_size)."""

    def train(self, mode: bool = True, /) -> Any:
        """Sets the mode, as torch.nn.Module does."""
