"""Multi-token attention's layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.norm import RMSNorm
from omniattn.modules.base.state import State, Storage
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache
from omniattn.modules.sparse.sparse_attention import QKV, SparseAttention


class MultiTokenAttention(SparseAttention):
    """Causal attention whose weights depend on neighbouring queries, keys and heads.

    ``y = W_o f norm(multi_token_attention(q, k, v, kernel, head_kernel))``, see
    `functional.multi_token_attention`; the norm is that of each head. The state keeps the queries
    too, of which a step reads the last query_size - 1.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, kernel (num_heads, query_size, key_size),
        head_kernel (num_heads / head_group, head_group, head_group) with head_group > 1, and with
        head_norm norm.

    Reference:
        Golovneva et al., Multi-Token Attention, 2025, arXiv 2504.00927.

    Example:
        >>> MultiTokenAttention(dim=16, num_heads=4)(torch.ones(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    #: The kernels, which start as the identity, have no weight decay.
    undecayed = ("kernel", "head_kernel")

    @dataclass(frozen=True)
    class Config(HeadsConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: number of query heads.
            num_kv_heads: number of key and value heads, a divisor of num_heads; default num_heads.
            head_dim: width of a head, default dim / num_heads.
            query_size, key_size: numbers of queries and of keys that a weight depends on; key_size
                is odd.
            head_group: number of neighbouring heads whose weights are mixed, a divisor of
                num_heads.
            head_norm: True for an RMS norm of each head's output.
            depth: index of the layer, for the factor f = 0.2 + 0.6 exp(-0.3 depth) of that norm;
                None for 1.
            norm_eps: eps of this norm.
            rope_interleaved, init_std, out_init_std, backend: as in Attention.
        """

        bias: ClassVar[bool] = False
        out_bias: ClassVar[bool] = False

        query_size: Size = 6
        key_size: Size = 11
        head_group: Size = 2
        head_norm: bool = True
        depth: int | None = None
        norm_eps: Epsilon = 1e-5
        rope_interleaved: bool = False
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            op = "MultiTokenAttention"
            if self.key_size % 2 == 0:
                raise ValueError(f"{op}: key_size must be odd, got key_size={self.key_size}")
            if self.num_heads % self.head_group:
                raise ValueError(
                    f"{op}: head_group must divide num_heads, "
                    f"got head_group={self.head_group}, num_heads={self.num_heads}"
                )

        @property
        def factor(self) -> float:
            """Factor of the normalised outputs."""
            return 1.0 if self.depth is None else 0.2 + 0.6 * math.exp(-0.3 * self.depth)

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
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.kernel = nn.Parameter(torch.empty(c.num_heads, c.query_size, c.key_size, **factory))
        if c.head_group > 1:
            shape = (c.num_heads // c.head_group, c.head_group, c.head_group)
            self.head_kernel = nn.Parameter(torch.empty(shape, **factory))
        if c.head_norm:
            self.norm = RMSNorm.Config(c.head_size, c.norm_eps, backend=c.backend).build(**factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the kernels to the identity."""
        nn.init.zeros_(self.kernel)
        with torch.no_grad():
            self.kernel[:, -1, self.config.key_size // 2] = 1
            if self.config.head_group > 1:
                self.head_kernel.copy_(torch.eye(self.config.head_group))

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a QueryCache."""
        c = self.config
        sizes = (batch, max_length, c.kv_heads, c.head_size)
        return new.with_queries(self, self._key_weight, *sizes, num_heads=c.num_heads, **storage)

    def _cache_of(self, state: State | None) -> Any:
        return new.require_queries("MultiTokenAttention", state)

    def _with_past(self, cache: Any, x: Tensor, *sets: QKV) -> tuple[Tensor, ...]:
        ((q, k, v),) = sets
        if cache is None:
            return q, k, v
        k, v = cache.append(k, v)
        return cache.keep(q, self.config.query_size - 1), k, v

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c, (q, k, v) = self.config, tensors
        out = functional.multi_token_attention(
            *(q, k, v, self.kernel, self.head_kernel if c.head_group > 1 else None),
            lead=q.shape[1] - x.shape[1],
            backend=c.backend,
        )
        return self.norm(out) * c.factor if c.head_norm else out
