"""Tokens that a model's multi-token predictor drafts, for the model itself to check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omniattn.models.generation.run import Run
from omniattn.modules.base.state import RecurrentState


class Drafts:
    """The predictor's states while its model generates.

    Depth d reads at position i the output of depth d - 1 there (of the model for d = 1) and token
    i + d, and predicts token i + d + 1. While `end` tokens are known, its first end - d positions
    are final. Those after them read drafted tokens: they are forgotten, and read again later.

    Args:
        run: of a Decoder with a predictor, unless `count` is 0.
        batch, max_length: sizes of the states.
        count: number of tokens to draft, at most the number of depths.
    """

    def __init__(self, run: Run, batch: int, max_length: int, count: int) -> None:
        self._model: Any = run.model
        self._count, self._longest = count, max_length
        self._predictor: Any = getattr(run.model, "predictor", None)
        layers = list(getattr(self._predictor, "depths", []))
        kind = type(run.model).__name__
        if count > len(layers):
            raise ValueError(
                f"generate: num_draft_tokens must be at most {len(layers)}, the depths of the "
                f"predictor of this {kind}, got num_draft_tokens={count}"
            )
        if count and any(isinstance(state, RecurrentState) for state in run.states):
            raise ValueError(
                f"generate: num_draft_tokens must be 0 for this {kind}, whose recurrent states "
                f"cannot forget refused drafts, got num_draft_tokens={count}"
            )
        self._depths = layers[:count]
        self._states = [depth["block"].new_state(batch, max_length) for depth in self._depths]
        #: Inputs of each depth, from the first position that its state has not read.
        self._inputs: list[Tensor | None] = [None] * count

    def read(self, hidden: Tensor) -> None:
        """Takes the model's hidden states (B, n, dim) of the next n tokens, without drafts."""
        if self._count:
            self._add(0, hidden)

    def _add(self, depth: int, chain: Tensor) -> None:
        known = self._inputs[depth]
        self._inputs[depth] = chain if known is None else torch.cat([known, chain], 1)

    def propose(self, out: Tensor, end: int, choose: Callable[[Tensor, int], Tensor]) -> int:
        """Writes drafts into out[:, end:], after the `end` known tokens; returns their number.

        choose(logits (B, V), position) returns a token (B,). There is no draft before `read`, nor
        of the last token, which the model gives anyway.
        """
        if self._count == 0 or self._inputs[0] is None:
            return 0
        count, c = min(self._count, self._longest - end - 1), self._predictor.config
        for d in range(1, count + 1):
            depth, state, chain = self._depths[d - 1], self._states[d - 1], self._inputs[d - 1]
            assert chain is not None
            first, x = state.length, chain
            if not c.parallel:
                tokens = out[:, first + d : end - 1 + d]
                x = self._predictor.join(depth, chain, self._model.embed_tokens(tokens))
            y = self._run(depth["block"], x, state)
            normed = depth["norm"](y)
            logits = self._model.head(normed[:, -1:])[:, 0]
            out[:, end + d - 1] = choose(logits, end + d - 1)
            final = max(end - d, 0)
            if state.length > final:
                state.crop(final)
            # The input at position `final` is final, too: depth d - 1 reads one token less.
            self._inputs[d - 1] = chain[:, final - first : max(end - d + 1, 0) - first]
            if d < self._count:
                self._add(d, x if c.parallel else normed if c.post_norm else y)
        return count

    def _run(self, block: Any, x: Tensor, state: Any) -> Tensor:
        """Applies a block to x (B, n, dim), which follows the positions that its state has read."""
        rotary = self._model.rotary
        at = state.length + torch.arange(x.shape[1], device=x.device)
        out, residual = block(x, state=state, rope=None if rotary is None else rotary(at))
        y: Tensor = (out + residual).to(x.dtype)
        return y
