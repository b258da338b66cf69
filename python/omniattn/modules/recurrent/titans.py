"""Base of layers with a memory that descends a loss, and layers of Titans' memories."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import unit
from omniattn.modules.base.fields import Positive, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.recurrent.recurrent import (
    Device,
    RecurrentConfig,
    RecurrentMixer,
    Result,
    linear,
)


@dataclass(frozen=True)
class MemoryConfig(RecurrentConfig):
    """Sizes and options, as in RecurrentConfig, whose num_v_heads is not supported.

    Args:
        mini_batch_size: number C of tokens whose gradients are taken at the same memory; 1 for the
            paper's recurrence without chunks.
        max_step: bound of C theta / (1 - eta), in (0, 1].
    """

    mini_batch_size: Size = 16
    max_step: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        op = self.layer.__name__
        if self.v_heads != self.num_heads:
            raise ValueError(
                f"{op}: num_v_heads must be num_heads or None, "
                f"got num_v_heads={self.num_v_heads}, num_heads={self.num_heads}"
            )
        if self.max_step > 1:
            raise ValueError(f"{op}: max_step must be in (0, 1], got max_step={self.max_step}")

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        shape = (self.num_heads, *self.state_size)
        return {"m": shape, "s": shape, "n": shape, **self.past, "position": ()}

    @property
    def past(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what the state holds of the last tokens."""
        return {}


class MemoryMixer(RecurrentMixer):
    """Base of layers whose memory M is learned, and descends a loss of the tokens that it reads.

    A subclass has a `Config` derived from MemoryConfig and defines `remember`. q and k have length
    1, and the gates of tokens are ``alpha = sigmoid(x W_alpha + b_alpha)``, ``eta = sigmoid(x W_eta
    + b_eta)`` and theta by `step_sizes`.
    """

    config: MemoryConfig

    #: Names of the parameters that optimizers do not decay.
    undecayed: tuple[str, ...] = ("M",)

    def __init__(
        self, config: MemoryConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for name in ("theta_proj", "alpha_proj", "eta_proj"):
            self.add_module(name, linear(c, c.dim, c.num_heads, True, **factory))
        self.M = nn.Parameter(torch.empty(c.num_heads, *c.state_size, **factory))

    def reset_parameters(self) -> None:
        """Draws M and sets alpha to about 0.02."""
        nn.init.normal_(self.M, std=self.config.init_std)
        nn.init.constant_(self.get_parameter("alpha_proj.bias"), -4.0)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates M for each sequence, and zeros, in fp32 (fp64 for fp64).

        `position` (B) is the number of tokens, and `q_conv`, `k_conv` and `v_conv` are the states
        of the convolutions. The others, such as `m` (B, H, K, V), are those of the layer's
        function.
        """
        state = super().new_state(batch, max_length, **storage)
        state["m"].copy_(self.M.detach())
        return state

    def step_sizes(self, theta: Tensor, eta: Tensor) -> Tensor:
        """Computes ``max_step sigmoid(theta) (1 - sigmoid(eta)) / C``.

        These steps keep the memory bounded even if all keys of a mini-batch are equal.
        """
        c = self.config
        return theta.sigmoid() * (-eta).sigmoid() * (c.max_step / c.mini_batch_size)

    @abstractmethod
    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *gates: Tensor, **options: Any
    ) -> Result:
        """Maps q, k (B, T, H, K), v (B, T, H, V), x (B, T, dim) to o like v and the final state.

        The gates are theta, alpha and eta (B, T, H). The options are the function's
        mini_batch_size, position, initial_state, cu_seqlens and backend. The state has the config's
        `states` but the position.
        """

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c, packed = self.config, options["cu_seqlens"]
        wide = torch.promote_types(x.dtype, torch.float32)
        theta, alpha, eta = (
            self.get_submodule(f"{name}_proj")(x).to(wide) for name in ("theta", "alpha", "eta")
        )
        before = options.pop("initial_state")
        if before is None:
            count = x.shape[0] if packed is None else packed.shape[0] - 1
            first = self.M.to(wide).expand(count, *self.M.shape)
            shapes = tuple(c.states.values())[1:]
            before = (first, *(first.new_zeros(count, *shape) for shape in shapes))
        *tensors, position = before
        o, after = self.remember(
            *(unit(q), unit(k), v, x),
            *(self.step_sizes(theta, eta), alpha.sigmoid(), eta.sigmoid()),
            mini_batch_size=c.mini_batch_size,
            position=position.long(),
            initial_state=tuple(tensors),
            **options,
        )
        tokens = x.shape[1] if packed is None else packed.diff()
        return o, (*after, position + tokens)


class TitansLinear(MemoryMixer):
    """Layer with Titans' long-term memory: a matrix that descends a loss of the tokens it reads.

    o of `functional.titans_linear`, with q and k of length 1, momentum ``eta = sigmoid(x W_eta +
    b_eta)``, forgetting ``alpha = sigmoid(x W_alpha + b_alpha)`` and step sizes ``theta =
    max_step (1 - eta) sigmoid(x W_theta + b_theta) / C``. These steps keep the memory bounded even
    if all keys of a mini-batch are equal. ``y = W_o norm(o)``, with a gate as in RecurrentConfig.
    The first memory M is learned.

    The paper's persistent memory consists of learned tokens before x, which a model can add to any
    layer; this one has none.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, q_conv1d, k_conv1d, v_conv1d, theta_proj,
        alpha_proj and eta_proj with biases, M (H, K, V) and o_norm; with a gate g_proj, with
        residual_norm memory_norm_weight and memory_norm_bias (H, V).

    Reference:
        Behrouz et al., Titans: Learning to Memorize at Test Time, 2025, arXiv 2501.00663.

    Example:
        >>> TitansLinear(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(MemoryConfig):
        """Sizes and options, as in MemoryConfig.

        Args:
            residual_norm: True for a memory that predicts ``k + LN(k M)``; the widths of keys and
                values are then equal.
        """

        residual_norm: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.residual_norm and self.k_size != self.v_size:
                raise ValueError(
                    "TitansLinear: v_head_dim must be head_dim with residual_norm, "
                    f"got v_head_dim={self.v_size}, head_dim={self.k_size}"
                )

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for name in ("memory_norm_weight", "memory_norm_bias"):
            shape = (c.num_heads, c.v_size)
            given = nn.Parameter(torch.empty(shape, **factory)) if c.residual_norm else None
            self.register_parameter(name, given)
        self.reset_parameters()

    undecayed = ("M", "memory_norm_weight", "memory_norm_bias")
    memory_norm_weight: nn.Parameter | None
    memory_norm_bias: nn.Parameter | None

    def reset_parameters(self) -> None:
        """Draws M, sets the norm to the identity and alpha to about 0.02."""
        super().reset_parameters()
        if self.memory_norm_weight is not None and self.memory_norm_bias is not None:
            nn.init.ones_(self.memory_norm_weight)
            nn.init.zeros_(self.memory_norm_bias)

    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *gates: Tensor, **options: Any
    ) -> Result:
        theta, alpha, eta = gates
        weight, bias = self.memory_norm_weight, self.memory_norm_bias
        return functional.titans_linear(q, k, v, theta, alpha, eta, weight, bias, **options)


class TitansMLP(MemoryMixer):
    """Layer with Titans' deep memory: an MLP that descends a loss of the tokens it reads.

    o of `functional.titans_mlp`, with q, k and gates as in TitansLinear and ``y = W_o norm(o)``,
    with a gate as in RecurrentConfig. The first weights of the MLP are learned. The step sizes of
    TitansLinear do not bound a deep memory; a smaller max_step helps if one diverges.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, q_conv1d, k_conv1d, v_conv1d, theta_proj,
        alpha_proj and eta_proj with biases, M (H, P), the rows of all matrices of the MLP, and
        o_norm; with a gate g_proj.

    Reference:
        Behrouz et al., Titans: Learning to Memorize at Test Time, 2025, arXiv 2501.00663.

    Example:
        >>> TitansMLP(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(MemoryConfig):
        """Sizes and options, as in MemoryConfig.

        Args:
            depth: number of matrices of the MLP, at least 2.
            memory_dim: width of its hidden layers, default twice head_dim.
        """

        depth: Size = 2
        memory_dim: Size | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.depth < 2:
                raise ValueError(f"TitansMLP: depth must be at least 2, got depth={self.depth}")

        @property
        def hidden(self) -> list[int]:
            """Widths of the hidden layers."""
            return [self.memory_dim or 2 * self.k_size] * (self.depth - 1)

        @property
        def shapes(self) -> list[tuple[int, int]]:
            """Shapes of the matrices."""
            return list(itertools.pairwise([self.k_size, *self.hidden, self.v_size]))

        @property
        def state_size(self) -> tuple[int, ...]:
            return (sum(rows * columns for rows, columns in self.shapes),)

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws matrices with the variance 1 / rows, and sets alpha to about 0.02."""
        super().reset_parameters()
        c = self.config
        parts = self.M.detach().split([rows * columns for rows, columns in c.shapes], -1)
        for part, (rows, _) in zip(parts, c.shapes, strict=True):
            nn.init.normal_(part, std=rows**-0.5)

    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *gates: Tensor, **options: Any
    ) -> Result:
        return functional.titans_mlp(q, k, v, *gates, hidden=self.config.hidden, **options)
