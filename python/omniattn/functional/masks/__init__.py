"""Attention masks as values, encoded as rules for the kernels and combined by & | ~.

Positions: query q is at position i = q + Tk - Tq of the keys, so that the last query is aligned
with the last key (bottom-right alignment), unless a mask says otherwise. In packed and cached
batches positions count within each sequence.

Masks made by `|` and `~` become blocks of 64 x 64 for the sizes of a call, and cache the blocks of
the last sizes. If the sequences of a batch differ in length, these sizes include the lengths, and
reading them synchronises a GPU. torch.compile traces `&` and `|`, but not `~`: inside a compiled
function, write `Not(mask)`.

A new rule on (query, key) indices needs a dataclass here, a struct in csrc/semantics/mask_rules.h
and a case in encoding/masks.py; no schema, fake kernel or gradient changes.
"""

from omniattn.functional.masks.base import All, Mask
from omniattn.functional.masks.blocks import Blocks, from_block_mask, from_predicate
from omniattn.functional.masks.computed import AnyOf, Not
from omniattn.functional.masks.grid import GridNeighborhood
from omniattn.functional.masks.grid import GridNeighbourhood as GridNeighbourhood
from omniattn.functional.masks.periodic import Dilated, EveryKth, Fixed, Strided
from omniattn.functional.masks.rules import (
    BoolMask,
    Causal,
    Chunked,
    Documents,
    KeyLengths,
    KeyPadding,
    Neighborhood,
    PooledKeys,
    PrefixLM,
    SlidingWindow,
    block_local_global,
    deterministic_sparse,
    hub_spoke,
    sliding_window,
)
from omniattn.functional.masks.rules import Neighbourhood as Neighbourhood
from omniattn.functional.masks.tokens import GlobalTokens, Representatives

__all__ = [
    "All",
    "AnyOf",
    "Blocks",
    "BoolMask",
    "Causal",
    "Chunked",
    "Dilated",
    "Documents",
    "EveryKth",
    "Fixed",
    "GlobalTokens",
    "GridNeighborhood",
    "KeyLengths",
    "KeyPadding",
    "Mask",
    "Neighborhood",
    "Not",
    "PooledKeys",
    "PrefixLM",
    "Representatives",
    "SlidingWindow",
    "Strided",
    "block_local_global",
    "deterministic_sparse",
    "from_block_mask",
    "from_predicate",
    "hub_spoke",
    "sliding_window",
]
