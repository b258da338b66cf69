"""The protocol of key-value caches, and their common storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import FLOATS, require_int
from omniattn.functional.masks import BoolMask, Mask
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod, masked_by
from omniattn.modules.base.state import State, Storage, require_index

Attend = Callable[..., Any]


class Reading(NamedTuple):
    """Inputs of attention to the tokens of a cache.

    k, v: keys and values.
    mask, score_mod: mask and score function for these keys.
    attend: function of queries, k, v and the options of functional.attention.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | Mask | MaskMod | None
    score_mod: ScoreMod | None
    attend: Attend


class Cache(ABC):
    """Protocol of all caches: a `State` of keys and values. Inference only.

    A layer appends keys and values of n new tokens and attends to the returned views. The new
    tokens are the last in the views, so that bottom-right aligned masks need no change.
    """

    #: Number of tokens in the longest sequence, including evicted ones.
    length: int
    #: True if `attention` rotates queries and keys by their indices in the cache.
    moves: bool = False
    #: Period of the keys' rotations, None if keys are rotated by their positions.
    period: int | None = None
    #: Number of keys in a block whose mean is stored, None if means are not stored.
    block_size: int | None = None

    @property
    def filled(self) -> bool:
        """True if tokens have been appended."""
        return self.length > 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size of the allocated storage in bytes, used or not."""

    @abstractmethod
    def views(self) -> tuple[Tensor, Tensor]:
        """Returns the keys (B, S, Hkv, D) and values (B, S, Hkv, Dv) to attend to."""

    @abstractmethod
    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores n new tokens; returns the views that their queries attend to."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Removes all tokens from position `length` on."""

    @abstractmethod
    def reorder(self, index: Tensor) -> None:
        """Replaces row b by row index[b], e.g. after a step of beam search; index (B',) int."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the stored tokens, without unused storage."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the `state_dict` of a cache of the same kind and sizes."""

    @property
    def mask(self) -> Mask | None:
        """Mask of the views' keys that are tokens, not padding; None if all are."""
        return None

    @property
    def ordered(self) -> bool:
        """True if views are sorted by position, as mask and bias tensors require."""
        return True

    def first(self, count: int) -> Tensor | None:
        """Returns the position (B,) of the first of `count` tokens in ordered views, None for 0."""
        return None

    @property
    def limit(self) -> int | None:
        """Largest number of tokens, None if unbounded."""
        return None

    @property
    def block_keys(self) -> Tensor | None:
        """Mean key (B, whole blocks, Hkv, D) of each block, None if means are not stored."""
        return None

    def extend(
        self,
        k: Tensor,
        v: Tensor,
        attend: Attend,
        mask: Tensor | Mask | MaskMod | None = None,
        score_mod: ScoreMod | None = None,
        *,
        positional: bool = False,
    ) -> Reading:
        """Stores n new tokens and returns the inputs of their queries' attention to the views.

        Args:
            k, v: keys (B, n, Hkv, D) and values (B, n, Hkv, Dv) of the new tokens.
            attend: functional.attention, or another function with its options.
            mask, score_mod: mask and score function of the layer's caller, indexed by positions in
                the sequence.
            positional: True if other score terms depend on positions.
        """
        k, v = self.append(k, v)
        if mask is not None and not isinstance(mask, (Tensor, Mask)):
            score_mod, mask = masked_by(mask, score_mod), None
        mask = with_cache(self, mask, positional or score_mod is not None)
        if score_mod is None:
            return Reading(k, v, mask, None, attend)
        # attention_cached counts q among the keys, as score_mod's author does. The number of keys
        # is a tensor input of the traced function, so that all steps reuse one trace.
        sizes = torch.full((k.shape[0],), k.shape[1], device=k.device)
        first = self.first(k.shape[1])
        if first is not None:
            score_mod = _moved(score_mod, first)
        attend = partial(functional.attention_cached, cache_seqlens=sizes)
        return Reading(k, v, mask, score_mod, attend)

    def attention(
        self,
        k: Tensor,
        v: Tensor,
        attend: Attend,
        mask: Tensor | Mask | MaskMod | None,
        score_mod: ScoreMod | None,
        *,
        bias: Tensor | None = None,
        positional: bool = False,
        rope: tuple[Tensor, Tensor] | None = None,
        interleaved: bool = False,
    ) -> Reading:
        """`extend` for layers that attend to the cached keys and values unchanged.

        A cache can then read its storage in place, or compute the attention itself.

        Args:
            k, v, attend, mask, score_mod, positional: see `extend`.
            bias: tensor added to the scores.
            rope, interleaved: rotation of the new tokens, applied by caches with `moves`.
        """
        return self.extend(k, v, attend, mask, score_mod, positional=positional)


class StoredCache(Cache):
    """Base class of caches with a preallocated storage (B, Hkv, T, D), contiguous per head.

    Args:
        batch, max_length, num_kv_heads, head_dim: sizes of the storage.
        v_head_dim: head size of the values, default `head_dim`.
        device, dtype: device and dtype of the storage.
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (batch, num_kv_heads, max_length)
        sizes = (head_dim, v_head_dim)
        storage = new_storage(type(self).__name__, shape, sizes, device, dtype)
        #: Storage as views in the public layout, so that calls need not transpose it.
        self._k, self._v = (t.transpose(1, 2) for t in storage)
        self._sizes = head_sizes(*storage)
        self.length = 0

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes

    def _first(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the first `count` tokens of the storage, in the public layout."""
        return self._k.narrow(1, 0, count), self._v.narrow(1, 0, count)

    def crop(self, length: int) -> None:
        require_int(type(self).__name__, "length", length)
        if not 0 <= length <= self.length:
            raise ValueError(
                f"{type(self).__name__}: length must be in 0..{self.length}, got length={length}"
            )
        self.length = length

    def reorder(self, index: Tensor) -> None:
        require_index(type(self).__name__, index, self._k.shape[0])
        self._k, self._v = (rows_of_heads(t, 0, index) for t in (self._k, self._v))


def rows_of_heads(t: Tensor, dim: int, index: Tensor) -> Tensor:
    """Computes `t.index_select(dim, index)` for t (B, T, Hkv, D); keeps heads contiguous."""
    return t.transpose(1, 2).index_select(dim, index).transpose(1, 2)


def require_cache(op: str, state: State | None) -> Cache | None:
    """Requires that `state` is a Cache or None, and returns it."""
    if state is None or isinstance(state, Cache):
        return state
    raise TypeError(f"{op}: state must be a Cache, got type(state)={type(state).__name__}")


def storage_like(
    weight: Tensor,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Storage:
    """Returns the device and dtype of a storage; default: those of the weight."""
    return {
        "device": weight.device if device is None else device,
        "dtype": weight.dtype if dtype is None else dtype,
    }


def require_storage_dtype(name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(
            f"{name}: dtype must be float64, float32, bfloat16 or float16, got dtype={dtype}"
        )


def new_storage(
    name: str,
    shape: tuple[int, int, int],
    sizes: tuple[int, int | None],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Allocates zeros (*shape, D) for keys and (*shape, Dv) for values.

    `sizes` is (D, Dv); Dv is None if it equals D.
    """
    require_storage_dtype(name, dtype)
    k_dim, v_dim = sizes
    k = torch.zeros(*shape, k_dim, device=device, dtype=dtype)
    return k, k.new_zeros(*shape, k_dim if v_dim is None else v_dim)


def check_new(
    name: str, k: Tensor, v: Tensor, batch: int, heads: int, sizes: tuple[int, int]
) -> None:
    """Requires new k (B, n, Hkv, D) and v (B, n, Hkv, Dv) of these sizes; `sizes` is (D, Dv)."""
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise RuntimeError(f"{name}: supports inference only, wrap the call in torch.no_grad()")
    count = k.shape[1]
    for which, new, size in (("k", k, sizes[0]), ("v", v, sizes[1])):
        fits = (batch, count, heads, size)
        if new.shape != fits:
            raise ValueError(
                f"{name}: {which} must have shape {fits}, got {which}={tuple(new.shape)}"
            )


def head_sizes(keys: Tensor, values: Tensor) -> tuple[int, tuple[int, int]]:
    """Returns Hkv and (D, Dv) of storages (*, Hkv, *, D) and (*, Hkv, *, Dv)."""
    return keys.shape[1], (keys.shape[3], values.shape[3])


def with_cache(
    cache: Cache, mask: Tensor | Mask | None, positional: bool = False
) -> Tensor | Mask | None:
    """Combines `mask` with the cache's; `positional` is True if scores depend on positions."""
    if not cache.ordered and (mask is not None or positional):
        raise ValueError(
            "Attention: the cache must be sorted by position for masks and positional score terms, "
            f"got {type(cache).__name__} with sort=False"
        )
    if mask is None or cache.mask is None:
        return cache.mask if mask is None else mask
    return cache.mask & (BoolMask(mask) if isinstance(mask, Tensor) else mask)


def _moved(score_mod: ScoreMod, first: Tensor) -> ScoreMod:
    """Returns score_mod with first[b] added to query and key indices."""

    def moved(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score_mod(score, b, h, q + first[b], k + first[b])

    return moved
