"""Token mixers that carry a RecurrentState from token to token."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from omniattn.functional._checks import shown
from omniattn.functional.masks import Mask
from omniattn.modules.mixer import Mixer, require_tokens
from omniattn.modules.state import RecurrentState, State, takes_cache


class StateMixer(Mixer):
    """A mixer that reads every token in order; a subclass says how in `_mix` and `new_state`."""

    config: Any

    @abstractmethod
    def _mix(
        self, x: Tensor, state: RecurrentState | None, **given: Any
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """y, and all tensors of the state after x, or None where they were updated in place;
        `given`: what forward gives to `_run`."""

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim).

        Args:
            x: tokens, after those in `state`.
            state: from `new_state`; updated to the state after x.
            rope: not used, except by MultiScaleRetention.
            mask: must be None; padding goes to the end of the sequences.
        """
        return self._run(x, state, mask, rope=rope)

    def _run(
        self, x: Tensor, state: State | None, mask: Tensor | Mask | None, **given: Any
    ) -> Tensor:
        """The steps of a forward."""
        state = require_recurrence(type(self).__name__, x, state, mask, self.config.dim)
        y, after = self._mix(x, state, **given)
        if state is not None and after is None:
            state.length += x.shape[1]
        elif state is not None and after is not None:
            state.advance(x.shape[1], **after)
        return y


def require_recurrence(
    op: str, x: Tensor, state: State | None, mask: Tensor | Mask | None, dim: int
) -> RecurrentState | None:
    """The state, after checks of what a recurrence is called with."""
    if mask is not None:
        raise ValueError(
            f"{op}: mask must be None, because a recurrence reads every token, got "
            f"mask={shown(mask)}"
        )
    require_tokens(op, x, dim)
    if state is not None and not isinstance(state, RecurrentState):
        raise TypeError(
            f"{op}: state must be a RecurrentState, got type(state)={type(state).__name__}"
        )
    if state is not None:
        state.require_batch(op, x.shape[0])
    return state
