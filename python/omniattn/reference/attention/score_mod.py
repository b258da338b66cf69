"""Definition of score_mod: f(score, b, h, q, k) of every pair, vmapped as in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from omniattn.encoding.options import Indices, PairMod, ScoreMod
from omniattn.reference.limits import Limit, clamp


def _clamp(x: Tensor, min: Limit = None, max: Limit = None) -> Tensor:
    return clamp(x, min, max)


def _clamp_max(x: Tensor, max: Limit) -> Tensor:
    return clamp(x, None, max)


_CLAMPS: dict[Any, Callable[..., Tensor]] = {
    **{getattr(t, n): _clamp for t in (torch, Tensor) for n in ("clamp", "clip", "clamp_min")},
    torch.clamp_max: _clamp_max,
    Tensor.clamp_max: _clamp_max,
}


class _Definition(TorchFunctionMode):
    """Overrides two torch functions inside a score_mod.

    t[i] with a 0-d tensor i would read i's value, which does not exist under vmap. clamp's slope at
    a limit depends on the version of torch.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            t, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) and i.dtype != torch.bool for i in indices) and all(
                isinstance(i, (Tensor, int)) or i == slice(None) for i in indices
            ):
                found = [torch.tensor(i) if isinstance(i, int) else i for i in indices]
                return torch.ops.aten.index(
                    t, [i if isinstance(i, Tensor) else None for i in found]
                )
        if func in _CLAMPS and isinstance(args[0], Tensor) and args[0].dim() == 0:
            func = _CLAMPS[func]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class PlacedMod(PairMod):
    """score_mod of one sequence, with the sequence's index and its first query's position."""

    score_mod: ScoreMod | PairMod
    first_batch: int
    first_q: int

    def of_pairs(self, score: Tensor, first: Indices) -> Tensor:
        b, h, q, k = first
        return apply_score_mod(
            self.score_mod, score, (b + self.first_batch, h, q + self.first_q, k)
        )


def apply_score_mod(
    score_mod: ScoreMod | PairMod, score: Tensor, first: Indices = (0, 0, 0, 0)
) -> Tensor:
    """Applies score_mod to score (B, Hq, Tq, Tk); `first` has the indices of its first pair."""
    if score.numel() == 0:
        return score
    if isinstance(score_mod, PairMod):
        return score_mod.of_pairs(score, first)
    positions = [
        torch.arange(at, at + n, device=score.device)
        for at, n in zip(first, score.shape, strict=True)
    ]
    return at_each_pair(score_mod, positions, score).to(score.dtype)


def at_each_pair(
    mod: Callable[..., Tensor], positions: Sequence[Tensor], *scores: Tensor
) -> Tensor:
    """Computes mod(*scores, b, h, q, k) at all b, h, q and k of `positions`, none of them empty.

    mod gets 0-d tensors, as in torch.
    """
    over = mod
    for dim in range(3, -1, -1):
        one = tuple(0 if n == dim else None for n in range(4))
        over = torch.vmap(over, in_dims=(*(0 for _ in scores), *one))
    with _Definition():
        return over(*scores, *positions)
