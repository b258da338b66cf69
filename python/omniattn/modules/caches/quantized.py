"""Caches of keys and values in int8, with a factor for each token and head."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from omniattn import functional
from omniattn.functional.masks import Mask
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod
from omniattn.modules.base.state import take
from omniattn.modules.caches.cache import (
    Attend,
    Reading,
    check_new,
    head_sizes,
    require_storage_dtype,
    rows_of_heads,
)
from omniattn.modules.caches.kv_cache import KVCache


class QuantizedCache(KVCache):
    """Preallocated keys and values in int8, with a factor for each token and kv head.

    A row of D numbers takes D + 4 bytes. Rows are rounded when they are appended, and
    `functional.attention_int8` reads them as they are stored; views are copies in `dtype`. The page
    on states and caches has the errors that the rounding causes.

    Args:
        batch, max_length, num_kv_heads, head_dim: sizes of the storage.
        v_head_dim: head size of the values, default `head_dim`.
        device: device of the storage.
        dtype: dtype of the queries, and of the keys and values that are appended.

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: a shape does not match, or the storage is full.
        RuntimeError: an appended tensor requires a gradient.

    Reference:
        Zhao et al., Atom: Low-bit Quantization for Efficient and Accurate LLM Serving, 2023,
        arXiv 2310.19102.

    Example:
        >>> cache = QuantizedCache(1, 16, 2, 64)
        >>> k, v = cache.append(torch.ones(1, 3, 2, 64), torch.ones(1, 3, 2, 64))
        >>> k.dtype, k.shape, cache.nbytes == 16 * 2 * 2 * (64 + 4)
        (torch.float32, torch.Size([1, 3, 2, 64]), True)
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
        require_storage_dtype("QuantizedCache", dtype)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        shape = (batch, num_kv_heads, max_length)
        storage = new_int8_storage(shape, (head_dim, v_head_dim), device, self.dtype)
        self._sizes = head_sizes(*storage[:2])
        self._k, self._v, self._k_scale, self._v_scale = (t.transpose(1, 2) for t in storage)
        self.length = 0

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._k_scale.nbytes + self._v_scale.nbytes

    def _stored(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the stored keys, values and their factors, in the public layout."""
        n = self.length
        return self._k[:, :n], self._v[:, :n], self._k_scale[:, :n], self._v_scale[:, :n]

    def views(self) -> tuple[Tensor, Tensor]:
        """Returns copies of the keys and values in `dtype`."""
        return widened(self.dtype, *self._stored())

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._append(k, v)
        return self.views()

    def _append(self, k: Tensor, v: Tensor) -> None:
        check_new("QuantizedCache", k, v, self.batch, *self._sizes)
        self._write(self.length, *int8_rows(k, v))

    def _write(self, start: int, *rows: Tensor) -> None:
        """Writes keys, values and their factors from token `start` on, which become the last."""
        end = start + rows[0].shape[1]
        if end > self.max_length:
            raise ValueError(
                f"QuantizedCache: length must not exceed max_length={self.max_length}, "
                f"got length={end}"
            )
        stored = (self._k, self._v, self._k_scale, self._v_scale)
        for to, new in zip(stored, rows, strict=True):
            to[:, start:end] = new
        self.length = end

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
        """Reads the stored rows in place."""
        self._append(k, v)
        k, v, *scales = self._stored()
        lengths = torch.full((self.batch,), self.length, device=k.device)
        return Reading(k, v, mask, score_mod, reading_int8(lengths, *scales))

    def extend(self, *args: Any, **options: Any) -> Reading:
        """Raises: only layers that attend to the stored keys and values can read int8."""
        refuse_layer("QuantizedCache")

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self._k_scale, self._v_scale = (
            rows_of_heads(t, 0, index) for t in (self._k_scale, self._v_scale)
        )

    def state_dict(self) -> dict[str, Any]:
        names = ("k", "v", "k_scale", "v_scale")
        return {name: t.clone() for name, t in zip(names, self._stored(), strict=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        k, v, *scales = take("QuantizedCache", state, "k", "v", "k_scale", "v_scale")
        check_new("QuantizedCache", k, v, self.batch, *self._sizes)
        for name, t in zip(("k_scale", "v_scale"), scales, strict=True):
            if t.shape != k.shape[:3]:
                raise ValueError(
                    f"QuantizedCache: {name} must have shape {tuple(k.shape[:3])}, "
                    f"got {name}={tuple(t.shape)}"
                )
        for name, t in (("k", k), ("v", v)):
            if t.dtype != torch.int8:
                raise TypeError(f"QuantizedCache: {name} must be int8, got {name}={t.dtype}")
        self._write(0, k, v, *scales)


def refuse_layer(op: str) -> NoReturn:
    """Raises for a layer that changes the cached keys or values before it attends to them."""
    raise ValueError(
        f"{op}: keys and values in int8 are for Attention, which reads them as they are stored; "
        "other layers need a cache in their own dtype"
    )


def require_int8(op: str, kv_dtype: torch.dtype | None) -> None:
    """Requires `kv_dtype` to be a dtype in which caches store keys and values."""
    if kv_dtype not in (None, torch.int8):
        raise ValueError(f"{op}: kv_dtype must be torch.int8 or None, got kv_dtype={kv_dtype}")


def new_int8_storage(
    shape: tuple[int, int, int],
    sizes: tuple[int, int | None],
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates zeros (*shape, D) and (*shape, Dv) int8, and their factors (*shape), for keys and
    values of `dtype`; `sizes` is (D, Dv), where Dv is None if it equals D."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    k = torch.zeros(*shape, sizes[0], device=device, dtype=torch.int8)
    v = k.new_zeros(*shape, sizes[0] if sizes[1] is None else sizes[1])
    return k, v, k.new_zeros(shape, dtype=wide), k.new_zeros(shape, dtype=wide)


def int8_rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns keys and values in int8, and their factors."""
    (k, k_scale), (v, v_scale) = functional.quantize_int8(k), functional.quantize_int8(v)
    return k, v, k_scale, v_scale


def widened(
    dtype: torch.dtype, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the keys and values in `dtype`."""
    return (k * k_scale[..., None]).to(dtype), (v * v_scale[..., None]).to(dtype)


def reading_int8(
    lengths: Tensor, k_scale: Tensor, v_scale: Tensor, block_table: Tensor | None = None
) -> Attend:
    """Returns a function of q, k, v and the options of functional.attention for int8 k and v."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, **options: Any) -> Any:
        if dropout_p > 0:
            raise ValueError(
                "QuantizedCache: dropout_p must be 0, since int8 keys and values are for "
                f"inference, got dropout_p={dropout_p}"
            )
        return functional.attention_int8(
            q, k, v, k_scale, v_scale, lengths, block_table=block_table, **options
        )

    return attend
