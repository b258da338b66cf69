"""Cache of selective attention: keys, values and penalties."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import require_int, widen
from omniattn.modules.base.state import Storage, take
from omniattn.modules.caches.kv_cache import KVCache


class SelectiveCache(KVCache):
    """A KVCache with a penalty (B, T) per token, which reduces the scores of later queries.

    Only all tokens can be cropped, since later tokens have contributed to the penalties of earlier
    ones.

    Example:
        >>> cache = SelectiveCache(1, 16, 2, 4)
        >>> k, v = cache.append(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4))
        >>> cache.penalty
        tensor([[0., 0., 0.]])
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__(batch, max_length, num_kv_heads, head_dim, **storage)
        self._penalty = widen(self._k.new_zeros(batch, max_length))

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._penalty.nbytes

    @property
    def penalty(self) -> Tensor:
        """Penalty (B, length) of each token for the next query, 0 without later queries."""
        return self._penalty[:, : self.length]

    def penalise(self, penalty: Tensor) -> None:
        """Stores the penalties (B, T) of all tokens."""
        self.penalty.copy_(penalty)

    def crop(self, length: int) -> None:
        require_int("SelectiveCache", "length", length)
        if length not in (0, self.length):
            raise ValueError(
                "SelectiveCache: tokens that contributed to the penalties of others cannot be "
                f"cropped, continue from a copy.deepcopy; length must be 0 or {self.length}, "
                f"got length={length}"
            )
        super().crop(length)
        if length == 0:
            self._penalty.zero_()

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self._penalty = self._penalty.index_select(0, index)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"penalty": self.penalty.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        k, v, penalty = take("SelectiveCache", state, "k", "v", "penalty")
        if penalty.shape != (k.shape[0], k.shape[1]):
            raise ValueError(
                f"SelectiveCache: penalty must have shape {(k.shape[0], k.shape[1])}, "
                f"got penalty={tuple(penalty.shape)}"
            )
        super().load_state_dict({"k": k, "v": v})
        self.penalise(penalty)
