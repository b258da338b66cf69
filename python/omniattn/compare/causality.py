"""Check that mixers of users see no later tokens: they would predict tokens that they have read."""

from __future__ import annotations

from typing import Any

import torch

from omniattn.compare.budget import Sized
from omniattn.compare.mixers import KINDS, Candidate

#: Largest change of earlier logits, relative to that of all logits; FFTs round in both directions.
_ROUNDING = 1e-5


@torch.no_grad()
def require_causal(candidate: Candidate, sized: Sized) -> None:
    """Checks a model with mixers of a user: its last token must not change earlier logits.

    Raises:
        ValueError: it changes them.
    """
    if all(kind in KINDS.values() for kind in candidate.kinds):
        return
    config: Any = sized.config
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = config.build().eval()
        tokens = torch.randint(config.vocab_size, (1, sized.length))
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % config.vocab_size
    change = (model(other) - model(tokens)).abs().amax(-1)[0]
    if (seen := change[:-1] > _ROUNDING * change.max()).any():
        raise ValueError(
            f"compare: {sized.name} must be causal, but token {sized.length - 1} changes the "
            f"output of token {int(seen.nonzero()[0])}"
        )
