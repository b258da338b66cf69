"""Keys and values of the tokens seen so far, for one attention layer."""

import torch


class KVCache:
    """Preallocated keys and values with one length for the whole batch. Inference only.

    The storage is (B, Hkv, max_length, D), so that one head's keys are contiguous; the views have
    the public layout (B, T, Hkv, D).

    Args:
        batch, max_length, num_kv_heads, head_dim: sizes of the storage.
        v_head_dim: head size of the values, default `head_dim`.
        device, dtype: of the storage.

    Raises:
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
        self._k = torch.zeros(*shape, head_dim, device=device, dtype=dtype)
        self._v = torch.zeros(*shape, v_head_dim or head_dim, device=device, dtype=dtype)
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
        """Bytes of the storage, used or not."""
        return self._k.nbytes + self._v.nbytes

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, length, Hkv, D) and values (B, length, Hkv, Dv), sharing the storage."""
        return (
            self._k[:, :, : self.length].transpose(1, 2),
            self._v[:, :, : self.length].transpose(1, 2),
        )

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k (B, n, Hkv, D) and v (B, n, Hkv, Dv), returns the views of everything stored."""
        if k.requires_grad or v.requires_grad:
            raise RuntimeError("KVCache: is for inference, wrap the call in torch.no_grad()")
        for name, new, stored in (("k", k, self._k), ("v", v, self._v)):
            fits = (stored.shape[0], k.shape[1], stored.shape[1], stored.shape[3])
            if new.shape != fits:
                raise ValueError(
                    f"KVCache: {name} must have shape {fits}, got {name}={tuple(new.shape)}"
                )
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
        """Forgets all tokens from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"KVCache: length must be in 0..{self.length}, got length={length}")
        self.length = length

    def reorder(self, index: torch.Tensor) -> None:
        """Makes row b what row index[b] was, e.g. after a step of beam search; index (B',) int."""
        self._k = self._k.index_select(0, index)
        self._v = self._v.index_select(0, index)
