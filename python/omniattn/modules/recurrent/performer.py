"""Performer: attention with random features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import require_choice
from omniattn.functional.recurrences.random_features import FEATURES, empty_state
from omniattn.modules.base.fields import Backend, Epsilon, Signed, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.recurrent.recurrent import Device, fp32, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer


class Performer(StateMixer):
    """FAVOR+: estimates softmax attention in O(T) by products of random features.

    ``o_t = sum_s (phi(q_t) . phi(k_s)) v_s / sum_s phi(q_t) . phi(k_s)`` over s <= t, or over all s
    if not causal, with phi of :func:`functional.random_features`; ``y = W_o o``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; the projection is created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj; random, untrained buffer projection (features,
        head_dim).

    Reference:
        Choromanski et al., Rethinking Attention with Performers, 2020, arXiv 2009.14794.

    Example:
        >>> Performer(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim, num_heads, head_dim: width of x and y; number of heads; width of a head, default
                dim // num_heads.
            features: number of random vectors, default head_dim * ln head_dim.
            kind: kind of the features, as in functional.random_features.
            orthogonal: True if the vectors are orthogonal in groups of head_dim.
            row_norm: norm of orthogonal vectors, as in functional.orthogonal_gaussian.
            causal: True if tokens attend only to themselves and earlier tokens.
            scale: factor of q . k; default head_dim^-0.5, and 1 for "exp_random".
            eps: lower bound of the denominator's magnitude for kinds with signs.
            feature_eps: constant added to each exponential; only if not causal.
            init_std, backend: as in Attention.
        """

        dim: Size
        num_heads: Size
        head_dim: Size | None = None
        features: Size | None = None
        kind: str = "positive"
        orthogonal: bool = True
        row_norm: str = "chi"
        causal: bool = True
        scale: Signed | None = None
        eps: Epsilon = 1e-6
        feature_eps: Epsilon = 0.0
        init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            require_choice("Performer", "kind", self.kind, FEATURES)
            require_choice("Performer", "row_norm", self.row_norm, ("chi", "sqrt_d"))
            if self.head_dim is None:
                self._require_multiple("dim", "num_heads")
            if self.causal and self.feature_eps > 0:
                raise ValueError(
                    "Performer: feature_eps must be 0 where causal=True, "
                    f"got feature_eps={self.feature_eps}"
                )

        @property
        def size(self) -> int:
            """Width of a head."""
            return self.head_dim or self.dim // self.num_heads

        @property
        def rows(self) -> int:
            """Number of random vectors."""
            return self.features or max(1, math.floor(self.size * math.log(self.size)))

    projection: Tensor

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        wide = c.num_heads * c.size

        def linear(n_in: int, n_out: int) -> Linear:
            config = Linear.Config(n_in, n_out, False, c.init_std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.q_proj, self.k_proj = linear(c.dim, wide), linear(c.dim, wide)
        self.v_proj, self.o_proj = linear(c.dim, wide), linear(wide, c.dim)
        empty = torch.empty(c.rows, c.size, device=device, dtype=fp32(dtype))
        self.register_buffer("projection", empty)
        self.redraw()

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Redraws the random vectors; existing states become invalid."""
        c, old = self.config, self.projection
        if old.is_meta:
            return
        if not c.orthogonal:
            old.normal_(generator=generator)
            return
        new = functional.orthogonal_gaussian(
            *old.shape, row_norm=c.row_norm, generator=generator, device=old.device
        )
        old.copy_(new)

    def reset_parameters(self) -> None:
        """Draws the random vectors."""
        self.redraw()

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates `s`, sums of features and values scaled by exp(-m), and the exponents `m`."""
        c = self.config
        if not c.causal:
            raise ValueError("Performer: a state must have causal=True, got causal=False")
        like = zeros_of_states(self.o_proj.weight, storage)
        return RecurrentState(**empty_state(like, batch, c.num_heads, c.rows, c.size, c.kind))

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        q, k, v = (
            projected(x).unflatten(-1, (c.num_heads, -1))
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        o, (s, m) = functional.random_feature_attention(
            q,
            k,
            v,
            self.projection,
            kind=c.kind,
            causal=c.causal,
            scale=c.scale,
            eps=c.eps,
            feature_eps=c.feature_eps,
            initial_state=None if state is None else (state["s"], state["m"]),
            cu_seqlens=sequences.cu_seqlens,
            backend=c.backend,
        )
        return self.o_proj(o.flatten(-2)), {"s": s, "m": m}
