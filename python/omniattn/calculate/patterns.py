"""Counts of sparse patterns: pairs, density and keys of the last query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from omniattn.calculate.pairs import keys_of, pairs
from omniattn.calculate.sources import require_sizes
from omniattn.functional import masks
from omniattn.functional.masks import Mask

#: Patterns in sizes of their papers: the name, its description, and the mask.
_PATTERNS: tuple[tuple[str, str, Callable[[], Mask]], ...] = (
    ("causal", "all keys up to the query", masks.Causal),
    ("sliding window", "4096 keys, Mistral", lambda: masks.SlidingWindow(4095, 0)),
    ("chunked", "chunks of 8192, Llama 4", lambda: masks.Chunked(8192)),
    ("dilated", "every 2nd of 512 keys", lambda: masks.Dilated(2, 255)),
    ("strided", "128 recent, every 128th", lambda: masks.Strided(128, 128)),
    ("fixed", "blocks of 128, 8 columns", lambda: masks.Fixed(128, 8)),
    ("every k-th", "multiples of 64", lambda: masks.EveryKth(64)),
    ("block-local and global", "blocks of 64, 1 global", lambda: _local_global()),
    ("Longformer", "256 on each side, 1 global", lambda: masks.hub_spoke(256, (0,), causal=False)),
    ("hub and spoke", "127 back, hubs every 128", lambda: masks.hub_spoke(127, global_every=128)),
    ("DetSA", "256 back, every 64th before", lambda: masks.deterministic_sparse(256, 64)),
)


def _local_global() -> Mask:
    return masks.block_local_global(64, (0,), causal=True)


@dataclass(frozen=True)
class PatternCount:
    """Counts of one pattern.

    Args:
        name, sizes: name of the pattern and its sizes.
        pairs: visible pairs of a sequence.
        density: share of all T^2 pairs.
        last: keys of the last query.
    """

    name: str
    sizes: str
    pairs: int
    density: float
    last: int


def pattern_counts(tokens: int) -> list[PatternCount]:
    """Counts the pairs of published patterns in a sequence of `tokens` tokens.

    Example:
        >>> pattern_counts(1024)[0].pairs == 1024 * 1025 // 2
        True
    """
    require_sizes("pattern_counts", tokens=tokens)
    found = []
    for name, sizes, make in _PATTERNS:
        mask = make()
        count = pairs(mask, tokens)
        last = len(keys_of(mask, tokens - 1))
        found.append(PatternCount(name, sizes, count, count / tokens**2, last))
    return found


def selected_pairs(tokens: int, topk: int) -> int:
    """Returns the pairs of causal attention to the `topk` best keys, ``sum_i min(k, i + 1)``.

    Example:
        >>> selected_pairs(4, 2)
        7
    """
    require_sizes("selected_pairs", tokens=tokens, topk=topk)
    full = min(topk, tokens)
    return full * (full + 1) // 2 + (tokens - full) * full
