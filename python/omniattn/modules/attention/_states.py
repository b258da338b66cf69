"""States of Attention: the caches that its options need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import shown
from omniattn.modules.attention._shared import TensorProduct
from omniattn.modules.base.mixer import Mixer
from omniattn.modules.base.state import Storage
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache
from omniattn.modules.caches.eviction import Eviction, policies_of_groups


class CachingMixer(Mixer):
    """A mixer with the options of Attention, whose state is a cache."""

    config: Any
    k_factors: TensorProduct
    v_factors: TensorProduct

    @property
    def _key_weight(self) -> Tensor:
        """Weight whose device and dtype the keys have."""
        raise NotImplementedError

    def new_state(
        self,
        batch: int,
        max_length: int,
        *,
        rolling: bool = False,
        eviction: Eviction | Sequence[Eviction] | None = None,
        kv_dtype: torch.dtype | None = None,
        **storage: Unpack[Storage],
    ) -> Cache:
        """Creates a cache.

        Args:
            batch, max_length: number of sequences and largest number of tokens.
            device, dtype: device and dtype of the storage; default: those of the parameters.
            rolling: True to keep only the tokens of the window; requires causal and a left window.
            eviction: policy that selects the kept tokens, or one policy per query head; only for
                causal softmax self-attention without a window.
            kv_dtype: torch.int8 to store keys and values in int8, with a factor for each token and
                head; for self-attention whose cache keeps all keys and values, and no more.
        """
        c, like = self.config, (self, self._key_weight)
        plain = not (c.cross or c.ranks or c.shared_kv or c.forget_gate)
        if kv_dtype is not None and (not plain or rolling or eviction is not None):
            raise ValueError(
                "Attention: kv_dtype needs a cache of all tokens of self-attention, "
                f"got kv_dtype={kv_dtype}, cross={c.cross}, rolling={rolling}, "
                f"eviction={shown(eviction)}{_more(c)}"
            )
        if eviction is not None:
            policies = self._policies(eviction, rolling)
            return new.by_policy(
                *like, policies, batch, max_length, c.kv_heads, c.head_size, **storage
            )
        if c.cross:
            return new.of_source(*like, **storage)
        if c.ranks is not None:
            if rolling:
                raise ValueError("Attention: ranks must be None for a rolling cache")
            widths = (factors.width(c.head_size) for factors in (self.k_factors, self.v_factors))
            return new.with_factors(*like, batch, max_length, *widths, **storage)
        if c.shared_kv == "reader":  # counts the tokens
            return new.keys_and_values(*like, batch, max_length, 0, c.head_size, **storage)
        if c.forget_gate:
            if rolling:
                raise ValueError("Attention: forget_gate must be False for a rolling cache")
            sizes = batch, max_length, c.kv_heads, c.head_size
            return new.with_gates(*like, *sizes, num_heads=c.num_heads, **storage)
        if not rolling:
            sizes = batch, max_length, c.kv_heads, c.head_size
            return new.keys_and_values(*like, *sizes, kv_dtype=kv_dtype, **storage)
        if not c.causal or c.window_size[0] < 0:
            raise ValueError(
                "Attention: a rolling cache must have causal=True and a left window, "
                f"got causal={c.causal}, window_size={c.window_size}"
            )
        length = min(max_length, c.window_size[0] + 1)
        sizes, sort = (batch, length, c.kv_heads, c.head_size), c.normalizer == "stick_breaking"
        return new.of_window(*like, *sizes, sort=sort, **storage)

    def _policies(
        self, eviction: Eviction | Sequence[Eviction], rolling: bool
    ) -> Eviction | tuple[Eviction, ...]:
        """Returns one policy, or one per kv head."""
        c = self.config
        whole = c.causal and c.window_size == (-1, -1) and c.normalizer == "softmax"
        whole = whole and c.chunk_size is None and not c.forget_gate
        whole = whole and c.ranks is None and c.shared_kv is None
        if rolling or not whole:
            raise ValueError(
                "Attention: eviction needs causal self-attention by softmax without a window, "
                f"got causal={c.causal}, window_size={c.window_size}, chunk_size={c.chunk_size}, "
                f"normalizer={shown(c.normalizer)}, rolling={rolling}"
                f"{_more(c)}"
            )
        return policies_of_groups("Attention", eviction, c.num_heads, c.kv_heads)


def _more(c: Any) -> str:
    """Returns the options that exclude eviction and int8 and are not named in every error."""
    given = {"forget_gate": c.forget_gate, "ranks": c.ranks, "shared_kv": c.shared_kv}
    return "".join(f", {name}={shown(value)}" for name, value in given.items() if value)
