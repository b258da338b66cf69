"""Cache of path attention: keys carried to the last token, values, gates, inputs of w."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import require_int
from omniattn.modules.base.state import Storage, take
from omniattn.modules.caches.forgetting import ForgettingCache


class PathCache(ForgettingCache):
    """A ForgettingCache whose keys every new token changes, with the last inputs of w's filter.

    Only all tokens can be cropped, since later tokens have changed the keys of earlier ones.

    Args:
        batch, max_length, num_kv_heads, head_dim, num_heads, device, dtype: see ForgettingCache.
        taps: number of earlier inputs that the filter of w reads.

    Reference:
        Yang et al., PaTH Attention, 2025, arXiv 2505.16381.

    Example:
        >>> cache = PathCache(1, 16, 2, 4, num_heads=4, taps=2)
        >>> k, v = cache.append(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4))
        >>> cache.carry(0 * k)
        >>> cache.views()[0].sum()
        tensor(0.)
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_heads: int,
        taps: int = 0,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__(batch, max_length, num_kv_heads, head_dim, num_heads=num_heads, **storage)
        #: Inputs (B, Hkv D, taps) of the filter of w before the next token.
        self.inputs = self._k.new_zeros(batch, num_kv_heads * head_dim, taps)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.inputs.nbytes

    def carry(self, k: Tensor) -> None:
        """Replaces the keys (B, T, Hkv, D) of all tokens."""
        self.views()[0].copy_(k)

    def crop(self, length: int) -> None:
        require_int("PathCache", "length", length)
        if length not in (0, self.length):
            raise ValueError(
                "PathCache: tokens that changed the keys of others cannot be cropped, continue "
                f"from a copy.deepcopy; length must be 0 or {self.length}, got length={length}"
            )
        super().crop(length)
        if length == 0:
            self.inputs.zero_()

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self.inputs = self.inputs.index_select(0, index)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"inputs": self.inputs.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        *rest, inputs = take("PathCache", state, "k", "v", "log_f", "inputs")
        if inputs.shape != self.inputs.shape:
            raise ValueError(
                f"PathCache: inputs must have shape {tuple(self.inputs.shape)}, "
                f"got inputs={tuple(inputs.shape)}"
            )
        super().load_state_dict(dict(zip(("k", "v", "log_f"), rest, strict=True)))
        self.inputs.copy_(inputs)
