"""Decaying weighted means of values with exponents r . k: two layers that RWKV is explained by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Backend
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.jagged import Sequences, sequences_of
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.state import RecurrentState, State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache, require_cache
from omniattn.modules.recurrent.recurrent import Device, fp32, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer

__all__ = ["RWKVQuadratic", "RWKVRecurrent"]


@dataclass(frozen=True)
class RWKVMeanConfig(HeadsConfig):
    """Sizes and options.

    Args:
        dim: width of x and y.
        num_heads: number of heads of r and v.
        num_kv_heads: must be None: each head has its own keys.
        head_dim: width of a head, default dim / num_heads.
        per_channel: True for a decay per channel of the values, False for one per head.
        init_std, out_init_std, backend: as in Attention.
    """

    per_channel: bool = False
    init_std: float = 0.02
    out_init_std: float = 0.02
    backend: Backend = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads is not None:
            raise ValueError(
                f"{self.layer.__name__}: num_kv_heads must be None, "
                f"got num_kv_heads={self.num_kv_heads}"
            )


class _RWKVMean(nn.Module):
    """Base class with projections to r, k and v and from y, and decays above 0."""

    config: RWKVMeanConfig

    def _build(self, device: Device, dtype: torch.dtype | None) -> None:
        c = self.config
        inner = c.num_heads * c.head_size

        def linear(n_in: int, n_out: int, std: float) -> Linear:
            own = Linear.Config(n_in, n_out, False, std, c.backend)
            return Linear(own, device=device, dtype=dtype)

        self.r_proj = linear(c.dim, inner, c.init_std)
        self.k_proj = linear(c.dim, inner, c.init_std)
        self.v_proj = linear(c.dim, inner, c.init_std)
        self.o_proj = linear(inner, c.dim, c.out_init_std)
        shape = (c.num_heads, c.head_size) if c.per_channel else (c.num_heads,)
        self.decay = nn.Parameter(torch.empty(shape, device=device, dtype=fp32(dtype)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises w as ALiBi's slopes."""
        slopes = functional.alibi_slopes(self.config.num_heads, device=self.decay.device)
        slopes = slopes.view(-1, *(1,) * (self.decay.dim() - 1))
        self.decay.copy_(slopes.expm1().log())

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes r, k and v (B, T, H, head_dim)."""
        layers = (self.r_proj, self.k_proj, self.v_proj)
        r, k, v = (layer(x).unflatten(-1, (self.config.num_heads, -1)) for layer in layers)
        return r, k, v


class RWKVQuadratic(_RWKVMean, Mixer):
    """Softmax attention with the scores r_i . k_j - (i - j) w: ALiBi with learned slopes.

    ``y = W_o rwkv_quadratic(W_r x, W_k x, W_v x, softplus(decay))``, see
    :func:`functional.rwkv_quadratic`. Decoding needs all earlier keys: the present r weighs them.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; decay is created in fp32.

    Shape:
        x (B, T, dim) or a jagged nested tensor -> the same shape.
        Parameters r_proj, k_proj, v_proj, o_proj, decay (num_heads,), or (num_heads, head_dim) with
        per_channel.

    Reference:
        ALiBi: Press et al., Train Short, Test Long, 2021, arXiv 2108.12409.

    Example:
        >>> RWKVQuadratic(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(RWKVMeanConfig):
        """Sizes and options, as in RWKVMeanConfig."""

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self._build(device, dtype)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache of keys and values."""
        c = self.config
        sizes = (batch, max_length, c.num_heads, c.head_size)
        return new.keys_and_values(self, self.k_proj.weight, *sizes, **storage)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x: the tokens after those in `state`.
            state: a Cache, to which the new keys and values are appended.
            rope: ignored, as the decays order the tokens.
            mask: boolean, True = attend, broadcastable to (B, num_heads, T, S), or a value of
                `functional.masks`; with per_channel the same for all heads.
        """
        c = self.config
        cache = require_cache("RWKVQuadratic", state)
        x, sequences = sequences_of("RWKVQuadratic", "x", x, state=cache)
        require_tokens("RWKVQuadratic", x, c.dim)
        attend: Any = sequences.attention()
        seen: Any = mask
        r, k, v = self._projected(x)
        if cache is not None:
            k, v, seen, _, attend = cache.extend(k, v, attend, mask, None, positional=True)
        if c.per_channel:  # each channel of v is a head
            v = v.flatten(2).unsqueeze(3)
            r, k = (t.repeat_interleave(c.head_size, 2) for t in (r, k))
        slopes = nnf.softplus(self.decay).flatten()
        options: dict[str, Any] = {"causal": True, "scale": 1.0, "mask": seen}
        y = attend(r, k, v, alibi_slopes=slopes, backend=c.backend, **options)
        return sequences.restored(self.o_proj(y.flatten(2)))


class RWKVRecurrent(_RWKVMean, StateMixer):
    """Decaying mean of values whose weights exp(r_j . k_j) are fixed when their token arrives.

    ``y = W_o rwkv_recurrent(W_r x, W_k x, W_v x, softplus(decay))``, see
    :func:`functional.rwkv_recurrent`. It differs from RWKVQuadratic, but its state does not grow.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; decay is created in fp32.

    Shape:
        x (B, T, dim) -> the same shape. Parameters as in RWKVQuadratic.

    Reference:
        Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023, arXiv 2305.13048.

    Example:
        >>> RWKVRecurrent(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(RWKVMeanConfig):
        """Sizes and options, as in RWKVMeanConfig."""

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self._build(device, dtype)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates `s` (B, 3, num_heads, head_dim): sums, weights and their maximum, in fp32."""
        c = self.config
        zeros = zeros_of_states(self.k_proj.weight, storage)
        state = zeros.new_zeros(batch, 3, c.num_heads, c.head_size)
        state[:, 2] = -1e38
        return RecurrentState(s=state)

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        y, after = functional.rwkv_recurrent(
            *self._projected(x),
            nnf.softplus(self.decay),
            initial_state=None if state is None else state["s"],
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        return self.o_proj(y.flatten(-2)), {"s": after}
