"""Eviction policies of caches: the interface, and published policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_choice, require_int, require_number, shown
from omniattn.former_names import present_names


class Slots(NamedTuple):
    """Tokens of some heads after a call, before its eviction.

    positions: position of each slot's token (B, H, S) int64, -1 in free slots.
    weight: accumulated attention weight of each slot's token (B, H, S), see `Eviction`.
    seen, length: number of tokens before and after the call.
    """

    positions: Tensor
    weight: Tensor
    seen: int
    length: int

    @property
    def live(self) -> Tensor:
        """Mask (B, H, S) of the slots that hold a token."""
        return self.positions >= 0

    def first_or_last(self, first: int, last: int) -> Tensor:
        """Selects the tokens among the `first` or the `last` of the sequence."""
        p = self.positions
        return self.live & ((p < first) | (p >= self.length - last))


@dataclass(frozen=True)
class Eviction(ABC):
    """A policy by which an `EvictingCache` evicts tokens at the end of a call.

    A call stores its tokens and attends to all kept tokens. It then accumulates the attention
    weights w that each token has received, averaged over the query heads of a group:
    ``weight = decay^n weight + sum_i decay^(n - 1 - i) w_i`` over the call's n queries. Finally it
    keeps the tokens that `keep` selects.
    """

    #: Decay of the accumulated weights, 1 for plain sums.
    decay: ClassVar[float] = 1.0
    #: True if tokens are rotated in each call by their indices 0, 1, ... in the cache.
    moves: ClassVar[bool] = False

    @property
    def capacity(self) -> int | None:
        """Largest number of kept tokens after a call, None if unbounded."""
        return None

    def observed(self, seen: int, new: int) -> int:
        """Returns the number of last queries of a call whose weights are accumulated."""
        return 0

    def admits(self, slots: Slots, new: int) -> Tensor | None:
        """Selects the slots to keep before `new` tokens are stored; None for all."""
        return None

    @abstractmethod
    def keep(self, slots: Slots) -> Tensor:
        """Selects the slots (B, H, S) to keep after a call."""


def require_sizes(name: str, least: int, **sizes: int) -> None:
    for size, value in sizes.items():
        require_int(name, size, value, least)


@dataclass(frozen=True)
class Threshold(Eviction):
    """Evicts tokens whose share of the attention falls below `eps`.

    Args:
        eps: smallest share of a kept token.
        stat: "mean" of the weights of all queries since the token; "ema", a sum with decay `rho`
            per query; "sum", which is tested once, at age `grace`, since it never decreases.
        grace: age in tokens from which a token is tested.
        sinks, recent: numbers of first and last tokens that are always kept.
        rho: decay of "ema".
    """

    eps: float = 1e-3
    stat: str = "mean"
    grace: int = 32
    sinks: int = 4
    recent: int = 32
    rho: float = 0.9

    def __post_init__(self) -> None:
        require_number("Threshold", "eps", self.eps, 0)
        require_choice("Threshold", "stat", self.stat, ("mean", "ema", "sum"))
        require_sizes("Threshold", 0, grace=self.grace, sinks=self.sinks, recent=self.recent)
        require_number("Threshold", "rho", self.rho, most=1, above=0)

    @property
    def decay(self) -> float:  # type: ignore[override]  # depends on the instance
        return self.rho if self.stat == "ema" else 1.0

    def observed(self, seen: int, new: int) -> int:
        return new

    def keep(self, slots: Slots) -> Tensor:
        age = slots.length - 1 - slots.positions
        share = slots.weight / (age + 1) if self.stat == "mean" else slots.weight
        tested = age >= self.grace
        if self.stat == "sum":
            tested &= slots.seen - 1 - slots.positions < self.grace
        safe = slots.first_or_last(self.sinks, self.recent)
        return slots.live & (safe | ~tested | (share >= self.eps))


@dataclass(frozen=True)
class H2O(Eviction):
    """Keeps the last `recent` tokens and the `heavy` others with the largest sums of weights.

    Of tokens with equal sums, the earliest is evicted first.

    Reference:
        Zhang et al., H2O: Heavy-Hitter Oracle, 2023, arXiv:2306.14048. The paper's code has no
        grouped heads; the mean over a group is this package's extension.
    """

    heavy: int
    recent: int

    def __post_init__(self) -> None:
        require_sizes("H2O", 0, heavy=self.heavy)
        require_sizes("H2O", 1, recent=self.recent)

    @property
    def capacity(self) -> int:
        return self.heavy + self.recent

    def observed(self, seen: int, new: int) -> int:
        return new

    def keep(self, slots: Slots) -> Tensor:
        new = slots.length - slots.seen
        excess = min(slots.seen, self.capacity) + new - self.capacity
        if excess <= 0:
            return slots.live
        heavy = slots.live & (slots.positions < slots.length - self.recent)
        weight = slots.weight.masked_fill(~heavy, torch.inf)
        if excess == 1:
            least = heavy & (weight == weight.amin(-1, keepdim=True))
            first = slots.positions.masked_fill(~least, slots.length).argmin(-1, keepdim=True)
        else:
            by_position = slots.positions.argsort(-1)
            order = weight.gather(-1, by_position).argsort(dim=-1, stable=True)
            first = by_position.gather(-1, order[..., :excess])
        return slots.live.scatter(-1, first, False)


@dataclass(frozen=True)
class Streaming(Eviction):
    """Keeps the first `sinks` and the last `recent` tokens, with positions renumbered from 0.

    Keys are stored unrotated; each call rotates them by their indices 0, 1, ... in the cache. Once
    tokens have been evicted, several new tokens are processed one at a time.

    Args:
        sinks, recent: numbers of kept tokens.
        evict: "after" a call, so that a query attends to sinks + recent + 1 tokens including its
            own, or "before" it, for sinks + recent tokens.

    Reference:
        Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023,
        arXiv:2309.17453.
    """

    moves: ClassVar[bool] = True

    sinks: int = 4
    recent: int = 1020
    evict: str = "after"

    def __post_init__(self) -> None:
        require_sizes("Streaming", 0, sinks=self.sinks)
        require_sizes("Streaming", 1, recent=self.recent)
        require_choice("Streaming", "evict", self.evict, ("after", "before"))

    @property
    def capacity(self) -> int:
        return self.sinks + self.recent

    def admits(self, slots: Slots, new: int) -> Tensor | None:
        if self.evict == "after":
            return None
        return slots.first_or_last(self.sinks, max(self.recent - new, 0))

    def keep(self, slots: Slots) -> Tensor:
        return slots.first_or_last(self.sinks, self.recent)


@dataclass(frozen=True)
class SnapKV(Eviction):
    """Compresses the prompt, the first call, to `size` tokens; keeps all later tokens.

    The votes of a key are the attention weights of the prompt's last `window` queries, summed and
    pooled over `kernel` adjacent keys. The keys of the window and those with the most votes are
    kept; of equal votes, the earlier key.

    Args:
        size: number of kept tokens of a longer prompt, more than `window`.
        window: number of voting queries.
        kernel: width of the pooling, odd.
        pooling: "mean" or "max"; keys beyond the ends count as keys without votes.

    Reference:
        Li et al., SnapKV: LLM Knows What You Are Looking for Before Generation, 2024,
        arXiv:2404.14469. The paper's code has no grouped heads; the mean over a group is this
        package's extension.
    """

    size: int
    window: int = 32
    kernel: int = 7
    pooling: str = "mean"

    def __post_init__(self) -> None:
        require_sizes("SnapKV", 1, window=self.window, kernel=self.kernel)
        require_sizes("SnapKV", self.window + 1, size=self.size)
        require_choice("SnapKV", "pooling", self.pooling, ("mean", "max"))
        if self.kernel % 2 == 0:
            raise ValueError(f"SnapKV: kernel must be odd, got kernel={self.kernel}")

    def observed(self, seen: int, new: int) -> int:
        return min(self.window, new) if seen == 0 and new > self.size else 0

    def keep(self, slots: Slots) -> Tensor:
        if slots.seen > 0 or slots.length <= self.size:
            return slots.live
        # The slots of a first call are sorted by position.
        votes = slots.weight[..., : slots.length - self.window]
        pool = nnf.avg_pool1d if self.pooling == "mean" else nnf.max_pool1d
        votes = pool(votes, self.kernel, stride=1, padding=self.kernel // 2)
        best = votes.argsort(dim=-1, descending=True, stable=True)[..., : self.size - self.window]
        return slots.first_or_last(0, self.window).scatter(-1, best, True)


@dataclass(frozen=True)
class Window(Eviction):
    """Keeps the last `size` tokens, including the query's own, in a `RollingCache`.

    Queries attend to the size - 1 last tokens before their call and all earlier tokens of the call;
    set the layer's `window_size` for the exact window.
    """

    size: int

    def __post_init__(self) -> None:
        require_sizes("Window", 1, size=self.size)

    @property
    def capacity(self) -> int:
        return self.size

    def admits(self, slots: Slots, new: int) -> Tensor:
        return slots.first_or_last(0, self.size - 1)

    def keep(self, slots: Slots) -> Tensor:
        return slots.first_or_last(0, self.size)


def policies_of_groups(
    op: str, eviction: Eviction | Sequence[Eviction], heads: int, kv_heads: int
) -> Eviction | tuple[Eviction, ...]:
    """Converts a layer's eviction, one policy or one per head, to one policy or one per kv head."""
    if isinstance(eviction, Eviction):
        return eviction
    if not isinstance(eviction, Sequence) or not all(isinstance(p, Eviction) for p in eviction):
        raise TypeError(
            f"{op}: eviction must be an Eviction or one for each head, "
            f"got eviction={shown(eviction)}"
        )
    if len(eviction) != heads:
        raise ValueError(
            f"{op}: eviction must have one policy for each of {heads} heads, "
            f"got len(eviction)={len(eviction)}"
        )
    group = heads // kv_heads
    for head, policy in enumerate(eviction):
        first = head // group * group
        if policy != eviction[first]:
            raise ValueError(
                f"{op}: heads {first} to {first + group - 1} share their keys and must have one "
                f"policy, got eviction[{first}]={eviction[first]}, eviction[{head}]={policy}"
            )
    return tuple(eviction[::group])


def evicted_of(positions: Tensor, length: int) -> Tensor:
    """Computes the mask (B, H, length) of evicted tokens from positions (B, H, S), -1 if free."""
    gone = torch.ones((*positions.shape[:2], length + 1), dtype=torch.bool, device=positions.device)
    gone.scatter_(2, positions.masked_fill(positions < 0, length), False)
    return gone[..., :length]


def require_plain(options: dict[str, Any]) -> None:
    """Removes options with default values; rejects those that unordered slots cannot support."""
    for name in ("mask", "bias", "relative", "alibi_slopes", "score_mod"):
        if options.pop(name, None) is not None:
            raise ValueError(
                f"EvictingCache: {name} must be None, since slots are unordered, got one"
            )
    causal, window = options.pop("causal", True), tuple(options.pop("window_size", (-1, -1)))
    if not causal or window != (-1, -1):
        raise ValueError(
            "EvictingCache: attention must be causal and without a window, "
            f"got causal={causal}, window_size={window}"
        )
    normalizer = present_names("EvictingCache", options).get("normalizer", "softmax")
    if normalizer != "softmax":
        raise ValueError(
            f"EvictingCache: normalizer must be 'softmax', got normalizer={shown(normalizer)}"
        )
