"""Layer of Titans' linear memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
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


class TitansLinear(RecurrentMixer):
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
    class Config(RecurrentConfig):
        """Sizes and options, as in RecurrentConfig, whose num_v_heads is not supported.

        Args:
            mini_batch_size: number C of tokens whose gradients are taken at the same memory; 1 for
                the paper's recurrence without chunks.
            max_step: bound of C theta / (1 - eta), in (0, 1].
            residual_norm: True for a memory that predicts ``k + LN(k M)``; the widths of keys and
                values are then equal.
        """

        mini_batch_size: Size = 16
        max_step: Positive = 1.0
        residual_norm: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.v_heads != self.num_heads:
                raise ValueError(
                    "TitansLinear: num_v_heads must be num_heads or None, "
                    f"got num_v_heads={self.num_v_heads}, num_heads={self.num_heads}"
                )
            if self.max_step > 1:
                raise ValueError(
                    f"TitansLinear: max_step must be in (0, 1], got max_step={self.max_step}"
                )
            if self.residual_norm and self.k_size != self.v_size:
                raise ValueError(
                    "TitansLinear: v_head_dim must be head_dim with residual_norm, "
                    f"got v_head_dim={self.v_size}, head_dim={self.k_size}"
                )

        @property
        def states(self) -> dict[str, tuple[int, ...]]:
            shape = (self.num_heads, *self.state_size)
            return {"m": shape, "s": shape, "n": shape, "position": ()}

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for name in ("theta_proj", "alpha_proj", "eta_proj"):
            self.add_module(name, linear(c, c.dim, c.num_heads, True, **factory))
        self.M = nn.Parameter(torch.empty(c.num_heads, *c.state_size, **factory))
        for name in ("memory_norm_weight", "memory_norm_bias"):
            shape = (c.num_heads, c.v_size)
            given = nn.Parameter(torch.empty(shape, **factory)) if c.residual_norm else None
            self.register_parameter(name, given)
        self.reset_parameters()

    #: Names of the parameters that optimizers do not decay.
    undecayed = ("M", "memory_norm_weight", "memory_norm_bias")
    memory_norm_weight: nn.Parameter | None
    memory_norm_bias: nn.Parameter | None

    def reset_parameters(self) -> None:
        """Draws M, sets the norm to the identity and alpha to about 0.02."""
        nn.init.normal_(self.M, std=self.config.init_std)
        nn.init.constant_(self.get_parameter("alpha_proj.bias"), -4.0)
        if self.memory_norm_weight is not None and self.memory_norm_bias is not None:
            nn.init.ones_(self.memory_norm_weight)
            nn.init.zeros_(self.memory_norm_bias)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates M for each sequence, and zeros, in fp32 (fp64 for fp64).

        `m`, `s` and `n` (B, H, K, V) are M_0, S_0 and N of functional.titans_linear, `position` (B)
        is the number of tokens, and `q_conv`, `k_conv` and `v_conv` are the states of the
        convolutions.
        """
        state = super().new_state(batch, max_length, **storage)
        state["m"].copy_(self.M.detach())
        return state

    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        c, packed = self.config, options["cu_seqlens"]
        wide = torch.promote_types(x.dtype, torch.float32)
        theta, alpha, eta = (
            self.get_submodule(f"{name}_proj")(x).to(wide) for name in ("theta", "alpha", "eta")
        )
        before = options.pop("initial_state")
        if before is None:
            count = x.shape[0] if packed is None else packed.shape[0] - 1
            first = self.M.to(wide).expand(count, -1, -1, -1)
            zeros = torch.zeros_like(first)
            before = (first, zeros, zeros, first.new_zeros(count))
        *matrices, position = before
        o, after = functional.titans_linear(
            *(_unit(q), _unit(k), v),
            theta.sigmoid() * (-eta).sigmoid() * (c.max_step / c.mini_batch_size),
            alpha.sigmoid(),
            eta.sigmoid(),
            *(self.memory_norm_weight, self.memory_norm_bias),
            mini_batch_size=c.mini_batch_size,
            position=position.long(),
            initial_state=tuple(matrices),
            **options,
        )
        tokens = x.shape[1] if packed is None else packed.diff()
        return o, (*after, position + tokens)


def _unit(x: Tensor) -> Tensor:
    """Scales rows to length 1, as `l2norm` of the delta rules does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
