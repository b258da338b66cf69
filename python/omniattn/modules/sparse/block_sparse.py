"""Attention to blocks of keys: the query's block and global tokens, or a block mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_int, shown
from omniattn.functional.masks import Blocks, GlobalTokens, Mask, block_local_global
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.state import State, takes_cache
from omniattn.modules.sparse.sparse_attention import SparseAttention, SparseConfig


class BlockSparseAttention(SparseAttention):
    """Attention to the query's block and to global tokens, or to the blocks of a mask.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj, o_proj.

    Note:
        torch.export: a `block_mask`, for a block_size that is a multiple of 64, fixes the number of
        blocks of T.

    Reference:
        Child et al., Generating Long Sequences with Sparse Transformers, 2019, arXiv 1904.10509.

    Example:
        >>> layer = BlockSparseAttention(dim=16, num_heads=4, block_size=4)
        >>> layer(torch.ones(1, 10, 16)).shape
        torch.Size([1, 10, 16])
        >>> last_two = torch.ones(3, 3).tril().triu(-1).bool()[None, None]
        >>> layer(torch.ones(1, 10, 16), block_mask=last_two).shape
        torch.Size([1, 10, 16])
    """

    @dataclass(frozen=True)
    class Config(SparseConfig):
        """Fields of `SparseConfig`, and the pattern.

        Args:
            block_size: number of tokens in a block; the last block can have fewer.
            global_index: tokens that attend to all and are attended to by all, without a block
                mask.
            causal: True if query i attends to keys up to its own position.
        """

        block_size: int = 64
        global_index: tuple[int, ...] = (0,)
        causal: bool = True

        def __post_init__(self) -> None:
            super().__post_init__()
            require_int("BlockSparseAttention", "block_size", self.block_size, 1)
            if self.global_index:
                GlobalTokens(self.global_index)

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

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
        block_mask: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x, state, rope, mask: see SparseAttention.
            block_mask: blocks that replace the config's pattern: bool (B | 1, num_heads | 1,
                blocks, blocks), True = attend, or compressed rows (row_ptr, col_idx), see
                `masks.Blocks`. `causal` still applies within blocks. Not with a state or a nested
                x.
        """
        op = "BlockSparseAttention"
        if block_mask is not None and (state is not None or x.is_nested):
            raise ValueError(f"{op}: block_mask must be None with a state or where x is nested")
        rows = isinstance(block_mask, (tuple, list)) and len(block_mask) == 2
        if not (block_mask is None or rows or isinstance(block_mask, Tensor)):
            raise TypeError(
                f"{op}: block_mask must be a bool tensor or (row_ptr, col_idx), "
                f"got block_mask={shown(block_mask)}"
            )
        return self._run(x, state, rope, mask, blocks=block_mask)

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c, blocks = self.config, given["blocks"]
        q, k, v = tensors
        size = (q.shape[1], k.shape[1])
        if blocks is None:
            mask = block_local_global(c.block_size, c.global_index)
        elif isinstance(blocks, Tensor):
            mask = Blocks.from_block_mask(blocks, block_size=c.block_size, size=size)
        else:
            row_ptr, col_idx = blocks
            mask = Blocks.from_csr(row_ptr, col_idx, size, block_size=c.block_size)
        return functional.attention(q, k, v, mask=mask, causal=c.causal, **self._score_options())
