"""Longformer: a sliding window and global tokens, for encoders and decoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.functional.masks import GlobalTokens, Mask
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.state import State, takes_cache
from omniattn.modules.sparse.sparse_attention import SparseAttention, SparseConfig


class LongformerAttention(SparseAttention):
    """Attention to a sliding window and global tokens: `functional.longformer_attention`.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj, o_proj; with `dual`
        q_global_proj, k_global_proj and v_global_proj, initialised as copies of the former.

    Reference:
        Beltagy et al., Longformer: The Long-Document Transformer, 2020, arXiv 2004.05150.

    Example:
        >>> layer = LongformerAttention(dim=16, num_heads=4, window=4)
        >>> layer(torch.ones(1, 9, 16)).shape
        torch.Size([1, 9, 16])
    """

    @dataclass(frozen=True)
    class Config(SparseConfig):
        """Fields of `SparseConfig`, and the pattern.

        Args:
            window: number of keys on both sides of the query together, even; causal attention has
                only the half before the query.
            global_index: global tokens of all sequences.
            dual: True if global tokens have separate projections.
            dilation: dilation of the window, one number or one per head.
            causal: True if query i attends to keys up to its own position.
        """

        window: Size = 512
        global_index: tuple[int, ...] = (0,)
        dual: bool = True
        dilation: int | tuple[int, ...] = 1
        causal: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.window % 2:
                raise ValueError(
                    f"LongformerAttention: window must be even, got window={self.window}"
                )
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
        if config.dual:
            self.draws(*(f"{name}_{end}" for name in "qkv" for end in ("proj", "global_proj")))
            self.reset_parameters()

    @property
    def _second(self) -> bool:
        return bool(self.config.dual)

    def reset_parameters(self) -> None:
        """Draws the projections as Linear does, and copies them to those of global tokens."""
        c = self.config
        if not c.dual:
            return
        for name in "qkv":
            local = cast(Linear, self.get_submodule(f"{name}_proj"))
            other = self.get_submodule(f"{name}_global_proj")
            nn.init.normal_(local.weight, std=c.init_std)
            if local.bias is not None:
                nn.init.zeros_(local.bias)
            with torch.no_grad():
                for target, source in zip(other.parameters(), local.parameters(), strict=True):
                    target.copy_(source)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
        global_index: Tensor | None = None,
        key_padding: Tensor | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x, state, rope, mask: see SparseAttention.
            global_index: (B, G) int, overrides the config's, -1 for none; not with a state.
            key_padding: (B, T) bool, True = real; not with a state or a nested x.
        """
        if state is not None and (global_index is not None or key_padding is not None):
            raise ValueError(
                "LongformerAttention: global_index and key_padding must be None with a state"
            )
        return self._run(x, state, rope, mask, index=global_index, key_padding=key_padding)

    def _of_sequence(self, row: slice, given: dict[str, Any]) -> dict[str, Any]:
        index = given["index"]
        return given if index is None else given | {"index": index[row]}

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c, length, index = self.config, tensors[1].shape[1], given["index"]
        common = {"causal": c.causal, **self._score_options()}
        if x.shape[1] < length:
            return self._step(*tensors, **common)
        if index is None and c.global_index:
            known = [i for i in c.global_index if i < length]
            index = torch.tensor(known, device=x.device).long().expand(x.shape[0], -1)
        return functional.longformer_attention(
            *tensors,
            window=c.window,
            global_index=index,
            key_padding=given["key_padding"],
            dilation=c.dilation,
            **common,
        )

    def _step(self, *tensors: Tensor, **common: Any) -> Tensor:
        """Computes the attention of new queries to the keys of a cache."""
        c = self.config
        if c.dilation != 1:
            raise NotImplementedError(
                f"LongformerAttention: a state needs dilation=1, got dilation={c.dilation}"
            )
        if not c.global_index:
            q, k, v = tensors[:3]
            common["window_size"] = (c.window // 2, 0)
            return functional.attention(q, k, v, **common)
        return functional.hub_spoke_attention(
            *tensors,
            window=c.window // 2,
            global_index=c.global_index,
            dual="longformer" if c.dual else None,
            **common,
        )
