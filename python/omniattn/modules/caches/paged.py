"""Paged keys and values; sequences share pages with copy-on-write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_int, shown
from omniattn.functional.masks import KeyPadding, Mask
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod
from omniattn.modules.base.state import require_index, take
from omniattn.modules.caches.cache import (
    Attend,
    Cache,
    Reading,
    check_new,
    head_sizes,
    new_storage,
    require_storage_dtype,
)
from omniattn.modules.caches.quantized import (
    int8_rows,
    new_int8_storage,
    reading_int8,
    refuse_layer,
    require_int8,
    widened,
)


class PagePool:
    """Reference-counted pages of keys and values (num_pages, Hkv, page_size, D).

    Args:
        num_pages, page_size, num_kv_heads, head_dim: sizes of the storage.
        v_head_dim: head size of the values, default `head_dim`.
        device, dtype: device and dtype of the storage.
        kv_dtype: torch.int8 to store keys and values of `dtype` in int8, with a factor for each
            token and head, as a QuantizedCache does.

    Example:
        >>> pool = PagePool(8, 4, 1, 16)
        >>> cache = PagedCache(pool)
        >>> k, v = cache.append(torch.ones(1, 5, 1, 16), torch.ones(1, 5, 1, 16))
        >>> pool.used_pages, cache.fork().length, pool.used_pages
        (2, 5, 2)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"PagePool: page_size must be positive, got page_size={page_size}")
        require_int8("PagePool", kv_dtype)
        require_storage_dtype("PagePool", dtype)
        shape = (num_pages, num_kv_heads, page_size)
        sizes = (head_dim, v_head_dim)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        #: Factors (num_pages, Hkv, page_size) of the rows of k and v in int8; otherwise empty.
        self.factors: tuple[Tensor, ...] = ()
        if kv_dtype is None:
            self.k, self.v = new_storage("PagePool", shape, sizes, device, dtype)
        else:
            self.k, self.v, *factors = new_int8_storage(shape, sizes, device, self.dtype)
            self.factors = tuple(factors)
        self._owners = [0] * num_pages
        self._free = list(range(num_pages))[::-1]

    @property
    def page_size(self) -> int:
        """Number of tokens in a page."""
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Size of all pages in bytes."""
        return sum(t.nbytes for t in self.stored)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """Keys, values and, if they are int8, their factors: (num_pages, Hkv, page_size, ...)."""
        return (self.k, self.v, *self.factors)

    def rows(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Returns new keys and values as they are `stored`."""
        return int8_rows(k, v) if self.factors else (k, v)

    @property
    def used_pages(self) -> int:
        """Number of pages with owners."""
        return len(self._owners) - len(self._free)

    @property
    def free_pages(self) -> int:
        """Number of pages without owners."""
        return len(self._free)

    def acquire(self) -> int:
        """Returns a free page, now with one owner."""
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def retain(self, pages: Sequence[int]) -> None:
        """Adds an owner to each page."""
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes an owner from each page; a page without owners becomes free."""
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def owners(self, page: int) -> int:
        """Returns the number of sequences that own the page."""
        return self._owners[page]

    def copy(self, page: int) -> int:
        """Returns a copy of a shared page, for one of its owners to write to."""
        copy = self.acquire()
        for stored in self.stored:
            stored[copy] = stored[page]
        self.release([page])
        return copy


class PagedCache(Cache):
    """Sequences of different lengths in a PagePool, each a list of pages.

    Forks and beams share pages; appending to a partly filled shared page copies it first.
    `functional.attention_cached` reads `pages` in place by `block_table` and `lengths`, as
    `Attention` does without mask and bias tensors. The views are gathered copies, in which shorter
    sequences are padded on the left, so that bottom-right aligned masks stay valid; `mask` hides
    the padding. Pages in int8 are read in place only, without mask and bias tensors.

    Args:
        pool: pool of pages, which several caches can share.
        batch: number of sequences, initially empty.

    Raises:
        ValueError: a shape does not match, or the pool has too few free pages; nothing is stored
            then.
        RuntimeError: an appended tensor requires a gradient.

    Reference:
        Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, 2023,
        arXiv:2309.06180.
    """

    def __init__(self, pool: PagePool, batch: int = 1) -> None:
        self.pool = pool
        self._pages: list[list[int]] = [[] for _ in range(batch)]
        self._lengths = [0] * batch

    @property
    def length(self) -> int:  # type: ignore[override]  # a property here
        return max(self._lengths, default=0)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each sequence (B,) int64."""
        return torch.tensor(self._lengths, device=self.pool.k.device)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the pages that the sequences own; counts shared pages once."""
        pages = {page for row in self._pages for page in row}
        return len(pages) * sum(t[:1].nbytes for t in self.pool.stored)

    @property
    def block_table(self) -> Tensor:
        """Pages of each sequence in order, (B, max pages) int32, -1 after the last."""
        width = max((len(row) for row in self._pages), default=0)
        rows = [row + [-1] * (width - len(row)) for row in self._pages]
        shape = (len(rows), width)  # also for no rows or pages
        return torch.tensor(rows, dtype=torch.int32, device=self.pool.k.device).view(shape)

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole pool (num_pages, page_size, Hkv, D)."""
        return self.pool.k.transpose(1, 2), self.pool.v.transpose(1, 2)

    @property
    def mask(self) -> Mask | None:
        if len(set(self._lengths)) <= 1:
            return None
        position = torch.arange(self.length, device=self.pool.k.device)
        return KeyPadding(position >= self.length - self.lengths[:, None])

    def first(self, count: int) -> Tensor | None:
        """Returns the position of the first view token, negative for padded sequences."""
        return None if len(set(self._lengths)) <= 1 else self.lengths - count

    def _where(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns page and slot of positions (B, n); negative positions give an arbitrary page."""
        positions = positions.clamp(min=0)
        pages = self.block_table.long().gather(1, positions // self.pool.page_size)
        return pages.clamp(min=0), positions % self.pool.page_size

    def views(self) -> tuple[Tensor, Tensor]:
        """Returns gathered copies, padded on the left to the longest sequence."""
        position = torch.arange(self.length, device=self.pool.k.device)
        page, slot = self._where(position - (self.length - self.lengths[:, None]))
        k, v, *factors = (t.transpose(1, 2)[page, slot] for t in self.pool.stored)
        return widened(self.pool.dtype, k, v, *factors) if factors else (k, v)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.store(k, v)
        return self.views()

    def store(self, k: Tensor, v: Tensor) -> None:
        """Stores n new tokens, for callers that read the pages in place."""
        batch, new = len(self._pages), k.shape[1]
        check_new("PagedCache", k, v, batch, *head_sizes(self.pool.k, self.pool.v))
        if new == 0:
            return
        self._reserve(new)
        page, slot = self._where(self.lengths[:, None] + torch.arange(new, device=k.device))
        for stored, rows in zip(self.pool.stored, self.pool.rows(k, v), strict=True):
            stored.transpose(1, 2)[page, slot] = rows
        self._lengths = [length + new for length in self._lengths]

    def attention(
        self,
        k: Tensor,
        v: Tensor,
        attend: Attend,
        mask: Tensor | Mask | MaskMod | None,
        score_mod: ScoreMod | None,
        *,
        bias: Tensor | None = None,
        **options: Any,
    ) -> Reading:
        """Reads the pages in place unless there is a mask or bias, which index the views."""
        if self.pool.factors:
            return self._attention_int8(k, v, mask, bias, score_mod)
        if mask is not None or bias is not None:
            return super().attention(k, v, attend, mask, score_mod, bias=bias, **options)
        self.store(k, v)
        attend = partial(
            functional.attention_cached, cache_seqlens=self.lengths, block_table=self.block_table
        )
        return Reading(*self.pages, mask, score_mod, attend)

    def _attention_int8(
        self,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Mask | MaskMod | None,
        bias: Tensor | None,
        score_mod: ScoreMod | None,
    ) -> Reading:
        for name, given in (("mask", mask), ("bias", bias)):
            if given is not None:
                raise ValueError(
                    f"PagedCache: {name} must be None for pages in int8, got {name}={shown(given)}"
                )
        self.store(k, v)
        k_scale, v_scale = (t.transpose(1, 2) for t in self.pool.factors)
        attend = reading_int8(self.lengths, k_scale, v_scale, self.block_table)
        return Reading(*self.pages, None, score_mod, attend)

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
        if self.pool.factors:
            refuse_layer("PagedCache")
        return super().extend(k, v, attend, mask, score_mod, positional=positional)

    def _reserve(self, new: int) -> None:
        """Acquires unshared pages for the next `new` tokens of every sequence."""
        size = self.pool.page_size
        begun = [
            row[length // size]
            for row, length in zip(self._pages, self._lengths, strict=True)
            if length % size
        ]
        missing = [
            -(-(length + new) // size) - len(row)
            for row, length in zip(self._pages, self._lengths, strict=True)
        ]
        # The last owner of a shared page writes to it without a copy.
        copies = sum(min(n, self.pool.owners(page) - 1) for page, n in Counter(begun).items())
        if sum(missing) + copies > self.pool.free_pages:
            raise ValueError(
                f"PagedCache: the pool must have {sum(missing) + copies} free pages, "
                f"got free_pages={self.pool.free_pages}"
            )
        for row, length, more in zip(self._pages, self._lengths, missing, strict=True):
            if length % size and self.pool.owners(row[length // size]) > 1:
                row[length // size] = self.pool.copy(row[length // size])
            row += [self.pool.acquire() for _ in range(more)]

    def crop(self, length: int) -> None:
        require_int("PagedCache", "length", length)
        if not 0 <= length <= self.length:
            raise ValueError(f"PagedCache: length must be in 0..{self.length}, got length={length}")
        self._lengths = [min(n, length) for n in self._lengths]
        for row, n in zip(self._pages, self._lengths, strict=True):
            kept = -(-n // self.pool.page_size)
            self.pool.release(row[kept:])
            del row[kept:]

    def reorder(self, index: Tensor) -> None:
        require_index("PagedCache", index, len(self._pages))
        chosen: list[int] = index.tolist()
        pages = [list(self._pages[i]) for i in chosen]
        for row in pages:
            self.pool.retain(row)
        for row in self._pages:
            self.pool.release(row)
        self._pages, self._lengths = pages, [self._lengths[i] for i in chosen]

    def fork(self, length: int | None = None) -> PagedCache:
        """Returns a cache of the same sequences, or their first `length` tokens, sharing pages."""
        other = PagedCache(self.pool)
        other._pages = [list(row) for row in self._pages]
        other._lengths = list(self._lengths)
        for row in other._pages:
            self.pool.retain(row)
        if length is not None:
            other.crop(length)
        return other

    @staticmethod
    def join(caches: Sequence[PagedCache]) -> PagedCache:
        """Moves all sequences of `caches` into one new cache; `caches` are empty afterwards."""
        if len({id(cache.pool) for cache in caches}) != 1:
            raise ValueError(
                f"PagedCache: caches to join must share one pool, got {len(caches)} caches of "
                f"{len({id(cache.pool) for cache in caches})} pools"
            )
        joined = PagedCache(caches[0].pool, 0)
        for cache in caches:
            joined._pages += cache._pages
            joined._lengths += cache._lengths
            cache._pages, cache._lengths = [], []
        return joined

    def free(self) -> None:
        """Releases all pages; the cache has no sequences afterwards."""
        self.reorder(torch.empty(0, dtype=torch.int64))

    def state_dict(self) -> dict[str, Any]:
        """Returns the pages in use, each once, and the sequences' block table and lengths."""
        table = self.block_table
        pages = table[table >= 0].unique()
        local = torch.searchsorted(pages, table.clamp(min=0)).to(torch.int32)
        stored = {
            name: t[pages.long()] for name, t in zip(self._names(), self.pool.stored, strict=True)
        }
        return stored | {
            "block_table": torch.where(table < 0, -1, local),
            "lengths": self.lengths,
        }

    def _names(self) -> tuple[str, ...]:
        """Returns the names of the stored tensors in a `state_dict`."""
        return ("k", "v", "k_scale", "v_scale") if self.pool.factors else ("k", "v")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = self._names()
        *tensors, table, lengths = take("PagedCache", state, *names, "block_table", "lengths")
        table, lengths, count = table.tolist(), lengths.tolist(), len(tensors[0])
        for name, new, stored in zip(names, tensors, self.pool.stored, strict=True):
            fits = (count, *stored.shape[1:])
            if new.shape != fits:
                raise ValueError(
                    f"PagedCache: {name} must have shape {fits}, got {name}={tuple(new.shape)}"
                )
            if (new.dtype == torch.int8) != (stored.dtype == torch.int8):
                raise TypeError(
                    f"PagedCache: {name} must be {stored.dtype}, got {name}.dtype={new.dtype}"
                )
        rows = [row[: -(-n // self.pool.page_size)] for row, n in zip(table, lengths, strict=True)]
        in_range = all(0 <= page < count for row in rows for page in row)
        long_enough = all(
            0 <= n <= len(row) * self.pool.page_size for row, n in zip(rows, lengths, strict=True)
        )
        if not in_range or not long_enough:
            raise ValueError(
                f"PagedCache: block_table must give pages in 0..{count - 1} for all tokens, "
                f"got block_table={table}, lengths={lengths}"
            )
        self.free()
        used = sorted({page for row in rows for page in row})
        if len(used) > self.pool.free_pages:
            raise ValueError(
                f"PagedCache: the pool must have {len(used)} free pages, "
                f"got free_pages={self.pool.free_pages}"
            )
        home = {page: self.pool.acquire() for page in used}
        for page, mine in home.items():
            for stored, new in zip(self.pool.stored, tensors, strict=True):
                stored[mine] = new[page]
        self._pages = [[home[page] for page in row] for row in rows]
        self._lengths = lengths
        for row in self._pages:
            self.pool.retain(row)
        self.pool.release(list(home.values()))
