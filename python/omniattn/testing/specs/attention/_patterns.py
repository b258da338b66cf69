"""Index-based masks, and options of attention that the benchmark times."""

from __future__ import annotations

from typing import Any

import torch

from omniattn.functional import masks
from omniattn.testing.spec import Case
from omniattn.testing.specs.attention._attention_cases import qkv

_BLOCKS = torch.arange(2 * 4 * 4 * 8).view(2, 4, 4, 8) % 5 < 2

#: Index-based masks, each with cases; document ids sorted, then unsorted.
PATTERNS: dict[str, masks.Mask] = {
    "prefix": masks.PrefixLM(torch.tensor([0, 70])),
    "chunked": masks.Chunked(48),
    "pooled": masks.PooledKeys(8, 2, first=40),
    "packed": masks.Documents(torch.arange(160).expand(2, 160) // 70) & masks.Causal(),
    "documents": masks.Documents(torch.arange(320).view(2, 160) % 3),
    "dilated": masks.Dilated(3, 20),
    "strided": masks.Strided(40, 9),
    "stridedheads": masks.Strided(40, 9, split_heads=True),
    "fixed": masks.Fixed(50, 3),
    "fixedheads": masks.Fixed(50, 3, patterns=3),
    "everykth": masks.EveryKth(30),
    "neighbours": masks.Neighborhood(41) & masks.KeyLengths(torch.tensor([160, 90])),
    "dilatedneighbours": masks.Neighborhood(9, 7),
    "blocklocalglobal": masks.block_local_global(30, (0, 100), causal=True),
    "chunksbefore": masks.Chunked(30, back=(1, 2)),
    "blocks": masks.Blocks.from_block_mask(_BLOCKS, block_size=(48, 20), size=(160, 160)),
    "csrblocks": masks.Blocks.from_csr(
        torch.tensor([0, 1, 3, 3]), torch.tensor([0, 0, 1]), (160, 160), block_size=(64, 128)
    ),
    "predicate": masks.from_predicate(
        lambda b, h, q, k: (k * (h + 1) <= q) | (q // 64 == 1), 160, 160, heads=4
    ),
}

#: Batch size, heads and key heads of masks that differ between batches or heads. The others mask
#: all alike, so that one batch of two heads shows their errors.
_SIZES = {
    **dict.fromkeys(("prefix", "packed", "documents", "neighbours"), (2, 2, 1)),
    **dict.fromkeys(("stridedheads", "fixedheads"), (1, 4, 2)),
    **dict.fromkeys(("blocks", "predicate"), (2, 4, 2)),
}


def pattern_cases() -> tuple[Case, ...]:
    """Returns a case of 160 queries and keys for each of PATTERNS."""
    made = []
    for name, mask in PATTERNS.items():
        batch, heads, key_heads = _SIZES.get(name, (1, 2, 1))
        made.append(qkv(name, batch, 160, 160, heads, key_heads, 16, mask=mask))
    return tuple(made)


#: Patterns of the benchmark, for 1024 queries and keys.
LONG_PATTERNS: dict[str, masks.Mask] = {
    "prefix": masks.PrefixLM(torch.tensor([256])),
    "chunked": masks.Chunked(256),
    "neighbours": masks.Neighborhood(127),
    "dilated": masks.Dilated(4, 63),
    "strided": masks.Strided(64, 64),
    "fixed": masks.Fixed(64, 8),
    "everykth": masks.EveryKth(32),
    "blockslocalglobal": masks.block_local_global(128, (0, 512)),
    "blocks": masks.Blocks.from_block_mask(
        torch.eye(8, dtype=torch.bool)[None, None], block_size=128, size=(1024, 1024)
    ),
}

#: A mask for one fixed size, small enough to compare with fp64.
LOCAL_AND_FIRST = masks.from_predicate(
    lambda b, h, q, k: (k <= q) & ((q - k < 64) | (k % 64 < 8)), 320, 320
)
LONG_OPTIONS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("sinks", ("sinks",), {}),
    ("headscale", ("head scale",), {}),
    ("sigmoid", (), {"normalizer": "sigmoid"}),
    ("relu2", (), {"normalizer": "relu2", "scale": 0.01}),
    ("dropout", ("seed",), {"dropout_p": 0.1}),
    *((name, (), {"mask": mask}) for name, mask in LONG_PATTERNS.items()),
)
