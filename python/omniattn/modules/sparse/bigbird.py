"""BigBird: sliding-window, global and random blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import require_int
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches.cache import Cache
from omniattn.modules.sparse.sparse_attention import SparseAttention, SparseConfig


class BigBirdAttention(SparseAttention):
    """Attention to sliding-window, global and random blocks: `functional.bigbird_attention`.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj, o_proj.

    Reference:
        Zaheer et al., Big Bird: Transformers for Longer Sequences, 2020, arXiv 2007.14062.

    Example:
        >>> layer = BigBirdAttention(dim=16, num_heads=4, block=4, n_random=1)
        >>> layer(torch.ones(1, 40, 16)).shape
        torch.Size([1, 40, 16])
    """

    @dataclass(frozen=True)
    class Config(SparseConfig):
        """Fields of `SparseConfig`, and the pattern.

        Args:
            block: number of tokens in a block.
            n_random, seed, draw: number of random blocks per query block, seed, and index of the
                draw, which differs among the layers of a model.
            causal: True if query i attends to keys up to its own position. Random blocks are then
                drawn from earlier ones, and the last global block is that of max_length.
            max_length: number of tokens that determines the pattern, so that it does not depend on
                the text's length; None for the number of tokens of x, without a state.
            count_duplicates: True to count repeated entries of `rand_blocks` repeatedly, as in
                transformers.
            num_global_tokens: number of global tokens at the start (BigBird-ETC); without a state.
        """

        block: int = 64
        n_random: int = 3
        seed: int = 0
        draw: int = 0
        causal: bool = False
        max_length: Size | None = None
        count_duplicates: bool = False
        num_global_tokens: int = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            require_int("BigBirdAttention", "block", self.block, 1)
            if self.causal and self.max_length is None:
                raise ValueError("BigBirdAttention: causal=True needs max_length, got None")

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._build(device, dtype)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache; requires causal=True and num_global_tokens=0."""
        if self.config.num_global_tokens:
            raise ValueError(
                "BigBirdAttention: a state must have num_global_tokens=0, "
                f"got num_global_tokens={self.config.num_global_tokens}"
            )
        return super().new_state(batch, max_length, **storage)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
        key_padding: Tensor | None = None,
        rand_blocks: Tensor | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x, state, rope, mask: see SparseAttention.
            key_padding: (B, T) bool, True = real; not with a state or a nested x.
            rand_blocks: (num_heads, blocks - 2, r) int, random blocks instead of a draw by seed.
        """
        if state is not None and key_padding is not None:
            raise ValueError("BigBirdAttention: key_padding must be None with a state")
        return self._run(x, state, rope, mask, key_padding=key_padding, rand_blocks=rand_blocks)

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c = self.config
        q, k, v = tensors
        return functional.bigbird_attention(
            q,
            k,
            v,
            block=c.block,
            n_random=c.n_random,
            seed=c.seed,
            draw=c.draw,
            count_duplicates=c.count_duplicates,
            num_global_tokens=c.num_global_tokens,
            length=c.max_length,
            causal=c.causal,
            key_padding=given["key_padding"],
            rand_blocks=given["rand_blocks"],
            **self._score_options(),
        )
