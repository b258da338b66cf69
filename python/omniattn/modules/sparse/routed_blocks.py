"""Attention to blocks of keys selected by a learned router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import require_choice, widen
from omniattn.checks.tracing import may_train
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.state import State, Storage
from omniattn.modules.caches.cache import Cache
from omniattn.modules.experts.auxiliary import AuxiliaryLoss
from omniattn.modules.sparse.sparse_attention import SparseAttention, SparseConfig


class RoutedBlockAttention(SparseAttention, AuxiliaryLoss):
    """Causal attention to the query's block and to blocks selected by a learned router.

    The scores of blocks are ``(mean q) W_a . (mean k) W_b / sqrt(router_dim)`` per query head, see
    :func:`omniattn.functional.routed_block_attention`.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj, o_proj, router_q_proj (W_a)
        and router_k_proj (W_b), both (router_dim, head_dim).

    Note:
        torch.export: a dynamic T must be a multiple of block_size, at least 2 block_size; if the
        example's T is not a multiple, T must never be one.

    Reference:
        Gao et al., SeerAttention, 2024, arXiv 2410.13276; Lu et al., MoBA, 2025, arXiv 2502.13189.

    Example:
        >>> layer = RoutedBlockAttention(dim=16, num_heads=4, block_size=4, topk=2)
        >>> layer(torch.ones(1, 10, 16)).shape
        torch.Size([1, 10, 16])
    """

    auxiliary_name = "router"

    @dataclass(frozen=True)
    class Config(SparseConfig):
        """Fields of `SparseConfig`, and the router.

        Args:
            block_size: number of keys in a block.
            topk: number of blocks per query, including its own.
            query_block: number of queries that share a selection by their mean, a divisor of
                block_size; more than 1 leaks later queries into earlier selections.
            router_dim: size of the projected means.
            router_grad: "gate", "distill" or "none", see the function. With "distill", training
                also computes full attention, and q and k get no gradient from the router.
            router_weight: weight of the "distill" loss, a mean over selections, in training.
            decode: attention of tokens after those in a state: "routed" or "full".
        """

        block_size: Size = 64
        topk: Size = 8
        query_block: Size = 1
        router_dim: Size = 64
        router_grad: str = "gate"
        router_weight: float = 1.0
        decode: str = "routed"

        def __post_init__(self) -> None:
            super().__post_init__()
            op = "RoutedBlockAttention"
            self._require_multiple("block_size", "query_block")
            require_choice(op, "router_grad", self.router_grad, ("none", "gate", "distill"))
            require_choice(op, "decode", self.decode, ("routed", "full"))
            if self.decode == "full" and self.router_grad == "gate":
                raise ValueError(
                    f"{op}: decode must be 'routed' with router_grad='gate', since full attention "
                    "has no gates, got decode='full'"
                )

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
        self.config = c = config
        self._build(device, dtype)
        own = Linear.Config(c.head_size, c.router_dim, False, c.head_size**-0.5, c.backend)
        self.router_q_proj = Linear(own, device=device, dtype=dtype)
        self.router_k_proj = Linear(own, device=device, dtype=dtype)

    @property
    def auxiliary_weight(self) -> float:
        return float(self.config.router_weight)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache; decode="routed" requires query_block=1."""
        c = self.config
        if c.decode == "routed" and c.query_block > 1:
            raise ValueError(
                "RoutedBlockAttention: a state needs query_block=1 or decode='full', "
                f"got query_block={c.query_block}, decode='routed'"
            )
        return super().new_state(batch, max_length, **storage)

    def _run(
        self,
        x: Tensor,
        state: State | None,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | Mask | None,
        **given: Any,
    ) -> Tensor:
        losses: list[Tensor] = []
        y = super()._run(x, state, rope, mask, losses=losses, **given)
        self._keep(torch.cat([loss.flatten() for loss in losses]).mean() if losses else None)
        return y

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c = self.config
        q, k, v = tensors
        options = self._score_options()
        if c.decode == "full" and q.shape[1] < k.shape[1]:
            return functional.attention(q, k, v, causal=True, **options)
        grad = c.router_grad
        distils = grad == "distill" and self.training and may_train()
        if grad == "distill" and not distils:
            grad = "none"
        means = _means(q, c.query_block), _means(k, c.block_size)
        if distils:
            means = means[0].detach(), means[1].detach()
        out = functional.routed_block_attention(
            *(q, k, v, self.router_q_proj(means[0]), self.router_k_proj(means[1])),
            block_size=c.block_size,
            topk=c.topk,
            query_block=c.query_block,
            router_grad=cast(Literal["none", "gate", "distill"], grad),
            **options,
        )
        if isinstance(out, tuple):
            given["losses"].append(out[1])
            return out[0]
        return out


def _means(x: Tensor, size: int) -> Tensor:
    """Computes the means (B, ceil(T / size), H, D) of blocks of `size` tokens, the last partial."""
    if size == 1:
        return x
    wide, whole = widen(x), x.shape[1] // size * size
    parts = [wide[:, :whole].unflatten(1, (-1, size)).mean(2)] if whole else []
    if whole < x.shape[1]:
        parts.append(wide[:, whole:].mean(1, keepdim=True))
    return torch.cat(parts, 1).to(x.dtype) if parts else x
