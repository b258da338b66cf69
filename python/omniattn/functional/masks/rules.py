"""Masks that are rules of the kernels, and named compositions."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    makes_graph,
    require_choice,
    require_int,
    require_integers,
    require_pair,
    shown,
)
from omniattn.checks.packed import document_ids, require_all_tokens
from omniattn.encoding.masks import ANY_FAR, CHUNK_BITS, MaskKind, Rule
from omniattn.functional.masks.base import Mask, require_bool_mask
from omniattn.functional.masks.computed import AnyOf
from omniattn.functional.masks.tokens import GlobalTokens, Representatives
from omniattn.reference.values import require_all_rows

#: Tokens and strides: below the limits of csrc/semantics/{mask_rule,mask_rules}.h.
LONGEST, LONGEST_STRIDE = 2**38, 2**20 - 1


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Keys from `left` before to `right` after the query, inclusive; -1 is unbounded.

    "The W most recent tokens including this one" is SlidingWindow(W - 1, 0); `sliding_window`
    converts the conventions of other libraries. With `top_left` the first query is aligned with the
    first key.
    """

    left: int = -1
    right: int = -1
    top_left: bool = False

    def __post_init__(self) -> None:
        require_int("SlidingWindow", "left", self.left, -1)
        require_int("SlidingWindow", "right", self.right, -1)

    def rules(self) -> list[Rule]:
        kind = MaskKind.WINDOW_TOP_LEFT if self.top_left else MaskKind.WINDOW
        return [(kind, self.left, self.right, ())]


@dataclass(frozen=True)
class Causal(Mask):
    """Keys up to the query; `top_left` as in SlidingWindow."""

    top_left: bool = False

    def rules(self) -> list[Rule]:
        return SlidingWindow(-1, 0, self.top_left).rules()


@dataclass(frozen=True)
class KeyLengths(Mask):
    """The first lengths[b] keys of sequence b; lengths (B,) of integers.

    A length above Tk means all keys, one below 1 none, by `k < lengths[b]`.
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        require_integers("KeyLengths", "lengths", self.lengths)

    def rules(self) -> list[Rule]:
        return [(MaskKind.KEY_LENGTHS, 0, 0, (self.lengths.to(torch.int64),))]


@dataclass(frozen=True)
class KeyPadding(Mask):
    """Keys whose entry in `real` (B, Tk) is True."""

    real: Tensor

    def __post_init__(self) -> None:
        require_bool_mask("KeyPadding", "real", self.real)
        if self.real.dim() != 2:
            raise ValueError(
                f"KeyPadding: real must have shape (B, Tk), got real.shape={tuple(self.real.shape)}"
            )

    def rules(self) -> list[Rule]:
        return [(MaskKind.TENSOR, 0, 0, (self.real[:, None, None, :],))]


@dataclass(frozen=True)
class BoolMask(Mask):
    """Pairs whose entry in `mask`, broadcastable to (B, Hq, Tq, Tk), is True."""

    mask: Tensor

    def __post_init__(self) -> None:
        require_bool_mask("BoolMask", "mask", self.mask)

    def rules(self) -> list[Rule]:
        return [(MaskKind.TENSOR, 0, 0, (self.mask,))]


@dataclass(frozen=True)
class PrefixLM(Mask):
    """The first lengths[b] keys, and keys up to the query; lengths (B,) of integers.

    Raffel et al., Exploring the Limits of Transfer Learning, 2020, arXiv:1910.10683.
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        require_integers("PrefixLM", "lengths", self.lengths)

    def rules(self) -> list[Rule]:
        return [(MaskKind.PREFIX, 0, 0, (self.lengths.to(torch.int64),))]


@dataclass(frozen=True)
class Chunked(Mask):
    """Keys of the query's chunk of `size`, i // size == k // size, up to the query (Llama 4).

    With `back` = (near, far) the keys of the chunks near to far before it, of all before if far is
    None; (1, 1) is the chunk before. flash-attention's attention_chunk alone is causal=False.
    """

    size: int
    causal: bool = True
    back: tuple[int, int | None] = (0, 0)

    def __post_init__(self) -> None:
        require_int("Chunked", "size", self.size, 1)
        if not isinstance(self.back, tuple) or len(self.back) != 2:
            raise TypeError(f"Chunked: back must be (near, far), got back={shown(self.back)}")
        near, far = self.back
        require_int("Chunked", "near of back", near, 0, ANY_FAR - 1)
        if far is not None:
            require_int("Chunked", "far of back", far, near, ANY_FAR - 1)

    def rules(self) -> list[Rule]:
        near, far = self.back
        b = near + ((ANY_FAR if far is None else far) << CHUNK_BITS)
        return [(MaskKind.CHUNK, self.size, b, ()), *_causal(self.causal and near == 0)]


@dataclass(frozen=True)
class PooledKeys(Mask):
    """Keys that stand for several tokens each, visible from the query at the last of these on.

    Key k stands for the `size` tokens from k `stride` on, as the compressed keys of
    :func:`nsa_attention` do, and query q is token `first` + q. Queries are not aligned with the
    last key: `first` is the number of tokens less Tq where the last query is the last token.
    """

    size: int
    stride: int
    first: int = 0

    def __post_init__(self) -> None:
        require_int("PooledKeys", "size", self.size, 1, LONGEST)
        require_int("PooledKeys", "stride", self.stride, 1, LONGEST_STRIDE)
        require_int("PooledKeys", "first", self.first, -LONGEST, LONGEST)

    def rules(self) -> list[Rule]:
        return [(MaskKind.POOLED, self.stride, self.size - 1 - self.first, ())]


@dataclass(frozen=True)
class Documents(Mask):
    """Keys of the query's document, with integer document ids `queries` (B, Tq), `keys` (B, Tk).

    `keys` defaults to `queries`. Sorted ids, as in packed batches, are the fast case.
    """

    queries: Tensor
    keys: Tensor | None = None

    def __post_init__(self) -> None:
        require_integers("Documents", "queries", self.queries)
        if self.keys is not None:
            require_integers("Documents", "keys", self.keys)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> Documents:
        """Makes documents from positions (B, T), as in Hugging Face's packed sequences.

        A document starts where a position is not the previous one plus 1.
        """
        require_integers("Documents", "position_ids", position_ids)
        if position_ids.dim() == 0:
            raise ValueError(
                "Documents: position_ids must have shape (B, T), got position_ids.shape=()"
            )
        return cls(document_ids(position_ids))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, total: int | None = None) -> Documents:
        """Makes one row of documents [cu_seqlens[n], cu_seqlens[n + 1]) with `total` tokens.

        With `total` the call does not synchronise a GPU, and can be part of a compiled or exported
        program.
        """
        op = "Documents"
        require_integers(op, "cu_seqlens", cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"{op}: cu_seqlens must have shape (N + 1,), "
                f"got cu_seqlens.shape={tuple(cu_seqlens.shape)}"
            )
        if total is None and makes_graph():
            raise ValueError(
                f"{op}: total must be given with cu_seqlens in a compiled or exported program, "
                "got total=None"
            )
        require_all_tokens(op, cu_seqlens, total)
        if total is not None:
            require_all_rows(op, cu_seqlens, total, limit="total")
        lengths, documents = cu_seqlens.diff(), torch.arange(cu_seqlens.shape[0] - 1)
        documents = documents.to(lengths.device).repeat_interleave(lengths, output_size=total)
        return cls(documents[None])

    def rules(self) -> list[Rule]:
        queries = self.queries.to(torch.int64)
        keys = queries if self.keys is None else self.keys.to(torch.int64)
        return [(MaskKind.DOCUMENTS, 0, 0, (queries, keys))]


@dataclass(frozen=True)
class Neighborhood(Mask):
    """The `size` keys nearest to the query, or those a multiple of `dilation` away.

    At the ends of the sequence the window is shifted inwards, not cut, so that every query sees the
    same number of keys. Hassani et al., Neighborhood Attention Transformer, 2022, arXiv:2204.07143.
    """

    size: int
    dilation: int = 1

    def __post_init__(self) -> None:
        require_int("Neighborhood", "size", self.size, 1)
        require_int("Neighborhood", "dilation", self.dilation, 1)
        if self.size % 2 == 0:
            raise ValueError(f"Neighborhood: size must be odd, got size={self.size}")

    def rules(self) -> list[Rule]:
        return [(MaskKind.NEIGHBORS, self.size, self.dilation, ())]


Neighbourhood = Neighborhood  # the former spelling


def sliding_window(
    size: int | tuple[int, int],
    convention: Literal["huggingface", "fla", "mistral", "flash_attn", "torch"],
    *,
    causal: bool = True,
) -> SlidingWindow:
    """Returns a sliding window in the convention of another library.

    ===========  ================================================================================
    huggingface  `sliding_window=W`: W keys with the query's own; not causal: up to W away
    fla          `window_size=W`: W keys with the query's own
    mistral      the text of the Mistral paper: W keys before the query's own
    flash_attn   `window_size=(left, right)`: -1 is unbounded, bottom-right aligned
    torch        the same, as in `torch.nn.attention.varlen.varlen_attn`
    ===========  ================================================================================
    """
    op = "sliding_window"
    conventions = ("huggingface", "fla", "mistral", "flash_attn", "torch")
    require_choice(op, "convention", convention, conventions)
    if convention in ("flash_attn", "torch"):
        require_pair(op, "size", size, -1)
        left, right = size  # type: ignore[misc]
    else:
        require_int(op, "size", size, 1)
        assert isinstance(size, int)
        own = convention == "fla" or (convention == "huggingface" and causal)
        left = right = size - own
    return SlidingWindow(left, 0 if causal else right)


@functools.lru_cache(maxsize=64)
def block_local_global(
    size: int, global_index: tuple[int, ...] = (), *, causal: bool = False
) -> Mask:
    """The query's block of `size` keys, and all pairs of which one is a global token.

    A composition of `Chunked` and `GlobalTokens`; recent masks are cached with their blocks.
    """
    local = Chunked(size, causal=False)
    mask = local | GlobalTokens(global_index) if global_index else local
    return mask & Causal() if causal else mask


@functools.lru_cache(maxsize=64)
def hub_spoke(
    window: int,
    global_index: tuple[int, ...] = (),
    *,
    global_every: int | None = None,
    causal: bool = True,
) -> Mask:
    """The `window` keys before the query and its own, and all pairs of which one is a hub.

    The hubs are `global_index` and the multiples of `global_every`. If not causal, the window also
    includes as many keys after the query. A composition of `SlidingWindow` and `GlobalTokens`,
    cached as by `block_local_global`.
    """
    local = SlidingWindow(window, -1 if causal else window)
    mask = local | GlobalTokens(global_index, global_every)
    return mask & Causal() if causal else mask


@functools.lru_cache(maxsize=64)
def deterministic_sparse(
    window: int,
    stride: int,
    global_index: tuple[int, ...] = (0,),
    *,
    anchor: str = "relative",
    levels: tuple[tuple[int, int], ...] | None = None,
) -> Mask:
    """The `window` keys before the query and its own, one of every `stride` before these, and the
    global keys; causal.

    A composition of `SlidingWindow`, `Representatives` and `GlobalTokens`, cached as by
    `block_local_global`.
    """
    parts: list[Mask] = [SlidingWindow(window, -1)]
    parts.append(Representatives(window, stride, anchor, levels))
    if global_index:
        parts.append(GlobalTokens(global_index, queries=False))
    return AnyOf(tuple(parts)) & Causal()


def _causal(causal: bool) -> list[Rule]:
    return Causal().rules() if causal else []
