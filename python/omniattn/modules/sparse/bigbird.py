"""BigBird: near, global and random blocks."""

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
    """Attention to near, global and random blocks: `functional.bigbird_attention`.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

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
        """The fields of `SparseConfig`, and the pattern.

        Args:
            block: tokens of a block.
            n_random, seed, draw: of the random blocks; layers of a model have their own draw.
            causal: query i sees keys up to its own position, and random blocks are drawn from those
                before; then the last block that sees all is that of max_length.
            max_length: tokens of which blocks are counted, so that texts of any length have the
                same pattern; None for the tokens of x, without a state.
            count_duplicates: blocks that `rand_blocks` of a call repeats count as often, as in
                transformers.
            num_global_tokens: so many tokens in front are global (BigBird-ETC); without a state.
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
        """An empty cache; needs causal=True and num_global_tokens=0."""
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
        """x (B, T, dim) -> (B, T, dim).

        Args:
            x, state, rope, mask: see SparseAttention.
            key_padding: (B, T) of bool, True = real; without a state, and not of a nested x.
            rand_blocks: (num_heads, blocks - 2, r) of integers, used instead of the seed.
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
