"""The states of attention: keys and values of the tokens seen so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from omniattn.functional._checks import FLOATS
from omniattn.functional.masks import Mask
from omniattn.modules.state import State, take


class Cache(ABC):
    """The protocol of all caches: a `State` of keys and values. Inference only.

    A layer appends what it has computed for n new tokens and attends to the views it gets back.
    Their last tokens are the new ones, so that bottom-right aligned masks are right as they are.
    """

    #: Number of tokens seen by the longest sequence.
    length: int

    @property
    def filled(self) -> bool:
        """Whether anything has been appended."""
        return self.length > 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the storage, used or not."""

    @abstractmethod
    def views(self) -> tuple[Tensor, Tensor]:
        """Keys (B, S, Hkv, D) and values (B, S, Hkv, Dv) to attend to, in the public layout."""

    @abstractmethod
    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores n new tokens and returns the views that their queries attend to."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forgets all tokens from position `length` on."""

    @abstractmethod
    def reorder(self, index: Tensor) -> None:
        """Makes row b what row index[b] was, e.g. after a step of beam search; index (B',) int."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The stored tokens, without unused storage."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` of a cache of the same kind and sizes gave."""

    @property
    def mask(self) -> Mask | None:
        """Which keys of the views belong to a sequence, None if all do."""
        return None

    @property
    def ordered(self) -> bool:
        """Whether the views are sorted by position, as a mask or bias tensor takes for granted."""
        return True


class KVCache(Cache):
    """Preallocated keys and values with one length for the whole batch.

    The storage is (B, Hkv, max_length, D), so that one head's keys are contiguous; the views have
    the public layout (B, T, Hkv, D) and share the storage.

    Args:
        batch, max_length, num_kv_heads, head_dim: sizes of the storage.
        v_head_dim: head size of the values, default `head_dim`.
        device, dtype: of the storage.

    Raises:
        TypeError: a dtype that is not floating point.
        ValueError: if a shape does not fit or the storage is full.
        RuntimeError: if something with a gradient is appended.

    Example:
        >>> cache = KVCache(1, 16, 2, 4)
        >>> k, v = cache.append(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4))
        >>> k.shape, cache.length
        (torch.Size([1, 3, 2, 4]), 3)
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
        self._k, self._v = new_storage(type(self).__name__, shape, sizes, device, dtype)
        self.length = 0

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self._k.shape[0]

    @property
    def max_length(self) -> int:
        """Number of tokens that fit."""
        return self._k.shape[2]

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes

    def views(self) -> tuple[Tensor, Tensor]:
        return (
            self._k[:, :, : self.length].transpose(1, 2),
            self._v[:, :, : self.length].transpose(1, 2),
        )

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_new("KVCache", k, v, self.batch, self._k, self._v)
        end = self.length + k.shape[1]
        if end > self.max_length:
            raise ValueError(
                f"KVCache: length must not exceed max_length={self.max_length}, got length={end}"
            )
        self._k[:, :, self.length : end] = k.transpose(1, 2)
        self._v[:, :, self.length : end] = v.transpose(1, 2)
        self.length = end
        return self.views()

    def crop(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"KVCache: length must be in 0..{self.length}, got length={length}")
        self.length = length

    def reorder(self, index: Tensor) -> None:
        self._k = self._k.index_select(0, index)
        self._v = self._v.index_select(0, index)

    def state_dict(self) -> dict[str, Any]:
        k, v = self.views()
        return {"k": k.clone(), "v": v.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        k, v = take(type(self).__name__, state, "k", "v")
        self.length = 0
        self.append(k, v)


class RollingCache(Cache):
    """The last `window` tokens, for a sliding window of that many keys, the own one included.

    Token p lies in slot p mod window. One new token attends to the slots in storage order, which
    softmax does not mind; several attend to the window in front of them and to themselves.

    Args:
        batch, window, num_kv_heads, head_dim: sizes of the storage.
        v_head_dim: head size of the values, default `head_dim`.
        sort: give one new token the slots by position too, for scores that depend on it (mask or
            bias tensors); this copies the window once it has wrapped.
        device, dtype: of the storage.

    Raises:
        TypeError: a dtype that is not floating point.
        ValueError: if a shape does not fit, or tokens are cropped that have been overwritten.
        RuntimeError: if something with a gradient is appended.

    Reference:
        Jiang et al., Mistral 7B, 2023, arXiv:2310.06825.

    Example:
        >>> cache = RollingCache(1, 4, 1, 8)
        >>> for _ in range(9):
        ...     k, v = cache.append(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8))
        >>> k.shape, cache.length
        (torch.Size([1, 4, 1, 8]), 9)
    """

    def __init__(
        self,
        batch: int,
        window: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        sort: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"RollingCache: window must be positive, got window={window}")
        shape = (batch, num_kv_heads, window)
        sizes = (head_dim, v_head_dim)
        self._k, self._v = new_storage("RollingCache", shape, sizes, device, dtype)
        self._sort = sort
        self.length = 0

    @property
    def window(self) -> int:
        """Number of tokens kept."""
        return self._k.shape[2]

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes

    @property
    def ordered(self) -> bool:
        return self._sort

    def _slots(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self._k.device) % self.window

    def _latest(self, count: int) -> tuple[Tensor, Tensor]:
        """The last `count` tokens by position."""
        slots = self._slots(self.length - count, self.length)
        k, v = (t.index_select(2, slots).transpose(1, 2) for t in (self._k, self._v))
        return k, v

    def views(self) -> tuple[Tensor, Tensor]:
        """The kept tokens: slots in storage order, or by position with `sort`."""
        kept = min(self.length, self.window)
        if self._sort and self.length > self.window:
            return self._latest(kept)
        return self._k[:, :, :kept].transpose(1, 2), self._v[:, :, :kept].transpose(1, 2)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_new("RollingCache", k, v, self._k.shape[0], self._k, self._v)
        new = k.shape[1]
        attended = None
        if new > 1:
            past_k, past_v = self._latest(min(self.length, self.window - 1))
            attended = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
        kept = min(new, self.window)
        self.length += new
        slots = self._slots(self.length - kept, self.length)
        self._k[:, :, slots] = k[:, new - kept :].transpose(1, 2)
        self._v[:, :, slots] = v[:, new - kept :].transpose(1, 2)
        return self.views() if attended is None else attended

    def crop(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(
                f"RollingCache: length must be in 0..{self.length}, got length={length}"
            )
        if length < self.length and self.length > self.window:
            raise ValueError(
                f"RollingCache: tokens before position {length} must not be overwritten yet, "
                f"got length={self.length}, window={self.window}"
            )
        self.length = length

    def reorder(self, index: Tensor) -> None:
        self._k = self._k.index_select(0, index)
        self._v = self._v.index_select(0, index)

    def state_dict(self) -> dict[str, Any]:
        k, v = self._latest(min(self.length, self.window))
        return {"k": k, "v": v, "length": self.length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        k, v, length = take("RollingCache", state, "k", "v", "length")
        if k.shape[1] != min(length, self.window):
            raise ValueError(
                "RollingCache: k must hold the last min(length, window) tokens, "
                f"got k={tuple(k.shape)}, length={length}, window={self.window}"
            )
        self.length = length - k.shape[1]
        self.append(k, v)


class LatentCache(KVCache):
    """Keys of one head whose first `rank` numbers are the values, stored once.

    That is what multi-head latent attention needs of a token: [latent | rotary key], shared by all
    heads, 576 numbers in DeepSeek-V2 and V3.

    Args:
        batch, max_length: sizes of the storage.
        rank: size of the latent.
        rope_dim: size of the rotary key, 0 for none.
        device, dtype: of the storage.

    Reference:
        DeepSeek-AI, DeepSeek-V2, 2024, arXiv:2405.04434.

    Example:
        >>> cache = LatentCache(1, 16, 512, 64, dtype=torch.bfloat16)
        >>> rows = torch.ones(1, 3, 1, 576, dtype=torch.bfloat16)
        >>> k, v = cache.append(rows, rows[..., :512])
        >>> k.shape, v.shape, cache.nbytes
        (torch.Size([1, 3, 1, 576]), torch.Size([1, 3, 1, 512]), 18432)
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        rank: int,
        rope_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            batch, max_length, 1, rank + rope_dim, v_head_dim=0, device=device, dtype=dtype
        )
        self._rank = rank

    def views(self) -> tuple[Tensor, Tensor]:
        """Keys (B, T, 1, rank + rope_dim) and their first columns (B, T, 1, rank)."""
        k, _ = super().views()
        return k, k[..., : self._rank]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k (B, n, 1, rank + rope_dim); v is its first columns, and not stored again."""
        if v.shape != (*k.shape[:3], self._rank):
            raise ValueError(
                f"LatentCache: v must be the first {self._rank} columns of k, "
                f"got k={tuple(k.shape)}, v={tuple(v.shape)}"
            )
        return super().append(k, v[..., :0])


class CrossCache(Cache):
    """Keys and values of a source, projected once.

    Cropping the decoder's tokens leaves the source as it is.

    Example:
        >>> cache = CrossCache()
        >>> k, v = cache.append(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4))
        >>> cache.length, cache.nbytes
        (3, 192)
    """

    def __init__(self) -> None:
        self._kv: tuple[Tensor, Tensor] | None = None
        self.length = 0

    @property
    def filled(self) -> bool:
        """Whether it holds a source, which may have no tokens."""
        return self._kv is not None

    @property
    def nbytes(self) -> int:
        return 0 if self._kv is None else sum(t.nbytes for t in self._kv)

    def views(self) -> tuple[Tensor, Tensor]:
        if self._kv is None:
            raise ValueError("CrossCache: the source must have been appended, got none")
        k, v = (t.transpose(1, 2) for t in self._kv)
        return k, v

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the source, once."""
        if self._kv is not None:
            raise ValueError(f"CrossCache: must hold one source, got another of {tuple(k.shape)}")
        if k.requires_grad or v.requires_grad:
            raise RuntimeError("CrossCache: is for inference, wrap the call in torch.no_grad()")
        # One head's keys contiguous, as in KVCache.
        self._kv = (k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())
        self.length = k.shape[1]
        return self.views()

    def crop(self, length: int) -> None:
        """Nothing: the source does not depend on the tokens."""

    def reorder(self, index: Tensor) -> None:
        if self._kv is not None:
            k, v = (t.index_select(0, index) for t in self._kv)
            self._kv = (k, v)

    def state_dict(self) -> dict[str, Any]:
        k, v = self.views()
        return {"k": k.clone(), "v": v.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        k, v = take("CrossCache", state, "k", "v")
        self._kv = None
        self.append(k, v)


def require_cache(op: str, state: State | None) -> Cache | None:
    """`state`, which must be of keys and values."""
    if state is None or isinstance(state, Cache):
        return state
    raise TypeError(f"{op}: state must be a Cache, got {type(state).__name__}")


def storage_like(
    weight: Tensor, device: torch.device | str | None, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Device and dtype of a storage, by default those of the weight."""
    return {
        "device": weight.device if device is None else device,
        "dtype": weight.dtype if dtype is None else dtype,
    }


def new_storage(
    name: str,
    shape: tuple[int, int, int],
    sizes: tuple[int, int | None],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Zeros (*shape, D) for keys and (*shape, Dv) for values; `sizes` is D and Dv, None for D."""
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(
            f"{name}: dtype must be float64, float32, bfloat16 or float16, got dtype={dtype}"
        )
    k_dim, v_dim = sizes
    k = torch.zeros(*shape, k_dim, device=device, dtype=dtype)
    return k, k.new_zeros(*shape, k_dim if v_dim is None else v_dim)


def check_new(name: str, k: Tensor, v: Tensor, batch: int, keys: Tensor, values: Tensor) -> None:
    """Raises unless k, v (B, n, Hkv, D) can go into storages (*, Hkv, *, D)."""
    if k.requires_grad or v.requires_grad:
        raise RuntimeError(f"{name}: is for inference, wrap the call in torch.no_grad()")
    for which, new, stored in (("k", k, keys), ("v", v, values)):
        fits = (batch, k.shape[1], stored.shape[1], stored.shape[3])
        if new.shape != fits:
            raise ValueError(
                f"{name}: {which} must have shape {fits}, got {which}={tuple(new.shape)}"
            )
