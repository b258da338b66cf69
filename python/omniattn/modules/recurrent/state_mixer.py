"""Token mixers that carry a RecurrentState from token to token."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from omniattn.checks.arguments import is_traced
from omniattn.functional.masks import Mask
from omniattn.modules.base.jagged import (
    Sequences,
    real_tokens,
    sequences_of,
    without_padding,
)
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.state import RecurrentState, State, kind_of, takes_cache


class StateMixer(Mixer):
    """Base class of mixers that read tokens in order; subclasses define `_mix` and `new_state`."""

    config: Any

    @abstractmethod
    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **given: Any
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Computes y and the tensors of the state after x, or None if they were updated in place.

        `given` are the keyword arguments of `_run`. If `sequences.cu_seqlens` is not None, x
        (1, total, dim) holds packed sequences, each with its own state.
        """

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x: the tokens after those in `state`; without a state, a jagged nested tensor is
                accepted.
            state: from `new_state`; updated to the state after x.
            rope: used by MultiScaleRetention only.
            mask: boolean (B, 1, 1, past + T), False for padding at any position, or a KeyPadding or
                KeyLengths of `functional.masks`. The recurrence skips padding, and y is 0 there.
                None for no padding.
        """
        return self._run(x, state, mask, rope=rope)

    def _run(
        self,
        x: Tensor,
        state: State | None,
        mask: Tensor | Mask | None,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        **given: Any,
    ) -> Tensor:
        """Runs a forward: validates the arguments, mixes, and updates the state."""
        tokens, sequences, before = read(self, x, state, mask)
        if rope is not None:
            given["rope"] = tuple(map(sequences.kept, rope))
        y, after = self._mix(tokens, before, sequences, **given)
        if before is not None and after is None:
            before.length += x.shape[1]
        elif before is not None and after is not None:
            before.advance(x.shape[1], **after)
        return sequences.restored(y)


def read(
    layer: Any, x: Tensor, state: State | None, mask: Tensor | Mask | None
) -> tuple[Tensor, Sequences, RecurrentState | None]:
    """Validates the arguments of a recurrence; returns the tokens, their sequences and the state.

    The tokens are x (B, T, dim), or packed as (1, total, dim) if x is nested or padded.
    """
    op = type(layer).__name__
    tokens, sequences = sequences_of(op, "x", x, state=state)
    require_tokens(op, tokens, layer.config.dim)
    before = None if state is None else _checked(layer, state, x)
    past = 0 if before is None else before.length
    real = real_tokens(op, mask, x, past)
    if real is None:
        return tokens, sequences, before
    if before is not None and real.is_cpu and not is_traced() and bool(real.all()):
        return tokens, sequences, before  # decoding after a padded prompt
    return *without_padding(tokens, real), before


def _checked(layer: Any, state: State, x: Tensor) -> RecurrentState:
    """Requires a state of this layer for the sequences of x, and returns it."""
    op = type(layer).__name__
    if not isinstance(state, RecurrentState):
        raise TypeError(
            f"{op}: state must be a RecurrentState, got type(state)={type(state).__name__}"
        )
    shapes = getattr(layer, "_state_shapes", None)
    if shapes is None:
        shapes = layer._state_shapes = layer.new_state(1, 1, device="meta").shapes
    state.require_like(op, shapes, x, kind_of(layer))
    return state
